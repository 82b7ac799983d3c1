"""Hyper-connections as fusions of XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import backend
from pallas_kernels.mhc.types import STATISTICS_EPS, Boundary, Coefficients, HyperConnection, Update
from pallas_kernels.products import einsum, narrow

# Values of streams up to which a CPU takes its matrix product: far fewer operations to compile, and neither takes long.
_FEW = 1 << 19


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
    """See :func:`pallas_kernels.mhc.mhc`."""
    if update is not None:
        streams = update_streams(streams, update)
    c = coefficients(streams, connection, eps, iterations)
    return Boundary(streams, rms_norm(mix_streams(streams, mix), norm_weight, norm_eps), c)


def mix_streams(streams: jax.Array, mix: jax.Array) -> jax.Array:
    """Σ_c mix_c h_c in float32, cast to the streams' dtype: ``[..., C, d]`` to ``[..., d]``."""
    return narrow(_sum_streams(mix[..., None], streams)[..., 0, :], streams.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x · rsqrt(mean(x²) + eps) · weight over the last axis, in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return narrow(wide * inverse * weight.astype(jnp.float32), x.dtype)


def coefficients(streams: jax.Array, connection: HyperConnection, eps: float, iterations: int) -> Coefficients:
    """Mixing coefficients of a sub-layer from its incoming streams ``[..., C, d]``."""
    flat = streams.astype(jnp.float32).reshape(*streams.shape[:-2], -1)
    inverse = lax.rsqrt(jnp.mean(jnp.square(flat), axis=-1, keepdims=True) + STATISTICS_EPS)
    product = jnp.einsum(
        "...i,oi->...o", flat, connection.fn, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return squash(product * inverse, connection, streams.shape[-2], eps, iterations)


def squash(m: jax.Array, connection: HyperConnection, copies: int, eps: float, iterations: int) -> Coefficients:
    """Coefficients from the normalised products ``[..., (2+C)·C]``."""
    scale = connection.scale.at[np.repeat(np.arange(3), [copies, copies, copies * copies])].get(mode="clip")
    pre, post, comb = jnp.split(m * scale + connection.base, [copies, 2 * copies], axis=-1)
    comb = sinkhorn(comb.reshape(*m.shape[:-1], copies, copies), iterations, eps)
    return Coefficients(jax.nn.sigmoid(pre) + eps, 2 * jax.nn.sigmoid(post), comb)


def sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Makes ``[..., C, C]`` nearly doubly stochastic; ends on the column step, so that columns sum to 1."""
    comb = jax.nn.softmax(logits, axis=-1) + eps
    comb = comb / (jnp.sum(comb, axis=-2, keepdims=True) + eps)

    # A loop, not 2·(iterations − 1) copies: unrolled, it is 70 times slower to compile and no faster to run.
    def step(_, comb):
        comb = comb / (jnp.sum(comb, axis=-1, keepdims=True) + eps)
        return comb / (jnp.sum(comb, axis=-2, keepdims=True) + eps)

    return lax.fori_loop(0, iterations - 1, step, comb)


def update_streams(streams: jax.Array, update: Update) -> jax.Array:
    """h'_j = post_j · y + Σ_i comb[i, j] · h_i: ``[..., C, d]`` to the same."""
    added = update.post[..., None] * update.y.astype(jnp.float32)[..., None, :]
    return narrow(added + _sum_streams(update.comb, streams), streams.dtype)


def _sum_streams(weights: jax.Array, streams: jax.Array) -> jax.Array:
    """Σ_i weights[..., i, j] · streams[..., i, :] in float32: ``[..., C, J]``, ``[..., C, d]`` to ``[..., J, d]``."""
    wide = streams.astype(jnp.float32)
    if backend.preferred() == "xla" and jax.default_backend() == "cpu" and streams.size <= _FEW:
        return einsum("...ij,...id->...jd", weights, wide)
    # Written out: a sum over so short an axis between two others is a slow kernel of its own, and so is a product of
    # so small matrices; this stays one fused pass over the streams.
    return sum(weights[..., i, :, None] * wide[..., i, None, :] for i in range(streams.shape[-2]))
