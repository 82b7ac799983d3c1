"""Dense linear maps with float8 weights, scaled in square blocks."""

from pallas_kernels.block_linear.api import block_linear
from pallas_kernels.block_linear.weights import decode_blocks

__all__ = ["block_linear", "decode_blocks"]
