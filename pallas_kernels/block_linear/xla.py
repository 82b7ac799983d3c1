"""Dense linear map: decode, round, multiply."""

from __future__ import annotations

import jax

from pallas_kernels.block_linear.weights import decode_blocks
from pallas_kernels.formats import Format
from pallas_kernels.products import einsum, narrow, rounded


def block_linear(
    x: jax.Array, weight: jax.Array, scale: jax.Array | None, *, activation_fmt: Format, groups: int = 1
) -> jax.Array:
    """See :func:`pallas_kernels.block_linear.block_linear`."""
    x, matrix = rounded(activation_fmt, x), decode_blocks(weight, scale, x.dtype)
    if groups == 1:
        y = einsum("...i,oi->...o", x, matrix)
    else:
        parts = x.reshape(*x.shape[:-1], groups, -1)
        y = einsum("...gi,goi->...go", parts, matrix.reshape(groups, -1, matrix.shape[1]))
        y = y.reshape(*x.shape[:-1], -1)
    return narrow(y, x.dtype)
