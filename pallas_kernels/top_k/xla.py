"""Top-k by XLA's own, which keeps equal scores in index order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tiling import pad_axis


def top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.top_k.top_k`."""
    n = scores.shape[-1]
    # XLA orders -0 below +0.
    values, indices = lax.top_k(jnp.where(scores == 0, 0.0, scores), min(k, n))
    return pad_axis(values, -1, max(k - n, 0), -jnp.inf), pad_axis(indices.astype(jnp.int32), -1, max(k - n, 0), -1)
