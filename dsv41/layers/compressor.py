"""The compressor of a KV source: r tokens become one global entry (model.md, 'Compressor')."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dsv41.layers.flow import LayerInputs, RotaryTable, Step
from dsv41.layers.linear import Linear, RMSNorm, WideLinear
from dsv41.numerics.rotary import csa_frequencies, rotary_table, rotate
from dsv41.settings import Settings
from dsv41.state.memory import SourcePool, append_entries
from dsv41.state.tail import Projections, gather_groups
from pallas_kernels.products import narrow


class Groups(NamedTuple):
    """The groups that a step touches.

    Attributes:
      latents: ``[batch, groups, head_dim]``, not rotated, not rounded.
      first: int32 ``[batch]``, number of the first group.
      rope: rotary table of the groups' first positions, ``[batch, groups, R/2]``.
      projections: the step's tokens for the tail; None for ratio 1.
    """

    latents: jax.Array
    first: jax.Array
    rope: RotaryTable
    projections: Projections | None


class Compressor(nn.Module):
    """Per channel, a softmax over the gates of r tokens weighs their values; ratio 1 has no gate and no tail."""

    settings: Settings
    ratio: int

    def setup(self):
        text = self.settings.text
        axes = ("head_dim", "embed")
        if self.ratio > 1:
            self.wkv = WideLinear(self.settings, text.head_dim, text.hidden_size, axes)
            self.wgate = WideLinear(self.settings, text.head_dim, text.hidden_size, axes)
        else:
            self.wkv = Linear(self.settings, text.head_dim, text.hidden_size, axes, quantised=False)
        self.norm = RMSNorm(self.settings, text.head_dim, "head_dim")

    def __call__(self, x: jax.Array, inputs: LayerInputs, step: Step) -> Groups:
        """Latents of the groups that the step's tokens complete or enter.

        Args:
          x: ``[batch, query, d]``, of this device's columns. A group may begin in one device's and end in the next's.
        """
        if self.ratio == 1:
            first, projections, latents = step.start, None, step.split.whole(self.norm(self.wkv(x)))
        else:
            projections = step.split.whole(Projections(self.wkv(x), self.wgate(x)))
            tail = jax.tree.map(lambda t: t[inputs.source_slot], step.tails[self.ratio])
            first, members = gather_groups(tail, projections, step.start, self.ratio)
            pooled = jnp.sum(nn.softmax(members.gate, axis=2) * members.kv, axis=2)
            latents = self.norm(narrow(pooled, x.dtype))
        number = first[:, None] + jnp.arange(latents.shape[1], dtype=jnp.int32)
        rope = rotary_table(step.group_positions(number, self.ratio), csa_frequencies(self.settings.text))
        return Groups(latents, first, rope, projections)

    def append(
        self, memory: SourcePool, groups: Groups, keys: jax.Array, inputs: LayerInputs, step: Step
    ) -> SourcePool:
        """Writes the complete groups' entries and index keys ``[batch, groups, index_head_dim]``."""
        # A replayed prefix has its entries already: the groups below write_from (a multiple of the ratio) are
        # skipped by shifting the first written row, so that no position appends twice.
        complete = (step.start + step.count) // self.ratio - groups.first
        skipped = jnp.maximum(step.write_from // self.ratio - groups.first, 0)
        row = jnp.arange(groups.latents.shape[1], dtype=jnp.int32)
        index = jnp.minimum(row + skipped[:, None], row.shape[0] - 1)[..., None]
        main, keys = (jnp.take_along_axis(v, index, axis=1) for v in (rotate(groups.latents, groups.rope), keys))
        return append_entries(
            memory,
            self.settings,
            step.page_table,
            inputs.source_slot,
            groups.first + skipped,
            jnp.maximum(complete - skipped, 0),
            main,
            keys,
        )
