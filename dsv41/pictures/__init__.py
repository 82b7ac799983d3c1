"""Pictures: how large each becomes, reading files into patches, and encoding patches into embeddings of a span."""
