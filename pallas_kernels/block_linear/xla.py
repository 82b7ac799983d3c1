"""Dense linear map: decode, round, multiply."""

from __future__ import annotations

import jax

from pallas_kernels.block_linear.weights import decode_blocks
from pallas_kernels.formats import Format
from pallas_kernels.products import einsum, narrow, rounded


def block_linear(x: jax.Array, weight: jax.Array, scale: jax.Array | None, *, activation_fmt: Format) -> jax.Array:
    """See :func:`pallas_kernels.block_linear.block_linear`."""
    y = einsum("...i,oi->...o", rounded(activation_fmt, x), decode_blocks(weight, scale, x.dtype))
    return narrow(y, x.dtype)
