"""Routed experts as a loop over rows and their experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_matmul.weights import ExpertWeights, decode_weights
from pallas_kernels.formats import Format


def expert_matmul(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w1: ExpertWeights,
    w3: ExpertWeights,
    w2: ExpertWeights,
    *,
    limit: float,
    activation_fmt: Format,
) -> jax.Array:
    """See :func:`pallas_kernels.expert_matmul.expert_matmul`; ids must be concrete."""
    gates, ups, downs = (decode_weights(w, jnp.float32) for w in (w1, w3, w2))

    def product(w: jax.Array, v: jax.Array) -> jax.Array:
        rounded = activation_fmt.round(v).astype(jnp.float32)
        return jnp.dot(w, rounded, precision=lax.Precision.HIGHEST).astype(x.dtype).astype(jnp.float32)

    rows = []
    for row, ids, row_weights in zip(x, expert_ids, expert_weights, strict=True):
        total = jnp.zeros(x.shape[-1], jnp.float32)
        for e, weight in zip(ids, row_weights, strict=True):
            if 0 <= e < gates.shape[0]:
                gate = jnp.minimum(product(gates[e], row), limit)
                up = jnp.clip(product(ups[e], row), -limit, limit)
                total += product(downs[e], (jax.nn.silu(gate) * up * weight).astype(x.dtype))
        rows.append(total)
    return jnp.stack(rows)
