"""Float8 matrices with one power-of-two scale for each square block."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.formats import FP8_E8M0, e8m0_decode

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
