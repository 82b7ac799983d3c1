"""One softmax over a query's window and its chosen global entries, with a sink in the denominator."""

from pallas_kernels.sparse_attention.api import sparse_attention
from pallas_kernels.sparse_attention.partial import Partial, merge_partials

__all__ = ["Partial", "merge_partials", "sparse_attention"]
