"""Public function of the router."""

from __future__ import annotations

import jax

from pallas_kernels import backend


def route(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    image_bias: jax.Array,
    is_image: jax.Array,
    valid: jax.Array,
    *,
    k: int,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Each row's k experts of the largest score + bias; weights are the scores, normalised, without the bias.

    The score is √softplus of x · weightᵀ, a product of float32 values. Equal sums go to the lower expert.

    Args:
      x: ``[rows, hidden]`` bfloat16 or float32.
      weight: ``[experts, hidden]`` bfloat16 or float32.
      bias: ``[experts]`` float32.
      image_bias: ``[experts]`` float32, in place of ``bias`` for rows of images.
      is_image: ``[rows]`` bool.
      valid: ``[rows]`` bool; other rows, which may hold anything, are sent to the number of experts: nobody.
      k: experts of a row (static), at most all.
      scale: sum of a row's weights (static).

    Returns:
      experts ``[rows, k]`` int32, best first, and weights ``[rows, k]`` float32, undefined in rows that are not valid.
    """
    return backend.run("route", x, weight, bias, image_bias, is_image, valid, k=k, scale=scale)
