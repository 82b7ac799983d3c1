"""Single-pass hyper-connections (mHC): C residual streams with learned mixing (model.md, 'Residual streams').

A sub-layer reads Σ_c mix_c h_c with the mix that the *previous* sub-layer predicted; its own coefficients come
from the same incoming streams, so that one pass over them serves the mixing and the statistics.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from dsv41.config import TextConfig
from dsv41.layers.linear import declare, matmul
from dsv41.settings import Settings
from pallas_kernels.products import narrow

_STATISTICS_EPS = 1e-20


class HyperConnection(NamedTuple):
    """Parameters of one sub-layer, all float32: fn ``[(2+C)·C, C·d]``, base ``[(2+C)·C]``, scale ``[3]``."""

    fn: jax.Array
    base: jax.Array
    scale: jax.Array


class Coefficients(NamedTuple):
    """pre ``[..., C]`` (the next sub-layer's mix), post ``[..., C]``, comb ``[..., C, C]``; float32."""

    pre: jax.Array
    post: jax.Array
    comb: jax.Array


def declare_hyper_connection(module: nn.Module, settings: Settings, sublayer: str) -> HyperConnection:
    """Declares ``hc_{sublayer}_fn/base/scale`` in the calling module, under the public names."""
    copies, width = settings.text.hc_mult, settings.text.hidden_size
    rows = (2 + copies) * copies
    return HyperConnection(
        declare(module, f"hc_{sublayer}_fn", (rows, copies * width), jnp.float32, (None, "embed")),
        declare(module, f"hc_{sublayer}_base", (rows,), jnp.float32, (None,)),
        declare(module, f"hc_{sublayer}_scale", (3,), jnp.float32, (None,)),
    )


def first_mix(streams: jax.Array) -> jax.Array:
    """The mix before the first sub-layer: one-hot on copy 0. Streams ``[..., C, d]`` to ``[..., C]`` float32."""
    return jnp.zeros(streams.shape[:-1], jnp.float32).at[..., 0].set(1.0)


def mix_streams(streams: jax.Array, mix: jax.Array) -> jax.Array:
    """Σ_c mix_c h_c in float32, cast to the streams' dtype: ``[..., C, d]`` to ``[..., d]``."""
    # Written out: a sum over so short an axis between two others is a slow kernel of its own, this is one pass.
    wide = streams.astype(jnp.float32)
    return narrow(sum(mix[..., c, None] * wide[..., c, :] for c in range(streams.shape[-2])), streams.dtype)


def coefficients(streams: jax.Array, connection: HyperConnection, text: TextConfig) -> Coefficients:
    """Mixing coefficients of a sub-layer from its incoming streams ``[..., C, d]``."""
    copies, eps = text.hc_mult, text.hc_eps
    flat = streams.astype(jnp.float32).reshape(*streams.shape[:-2], -1)
    inverse = lax.rsqrt(jnp.mean(jnp.square(flat), axis=-1, keepdims=True) + _STATISTICS_EPS)
    m = matmul(flat, connection.fn) * inverse
    scale, base = connection.scale, connection.base
    pre = nn.sigmoid(m[..., :copies] * scale[0] + base[:copies]) + eps
    post = 2 * nn.sigmoid(m[..., copies : 2 * copies] * scale[1] + base[copies : 2 * copies])
    comb = m[..., 2 * copies :] * scale[2] + base[2 * copies :]
    return Coefficients(pre, post, sinkhorn(comb.reshape(*m.shape[:-1], copies, copies), text.hc_sinkhorn_iters, eps))


def sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Makes ``[..., C, C]`` nearly doubly stochastic; ends on the column step, so that columns sum to 1."""
    comb = nn.softmax(logits, axis=-1) + eps
    comb = comb / (jnp.sum(comb, axis=-2, keepdims=True) + eps)

    # A loop, not 2·(iterations − 1) copies: unrolled, it is 70 times slower to compile and no faster to run.
    def step(_, comb):
        comb = comb / (jnp.sum(comb, axis=-1, keepdims=True) + eps)
        return comb / (jnp.sum(comb, axis=-2, keepdims=True) + eps)

    return lax.fori_loop(0, iterations - 1, step, comb)


def update_streams(streams: jax.Array, y: jax.Array, c: Coefficients) -> jax.Array:
    """h'_j = post_j · y + Σ_i comb[i, j] · h_i: streams ``[..., C, d]`` and output y ``[..., d]``."""
    wide = streams.astype(jnp.float32)
    # C is 4: a sum of broadcast products stays one fused pass over the streams, which a tiny matmul would break.
    kept = sum(c.comb[..., i, :, None] * wide[..., i, None, :] for i in range(streams.shape[-2]))
    return narrow(c.post[..., None] * y.astype(jnp.float32)[..., None, :] + kept, streams.dtype)
