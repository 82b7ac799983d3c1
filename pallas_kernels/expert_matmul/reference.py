"""Routed experts with a copy of its experts' matrices for every row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_matmul.weights import ExpertWeights, decode_weights
from pallas_kernels.formats import Format
from pallas_kernels.products import narrow


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
    """See :func:`pallas_kernels.expert_matmul.expert_matmul`."""
    if layer is not None:
        w1, w3, w2 = jax.tree.map(lambda leaf: leaf[layer], (w1, w3, w2))
    real = (expert_ids >= 0) & (expert_ids < w1.weight.shape[0])
    gates, ups, downs = (decode_weights(w, jnp.float32)[jnp.where(real, expert_ids, 0)] for w in (w1, w3, w2))

    def product(w: jax.Array, v: jax.Array) -> jax.Array:
        rounded = activation_fmt.round(v).astype(jnp.float32)
        out = jnp.einsum("tkoi,tki->tko", w, rounded, precision=lax.Precision.HIGHEST)
        return narrow(out, x.dtype).astype(jnp.float32)

    rows = jnp.broadcast_to(x[:, None], (*expert_ids.shape, x.shape[-1]))
    gate = jnp.minimum(product(gates, rows), limit)
    up = jnp.clip(product(ups, rows), -limit, limit)
    out = product(downs, narrow(jax.nn.silu(gate) * up * expert_weights[..., None], x.dtype))
    return jnp.sum(jnp.where(real[..., None], out, 0), axis=1)
