"""Hyper-connections in float64 on numpy arrays, rounded where the operation promises a rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mhc.types import STATISTICS_EPS, Boundary, Coefficients, HyperConnection, Update


def mhc(
    streams: jax.Array,
    mix: jax.Array,
    connection: HyperConnection,
    norm_weight: jax.Array,
    update: Update | None = None,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> Boundary:
    """See :func:`pallas_kernels.mhc.mhc`; not differentiable."""
    dtype, copies = streams.dtype, streams.shape[-2]
    h = _wide(streams)
    if update is not None:
        kept = np.einsum("...ij,...id->...jd", _wide(update.comb), h)
        h = _rounded(_wide(update.post)[..., None] * _wide(update.y)[..., None, :] + kept, dtype)

    x = _rounded(np.einsum("...c,...cd->...d", _wide(mix), h), dtype)
    x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + norm_eps) * _wide(norm_weight)

    flat = h.reshape(*h.shape[:-2], -1)
    m = flat @ _wide(connection.fn).T / np.sqrt(np.mean(flat**2, -1, keepdims=True) + STATISTICS_EPS)
    scale, base = _wide(connection.scale), _wide(connection.base)
    m = m * np.repeat(scale, [copies, copies, copies * copies]) + base
    pre = 1 / (1 + np.exp(-m[..., :copies])) + eps
    post = 2 / (1 + np.exp(-m[..., copies : 2 * copies]))
    logits = m[..., 2 * copies :].reshape(*m.shape[:-1], copies, copies)
    comb = np.exp(logits - logits.max(-1, keepdims=True))
    comb = comb / comb.sum(-1, keepdims=True) + eps
    comb = comb / (comb.sum(-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdims=True) + eps)
        comb = comb / (comb.sum(-2, keepdims=True) + eps)
    coefficients = Coefficients(*(jnp.asarray(c, jnp.float32) for c in (pre, post, comb)))
    return Boundary(jnp.asarray(h, dtype), jnp.asarray(x, dtype), coefficients)


def _wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)


def _rounded(x: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    # By way of float32: numpy's bfloat16 cannot be reached from float64 in one rounding, and operations sum in float32.
    return x.astype(np.float32).astype(dtype).astype(np.float64)
