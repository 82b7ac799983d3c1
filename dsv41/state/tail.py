"""Compressor tails: the tokens of a group that is not full yet.

A source of ratio r ≥ 2 joins r consecutive tokens into one entry. The up to r − 1 tokens of the open group wait
as float32 pairs (kv, gate); token p waits in slot p mod r.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from dsv41.settings import Settings


@struct.dataclass
class Projections:
    """What the compressor keeps of tokens; both float32 ``[..., tokens, head_dim]``."""

    kv: jax.Array
    gate: jax.Array


Tails = dict[int, Projections]
"""Tails by ratio (≥ 2), ``[sources, batch, ratio − 1, head_dim]``; slots beyond the open group are zero."""


def create_tails(settings: Settings, batch: int) -> Tails:
    """Empty tails for every source that needs one."""
    table, width = settings.table, settings.text.head_dim

    def tail(ratio: int) -> Projections:
        shape = (len(table.sources_of_ratio(ratio)), batch, ratio - 1, width)
        return Projections(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

    return {ratio: tail(ratio) for ratio in table.ratios if ratio > 1}


def gather_groups(tail: Projections, new: Projections, start: jax.Array, ratio: int) -> tuple[jax.Array, Projections]:
    """The groups that a step touches, the first of them completed from the tail.

    Args:
      tail: ``[batch, ratio − 1, D]``; new: ``[batch, query, D]`` of positions start, start + 1, …
      start: int32 ``[batch]``.

    Returns:
      int32 ``[batch]``, the number of the first group, and ``[batch, groups, ratio, D]`` projections. Members
      beyond the step's tokens repeat the last one; the caller masks those groups.
    """
    queries = new.kv.shape[1]
    groups = (queries + 2 * (ratio - 1)) // ratio
    first = start // ratio
    position = first[:, None] * ratio + jnp.arange(groups * ratio, dtype=jnp.int32)
    offset = position - start[:, None]
    index = jnp.where(offset < 0, position % ratio, (ratio - 1) + jnp.minimum(offset, queries - 1))

    def pick(old: jax.Array, fresh: jax.Array) -> jax.Array:
        joined = jnp.concatenate([old, fresh], axis=1)
        picked = jnp.take_along_axis(joined, index[..., None], axis=1)
        return picked.reshape(picked.shape[0], groups, ratio, picked.shape[-1])

    return first, jax.tree.map(pick, tail, new)


def advance_tails(tails: Tails, new: Tails, start: jax.Array, count: jax.Array) -> Tails:
    """The tails after the first ``count`` tokens of a step.

    Args:
      new: the step's projections by ratio, ``[sources, batch, query, D]``.
      start, count: int32 ``[batch]``.
    """
    end = start + count

    def advance(ratio: int) -> Projections:
        position = (end // ratio * ratio)[:, None] + jnp.arange(ratio - 1, dtype=jnp.int32)
        offset = position - start[:, None]
        waits = (position < end[:, None])[None, :, :, None]

        def pick(old: jax.Array, fresh: jax.Array) -> jax.Array:
            index = jnp.where(offset < 0, position % ratio, (ratio - 1) + jnp.clip(offset, 0, fresh.shape[2] - 1))
            joined = jnp.concatenate([old, fresh], axis=2)
            return jnp.where(waits, jnp.take_along_axis(joined, index[None, :, :, None], axis=2), 0.0)

        return jax.tree.map(pick, tails[ratio], new[ratio])

    return {ratio: advance(ratio) for ratio in tails}
