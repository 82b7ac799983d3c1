"""One softmax over a query's window and its chosen global entries, with a sink in the denominator."""

from pallas_kernels.sparse_attention.api import sparse_attention

__all__ = ["sparse_attention"]
