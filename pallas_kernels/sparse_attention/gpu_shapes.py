"""What the Triton kernels of the sparse attention share: block sizes, and how a tile of entries is loaded."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

# Triton's matrix products need 16 rows; 64 heads' outputs of 512 values fill half of the registers of 8 warps.
_LEAST_HEADS, _MOST_HEADS = 16, 64


class Blocks(NamedTuple):
    """Heads and entries that a program works on at once, and its warps."""

    heads: int
    tile: int
    warps: int


def blocks(heads: int, dtype: jnp.dtype) -> Blocks:
    """Sizes for so many heads and this operand dtype; float32 products have no tensor cores to fill."""
    padded = max(_LEAST_HEADS, 1 << (heads - 1).bit_length())
    if jnp.dtype(dtype) == jnp.float32:
        return Blocks(_LEAST_HEADS, 16, 4)
    return Blocks(min(padded, _MOST_HEADS), 64, 8 if padded >= _MOST_HEADS else 4)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Float32 product; float32 operands are not rounded to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def load_entries(entries_ref, seen_ref, token, i, tile: int) -> tuple[jax.Array, jax.Array]:
    """Tile i of a token's list: entries ``[tile, head_dim]``, 0 where there is nothing, and which are there."""
    rows = plgpu.load(seen_ref.at[token, i * tile + jnp.arange(tile)])
    column = jnp.arange(entries_ref.shape[1])
    # Masked loads, not a product with 0: unseen rows may hold NaN.
    entries = plgpu.load(entries_ref.at[rows[:, None], column[None, :]], mask=(rows >= 0)[:, None], other=0)
    return entries, rows >= 0
