"""What a configuration costs on a mesh, computed from its numbers: nothing is traced, compiled or allocated."""
