"""Public function of the dense linear map."""

from __future__ import annotations

import jax

from pallas_kernels import backend
from pallas_kernels.formats import Format


def block_linear(x: jax.Array, weight: jax.Array, scale: jax.Array | None, *, activation_fmt: Format) -> jax.Array:
    """x · Wᵀ with x rounded to ``activation_fmt``, accumulated in float32; derivatives pass the rounding unchanged.

    Args:
      x: ``[..., in]`` bfloat16 or float32.
      weight: ``[out, in]`` float8_e4m3fn, or plain floats.
      scale: E8M0 bytes ``[out/32, in/32]`` uint8; None with plain floats.
      activation_fmt: rounding of x (static).

    Returns:
      ``[..., out]`` in x's dtype.

    Raises:
      ValueError: the scales do not fit the weight.
    """
    return backend.run("block_linear", x, weight, scale, activation_fmt=activation_fmt)
