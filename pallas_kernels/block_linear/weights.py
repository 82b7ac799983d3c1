"""Float8 matrices with one power-of-two scale for each square block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import E4M3_MAX, FP8_E8M0, e4m3_decode, e4m3_encode, e8m0_decode, e8m0_encode_ceil

# A weight's scale covers as many rows and columns as an activation's covers values.
BLOCK = FP8_E8M0.block


def decode_blocks(weight: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """The matrix ``[out, in]`` as floats; exact in bfloat16 if it is float8.

    Args:
      weight: ``[out, in]`` float8_e4m3fn, or plain floats.
      scale: E8M0 bytes ``[out/32, in/32]`` uint8; None with plain floats.

    Raises:
      ValueError: the scales are not one for each 32×32 block.
    """
    if scale is None:
        return weight.astype(dtype)
    out, width = weight.shape
    if (scale.shape[0] * BLOCK, scale.shape[1] * BLOCK) != (out, width):
        raise ValueError(f"scales {scale.shape} are not one for each {BLOCK}×{BLOCK} block of a weight {weight.shape}")
    blocks = weight.astype(jnp.float32).reshape(out // BLOCK, BLOCK, width // BLOCK, BLOCK)
    return (blocks * e8m0_decode(scale)[:, None, :, None]).reshape(out, width).astype(dtype)


def encode_blocks(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse of :func:`decode_blocks`: float8_e4m3fn ``[..., out, in]`` and E8M0 bytes ``[..., out/32, in/32]``.

    Raises:
      ValueError: a side of the matrix is not a multiple of the block.
    """
    *lead, out, width = matrix.shape
    if out % BLOCK or width % BLOCK:
        raise ValueError(f"a matrix {out} × {width} has no whole {BLOCK}×{BLOCK} blocks")
    blocks = matrix.astype(jnp.float32).reshape(*lead, out // BLOCK, BLOCK, width // BLOCK, BLOCK)
    largest = jnp.maximum(jnp.max(jnp.abs(blocks), axis=(-3, -1)), FP8_E8M0.floor)
    scale = e8m0_encode_ceil(largest / E4M3_MAX)
    codes = e4m3_encode(jnp.clip(blocks / e8m0_decode(scale)[..., :, None, :, None], -E4M3_MAX, E4M3_MAX))
    return lax.bitcast_convert_type(codes.reshape(matrix.shape), jnp.float8_e4m3fn), scale


def round_blocks(matrix: jax.Array) -> jax.Array:
    """``decode_blocks(*encode_blocks(matrix))`` in the matrix's dtype."""
    *lead, out, width = matrix.shape
    weight, scale = encode_blocks(matrix)
    values = e4m3_decode(lax.bitcast_convert_type(weight, jnp.uint8))
    blocks = values.reshape(*lead, out // BLOCK, BLOCK, width // BLOCK, BLOCK)
    return (blocks * e8m0_decode(scale)[..., :, None, :, None]).reshape(matrix.shape).astype(matrix.dtype)
