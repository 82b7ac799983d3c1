"""Hyper-connections as fusions of XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mhc.types import STATISTICS_EPS, Boundary, Coefficients, HyperConnection, Update
from pallas_kernels.products import narrow


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
    # Written out: a sum over so short an axis between two others is a slow kernel of its own, this is one pass.
    wide = streams.astype(jnp.float32)
    return narrow(sum(mix[..., c, None] * wide[..., c, :] for c in range(streams.shape[-2])), streams.dtype)


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
    scale, base = connection.scale, connection.base
    pre = jax.nn.sigmoid(m[..., :copies] * scale[0] + base[:copies]) + eps
    post = 2 * jax.nn.sigmoid(m[..., copies : 2 * copies] * scale[1] + base[copies : 2 * copies])
    comb = m[..., 2 * copies :] * scale[2] + base[2 * copies :]
    return Coefficients(pre, post, sinkhorn(comb.reshape(*m.shape[:-1], copies, copies), iterations, eps))


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
    wide = streams.astype(jnp.float32)
    # C is 4: a sum of broadcast products stays one fused pass over the streams, which a tiny matmul would break.
    kept = sum(update.comb[..., i, :, None] * wide[..., i, None, :] for i in range(streams.shape[-2]))
    return narrow(update.post[..., None] * update.y.astype(jnp.float32)[..., None, :] + kept, streams.dtype)
