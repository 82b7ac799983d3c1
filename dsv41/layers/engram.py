"""Engram: hashed n-gram memory, added to the streams before a layer reads them (model.md, 'Engram').

The addresses depend on tokens only. So everything but the gate (table rows, keys, values) is computed for all
Engram layers before the first of them runs, and the loop over layers only applies the gate. The table may lie outside
the parameters: rows are then given to the step as the table stores them (:mod:`dsv41.engram`).
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax

from dsv41.layers.linear import Linear, declare
from dsv41.numerics.rounding import straight_through
from dsv41.settings import Settings
from pallas_kernels.formats import FP8_E8M0, Packed
from pallas_kernels.products import narrow

EngramRows = dict[int, Packed]
"""Rows given to a step, by Engram layer: leaves ``[batch, query, columns, width']`` as the table stores them."""

_STATISTICS_EPS = 1e-20
_GATE_FLOOR = 1e-6


class EngramInputs(NamedTuple):
    """What the gate needs, for one Engram layer or stacked over all of them.

    Attributes:
      keys: ``[..., batch, query, C, d]``.
      value: ``[..., batch, query, d]``, shared by the copies.
      weight: q·k of the gate, ``[..., C, d]`` float32.
    """

    keys: jax.Array
    value: jax.Array
    weight: jax.Array


class TableParameter(nn.Module):
    """The hashed table: ``rows`` of ``engram_head_dim`` values, FP8 with a power-of-two scale per 32."""

    settings: Settings
    rows: int

    def setup(self):
        width, axes = self.settings.text.engram_head_dim, ("engram_rows", None)
        if self.settings.packed_weights:
            self.weight = declare(self, "weight", (self.rows, width), jnp.float8_e4m3fn, axes)
            self.scale = declare(self, "scale", (self.rows, width // FP8_E8M0.block), jnp.uint8, axes)
        else:
            self.weight = declare(self, "weight", (self.rows, width), self.settings.dtype, axes)
            self.scale = None

    def __call__(self, ids: jax.Array, split: tuple[str, ...] = ()) -> Packed:
        """Rows of ids ``[batch, query, ...]``, as stored: leaves ``[..., width']``.

        ``split``: mesh axes that divide the queries (:attr:`~dsv41.sharding.split.Split.places`).
        """
        parallel = self.settings.parallel
        spread = (*parallel.places("batch"), *split)
        return Packed(self.weight, self.scale).map(lambda leaf: parallel.rows(leaf, ids, "engram_rows", spread))


class Engram(nn.Module):
    """One Engram layer without its table: projection to C keys and a value, gate weights."""

    settings: Settings

    def setup(self):
        text = self.settings.text
        features = text.engram_columns * text.engram_head_dim
        self.wkv = Linear(self.settings, (text.hc_mult + 1) * text.hidden_size, features, ("embed", None))
        shape = (text.hc_mult, text.hidden_size)
        self.q_weight = declare(self, "q_weight", shape, self.settings.dtype, (None, "embed"))
        self.k_weight = declare(self, "k_weight", shape, self.settings.dtype, (None, "embed"))

    def __call__(self, rows: Packed) -> EngramInputs:
        """Projects table rows, leaves ``[batch, query, columns, width']``: FP8 with scales, or floats without."""
        text, dtype = self.settings.text, self.settings.dtype
        if rows.scales is not None:
            values = FP8_E8M0.decode(rows, dtype)
        else:
            values = rows.payload.astype(dtype)
            values = straight_through(FP8_E8M0, values) if self.settings.rounds("dense_weights") else values
        projected = self.wkv(rearrange(values, "b s columns width -> b s (columns width)"))
        keys, value = jnp.split(projected, [text.hc_mult * text.hidden_size], axis=-1)
        keys = rearrange(keys, "b s (c d) -> b s c d", c=text.hc_mult)
        return EngramInputs(keys, value, self.q_weight.astype(jnp.float32) * self.k_weight.astype(jnp.float32))


def engram_gate(streams: jax.Array, inputs: EngramInputs, is_text: jax.Array) -> jax.Array:
    """The gate ``[batch, query, C]`` float32 of streams ``[batch, query, C, d]``; 0 where ``is_text`` is False."""
    h, key = streams.astype(jnp.float32), inputs.keys.astype(jnp.float32)
    dot = jnp.sum(h * inputs.weight * key, axis=-1)
    s = dot * _inverse_rms(h) * _inverse_rms(key) / jnp.sqrt(jnp.float32(h.shape[-1]))
    gate = nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(s), _GATE_FLOOR)), s))
    return jnp.where(is_text[..., None], gate, 0.0)


def _inverse_rms(x: jax.Array) -> jax.Array:
    return lax.rsqrt(jnp.mean(jnp.square(x), axis=-1) + _STATISTICS_EPS)


def add_engram(streams: jax.Array, inputs: EngramInputs, gate: jax.Array) -> jax.Array:
    """h_c + gate_c · value, in float32, returned in the streams' dtype."""
    added = gate[..., None] * inputs.value.astype(jnp.float32)[..., None, :]
    return narrow(streams.astype(jnp.float32) + added, streams.dtype)
