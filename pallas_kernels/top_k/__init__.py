"""Exact top-k along the last axis; ties go to the lower index."""

from pallas_kernels.top_k.api import top_k

__all__ = ["top_k"]
