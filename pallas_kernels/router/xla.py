"""The router by XLA's own top-k, which keeps equal scores in the order of their index."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.choice import choice
from pallas_kernels.products import wide_linear

# Keeps a row whose scores all vanish from dividing by zero.
TINY = 1e-20


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
    """See :func:`pallas_kernels.router.route`."""
    # Rows that are nobody's may hold NaN, which must not reach the weight's gradient.
    scores = expert_scores(wide_linear(jnp.where(valid[:, None], x, 0), weight))
    experts = choice(lax.top_k(scores + jnp.where(is_image[:, None], image_bias, bias), k)[1])
    weights = expert_weights(scores, experts, scale)
    return jnp.where(valid[:, None], experts, weight.shape[0]).astype(jnp.int32), weights


def expert_scores(logits: jax.Array) -> jax.Array:
    """√softplus."""
    return jnp.sqrt(jax.nn.softplus(logits))


def expert_weights(scores: jax.Array, experts: jax.Array, scale: float) -> jax.Array:
    """The chosen scores ``[rows, k]``, normalised to ``scale``."""
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + TINY)
    return weights * scale
