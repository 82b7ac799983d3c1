"""Public function of the routed experts."""

from __future__ import annotations

import jax

from pallas_kernels import backend
from pallas_kernels.expert_matmul.weights import ExpertWeights
from pallas_kernels.formats import Format


def expert_matmul(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w1: ExpertWeights,
    w3: ExpertWeights,
    w2: ExpertWeights,
    *,
    layer: jax.Array | None = None,
    limit: float,
    activation_fmt: Format,
) -> jax.Array:
    """Sum over a row's experts e of W2_e · (silu(min(W1_e x, limit)) · clip(W3_e x, ±limit) · weight).

    x and the inner activation are rounded to ``activation_fmt``; products accumulate in float32 and are returned in
    x's dtype, what lies between them and the sum over experts is float32. Derivatives pass the roundings unchanged.

    Args:
      x: ``[rows, hidden]`` bfloat16 or float32.
      expert_ids: ``[rows, k]`` int32, distinct in a row; an id that is none of the experts contributes nothing (padded
        rows, experts that lie elsewhere).
      expert_weights: ``[rows, k]`` float32.
      layer: scalar int32; given, the matrices are those of several layers ``[layers, experts, ...]``, and this one's
        are used where they lie, without a copy, by back ends that can.
      w1: gate, ``[experts, inner, hidden]``.
      w3: up, ``[experts, inner, hidden]``.
      w2: down, ``[experts, hidden, inner]``.
      limit: clamp of the SwiGLU: gate from above, up on both sides (static).
      activation_fmt: rounding of the products' inputs (static).

    Returns:
      ``[rows, hidden]`` float32.
    """
    static = {"layer": layer, "limit": limit, "activation_fmt": activation_fmt}
    return backend.run("expert_matmul", x, expert_ids, expert_weights, w1, w3, w2, **static)
