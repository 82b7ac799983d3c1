"""Which experts a row is sent to, and with which weights."""

from pallas_kernels.router.api import route

__all__ = ["route"]
