"""Which experts a row is sent to, and with which weights."""

from pallas_kernels.router.api import route
from pallas_kernels.router.xla import expert_scores

__all__ = ["expert_scores", "route"]
