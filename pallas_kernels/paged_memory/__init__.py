"""Entries of many requests in one pool of pages: write new ones, read chosen ones."""

from pallas_kernels.paged_memory.api import append, gather

__all__ = ["append", "gather"]
