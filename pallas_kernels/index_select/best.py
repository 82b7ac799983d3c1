"""The best of several ordered lists: what parts of a context choose becomes one choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tiling import pad_axis


def best(items: jax.Array, scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The best items of several lists, best first; of equal scores the lowest item.

    A bitonic merge: XLA's sort takes minutes to compile for a TPU.

    Args:
      items: int32 ``[lists, ..., n]``, distinct but for −1; each list ordered as the result is.
      scores: float32 ``[lists, ..., n]``; −inf: not an item.
      count: how many (static).

    Returns:
      items int32 and scores float32 ``[..., count]``; −1 and −inf behind the last.
    """
    n = scores.shape[-1]
    width = 1 << (max(n, count) - 1).bit_length()
    lists = (
        pad_axis(jnp.where(scores == -jnp.inf, -1, items), -1, width - n, -1),
        pad_axis(scores, -1, width - n, -jnp.inf),
    )
    while (number := lists[0].shape[0]) > 1:
        # Of an odd number of lists the last one waits.
        merged = _merge(*(tuple(x[first : number - number % 2 : 2] for x in lists) for first in range(2)))
        lists = tuple(jnp.concatenate([x, y[number - number % 2 :]]) for x, y in zip(merged, lists, strict=True))
    return tuple(x[0, ..., :count] for x in lists)


def best_blocks(blocks: jax.Array, scores: jax.Array, newest: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The newest block and the best others, of what all parts chose.

    Each part has chosen its own newest block whatever its score. That pushes out nothing: the whole choice has one
    place for the newest, so that of any other part's blocks one less than ``count`` can be in it.

    Args:
      blocks, scores: ``[parts, batch, query, chosen]``, numbers in the whole request and largest scores, a part's
        newest block first.
      newest: int32 ``[batch, query]``, number of the newest block; −1 where nothing is visible.
      count: blocks to choose (static).

    Returns:
      blocks and scores ``[batch, query, count]``, as of :class:`~pallas_kernels.index_select.Selection`.
    """
    is_newest = (blocks >= 0) & (blocks == newest[..., None])
    own = jnp.max(jnp.where(is_newest, scores, -jnp.inf), axis=(0, -1))[..., None]
    # As in the kernels, no other score may reach what the newest is ranked by.
    ranked = jnp.where(is_newest, jnp.inf, jnp.minimum(scores, jnp.finfo(jnp.float32).max))
    blocks, ranked = best(*_first_in_order(blocks, ranked), count)
    return blocks, jnp.where(ranked == jnp.inf, own, ranked)


def _first_in_order(items: jax.Array, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lists ``[..., n]`` that are in order but for their first item, in order."""
    lists = (items, scores)
    first, rest = (tuple(x[..., part] for x in lists) for part in (slice(1), slice(1, None)))
    better = jnp.sum(_is_better(rest, first), axis=-1, keepdims=True)
    at = jnp.arange(items.shape[-1])
    return _pick(at == better, first, _pick(at < better, tuple(jnp.roll(x, -1, axis=-1) for x in lists), lists))


def _merge(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The better half of two ordered lists ``(items, scores)`` of a power of two, ordered."""
    turned = tuple(x[..., ::-1] for x in other)
    best = _pick(_is_better(one, turned), one, turned)
    width = best[0].shape[-1]
    at = jnp.arange(width)

    # A loop: written out, stages are slow to compile, the more so where a compiler computes each of them anew in all
    # that read it.
    def stage(i: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        distance = width >> (i + 1)
        leads = at & distance == 0
        after, before = (tuple(jnp.roll(leaf, by, axis=-1) for leaf in x) for by in (-distance, distance))
        partner = _pick(leads, after, before)
        return _pick(_is_better(x, partner) == leads, x, partner)

    return lax.fori_loop(0, width.bit_length() - 1, stage, best)


def _is_better(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> jax.Array:
    return (one[1] > other[1]) | ((one[1] == other[1]) & (one[0] < other[0]))


def _pick(which: jax.Array, *pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return tuple(jnp.where(which, x, y) for x, y in zip(*pair, strict=True))
