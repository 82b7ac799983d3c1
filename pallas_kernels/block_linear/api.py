"""Public function of the dense linear map."""

from __future__ import annotations

import jax

from pallas_kernels import backend
from pallas_kernels.formats import Format


def block_linear(
    x: jax.Array, weight: jax.Array, scale: jax.Array | None, *, activation_fmt: Format, groups: int = 1
) -> jax.Array:
    """x · Wᵀ with x rounded to ``activation_fmt``, accumulated in float32; derivatives pass the rounding unchanged.

    Args:
      x: ``[..., groups · in]`` bfloat16 or float32.
      weight: ``[out, in]`` float8_e4m3fn, or plain floats.
      scale: E8M0 bytes ``[out/32, in/32]`` uint8; None with plain floats.
      activation_fmt: rounding of x (static).
      groups: equal parts of x, each multiplied with its own part of the weight's rows (static).

    Returns:
      ``[..., out]`` in x's dtype.

    Raises:
      ValueError: the scales or x do not fit the weight, or its rows are no multiple of the groups.
    """
    out, width = weight.shape
    if x.shape[-1] != groups * width or out % groups:
        raise ValueError(f"x {x.shape} in {groups} groups does not fit a weight {weight.shape}")
    return backend.run("block_linear", x, weight, scale, activation_fmt=activation_fmt, groups=groups)
