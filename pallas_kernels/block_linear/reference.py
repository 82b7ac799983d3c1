"""Dense linear map, block of weights by block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_linear.weights import BLOCK
from pallas_kernels.formats import Format, e8m0_decode


def block_linear(
    x: jax.Array, weight: jax.Array, scale: jax.Array | None, *, activation_fmt: Format, groups: int = 1
) -> jax.Array:
    """See :func:`pallas_kernels.block_linear.block_linear`."""
    w = weight.astype(jnp.float32)
    if scale is not None:
        for row in range(scale.shape[0]):
            for column in range(scale.shape[1]):
                where = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
                w = w.at[where].multiply(e8m0_decode(scale[row, column]))
    rounded = activation_fmt.round(x).astype(jnp.float32)
    parts = zip(jnp.split(rounded, groups, axis=-1), jnp.split(w, groups), strict=True)
    products = [jnp.dot(part, rows.T, precision=lax.Precision.HIGHEST) for part, rows in parts]
    return jnp.concatenate(products, axis=-1).astype(x.dtype)
