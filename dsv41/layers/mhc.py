"""Single-pass hyper-connections (mHC): C residual streams with learned mixing (model.md, 'Residual streams').

A sub-layer reads Σ_c mix_c h_c with the mix that the *previous* sub-layer predicted; its own coefficients come
from the same incoming streams, so that one pass over them serves the mixing and the statistics
(:mod:`pallas_kernels.mhc`). Here are a sub-layer's parameters, and what that operation is given of the model.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from dsv41.config import TextConfig
from dsv41.layers.linear import RMSNorm, declare
from dsv41.settings import Settings
from pallas_kernels.mhc import Boundary, Coefficients, HyperConnection, Update, mhc, xla
from pallas_kernels.mhc.xla import mix_streams, sinkhorn

__all__ = [
    "Coefficients",
    "HyperConnection",
    "coefficients",
    "cross",
    "declare_hyper_connection",
    "first_mix",
    "mix_streams",
    "sinkhorn",
    "update_streams",
]


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


def cross(
    streams: jax.Array, mix: jax.Array, connection: HyperConnection, norm: RMSNorm, update: Update | None = None
) -> Boundary:
    """The streams ``[..., C, d]``, the normalised input ``[..., d]`` and the coefficients that a sub-layer starts from.

    Args:
      mix: ``[..., C]`` float32, predicted by the sub-layer before.
      connection, norm: the sub-layer's own.
      update: of the sub-layer before, where nothing came between the two.
    """
    text = norm.settings.text
    return mhc(
        streams,
        mix,
        connection,
        norm.weight,
        update,
        norm_eps=text.rms_norm_eps,
        eps=text.hc_eps,
        iterations=text.hc_sinkhorn_iters,
    )


def coefficients(streams: jax.Array, connection: HyperConnection, text: TextConfig) -> Coefficients:
    """Mixing coefficients of a sub-layer from its incoming streams ``[..., C, d]``."""
    return xla.coefficients(streams, connection, text.hc_eps, text.hc_sinkhorn_iters)


def update_streams(streams: jax.Array, y: jax.Array, c: Coefficients) -> jax.Array:
    """h'_j = post_j · y + Σ_i comb[i, j] · h_i: streams ``[..., C, d]`` and output y ``[..., d]``."""
    return xla.update_streams(streams, Update(y, c.post, c.comb))
