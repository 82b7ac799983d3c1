"""Generation: sampling, page allocation, the batching engine."""
