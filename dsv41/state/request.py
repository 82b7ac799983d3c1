"""The state of a batch of requests, and how the accepted part of a step moves it.

A forward pass reads the state and returns a *delta*: the entries of all its tokens. :func:`commit_encoder` and
:func:`commit_decoder` then write the first ``count`` tokens of it. Only the global memory is extended during the
pass itself; that needs no undoing, because an entry beyond a request's length is invisible and is written again.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from dsv41.numerics.ngram_hash import next_tail
from dsv41.settings import Settings
from dsv41.state.memory import Memory, create_memory
from dsv41.state.ring import Ring, create_ring, write_ring
from dsv41.state.tail import Tails, advance_tails, create_tails
from pallas_kernels.formats import Packed


@struct.dataclass
class ModelState:
    """Everything that the model keeps of a batch of requests between steps.

    Attributes:
      memory: global entries of all requests, in shared pages.
      page_table: int32 ``[batch, table_pages]``, the pages of each request in order; values outside the pool
        mean 'no page'. On a mesh they count from the pool of the request's batch shard, of which page j is on shard
        j mod C of the context (:mod:`dsv41.sharding.context`).
      encoder_ring, decoder_ring: window entries of the two stacks of layers.
      tails: tokens of open compression groups.
      ngram_tail: int32 ``[batch, max n-gram − 1]``, the last compressed ids, oldest first; −1 stands for
        'before the start' and 'image span'.
      length: int32 ``[batch]``, positions that the encoder has consumed.
    """

    memory: Memory
    page_table: jax.Array
    encoder_ring: Ring
    decoder_ring: Ring
    tails: Tails
    ngram_tail: jax.Array
    length: jax.Array


@struct.dataclass
class Segment:
    """Encoder outputs of consecutive positions, ready for the decoder.

    Attributes:
      streams: ``[batch, query, C, d]``; mix: ``[batch, query, C]`` float32.
      is_image: bool ``[batch, query]``.
      lookback: int32 ``[batch, query, max n-gram]``, compressed ids of the position and those before it.
      start, count: int32 ``[batch]``; row i of request b is position start[b] + i, live while i < count[b].
      documents: see :class:`~dsv41.model.TokenBatch`.
      reach: int32 ``[batch, query]``, how many window entries each position sees, the newest ones; None: all.
    """

    streams: jax.Array
    mix: jax.Array
    is_image: jax.Array
    lookback: jax.Array
    start: jax.Array
    count: jax.Array
    documents: jax.Array | None = None
    reach: jax.Array | None = None


@struct.dataclass
class EncoderDelta:
    """What an encoder pass adds.

    Attributes:
      memory: the extended global memory.
      entries: window entries, leaves ``[encoder layers, batch, query, width']``.
      projections: tokens for the compressor tails, by ratio ``[sources, batch, query, head_dim]``.
      ids: compressed ids ``[batch, query]``.
    """

    memory: Memory
    entries: Packed
    projections: Tails
    ids: jax.Array


def create_state(settings: Settings, batch: int, pages: int, table_pages: int) -> ModelState:
    """An empty state: ``batch`` requests of up to ``table_pages`` pages each, ``pages`` pages in the pool."""
    table = settings.table
    return ModelState(
        memory=create_memory(settings, pages),
        page_table=jnp.full((batch, table_pages), pages, jnp.int32),
        encoder_ring=create_ring(settings, len(table.encoder), batch),
        decoder_ring=create_ring(settings, len(table.decoder), batch),
        tails=create_tails(settings, batch),
        ngram_tail=jnp.full((batch, settings.text.engram_max_ngram_size - 1), -1, jnp.int32),
        length=jnp.zeros((batch,), jnp.int32),
    )


def create_sequential_state(settings: Settings, batch: int, tokens: int) -> ModelState:
    """An empty state in which every request holds its own pages for ``tokens`` tokens, in order.

    It is bound to the default device, where a loaded model's parameters are: a step whose state is bound to no
    device at first, and to one from its own output on, would compile twice.
    """
    table_pages = -(-tokens // settings.page_tokens)
    state = create_state(settings, batch, batch * table_pages, table_pages)
    state = state.replace(page_table=jnp.arange(batch * table_pages, dtype=jnp.int32).reshape(batch, table_pages))
    return jax.device_put(state, jax.local_devices()[0])


def commit_encoder(state: ModelState, delta: EncoderDelta, count: jax.Array) -> ModelState:
    """The state after the encoder consumed the first ``count`` [batch] tokens of a pass."""
    return state.replace(
        memory=delta.memory,
        encoder_ring=write_ring(state.encoder_ring, delta.entries, state.length, count),
        tails=advance_tails(state.tails, delta.projections, state.length, count),
        ngram_tail=next_tail(delta.ids, state.ngram_tail, count),
        length=state.length + count,
    )


def commit_decoder(state: ModelState, entries: Packed, start: jax.Array, count: jax.Array) -> ModelState:
    """The state after the decoder consumed the first ``count`` [batch] tokens of a segment from ``start``."""
    return state.replace(decoder_ring=write_ring(state.decoder_ring, entries, start, count))


def forget_decoder(state: ModelState) -> ModelState:
    """Empties the decoder's rings: a replayed segment must not see what was there before."""
    ring = state.decoder_ring
    return state.replace(decoder_ring=ring.replace(positions=jnp.full_like(ring.positions, -1)))


def create_segment(settings: Settings, batch: int, length: int) -> Segment:
    """An empty encoder tail of up to ``length`` positions (officially 128: the last encoder outputs)."""
    text = settings.text
    return Segment(
        streams=jnp.zeros((batch, length, text.hc_mult, text.hidden_size), settings.dtype),
        mix=jnp.zeros((batch, length, text.hc_mult), jnp.float32),
        is_image=jnp.zeros((batch, length), bool),
        lookback=jnp.full((batch, length, text.engram_max_ngram_size), -1, jnp.int32),
        start=jnp.zeros((batch,), jnp.int32),
        count=jnp.zeros((batch,), jnp.int32),
    )


def extend_segment(tail: Segment, new: Segment) -> Segment:
    """Rolls the encoder tail on: the last positions of tail ‖ new that fit into the tail's length.

    ``new`` continues where ``tail`` ends; an empty tail starts at the new segment.
    """
    length, queries = tail.is_image.shape[1], new.is_image.shape[1]
    end = new.start + new.count
    begin = jnp.where(tail.count > 0, tail.start, new.start)
    start = jnp.maximum(begin, end - length)
    position = start[:, None] + jnp.arange(length, dtype=jnp.int32)
    from_new = position - new.start[:, None]
    index = jnp.where(
        from_new < 0, jnp.clip(position - begin[:, None], 0, length - 1), length + jnp.clip(from_new, 0, queries - 1)
    )

    def pick(old: jax.Array, fresh: jax.Array) -> jax.Array:
        joined = jnp.concatenate([old, fresh], axis=1)
        return jnp.take_along_axis(joined, index.reshape(*index.shape, *(1,) * (old.ndim - 2)), axis=1)

    return Segment(
        *(pick(getattr(tail, name), getattr(new, name)) for name in ("streams", "mix", "is_image", "lookback")),
        start=start,
        count=end - start,
    )


def select_requests(state: ModelState, rows: jax.Array) -> ModelState:
    """The state of some requests (int32 ``[rows]``) over the same memory.

    A number that is no request's stands for nobody: whatever its row becomes, :func:`update_requests` leaves it out.
    """
    return _over_requests(lambda axis, leaf: jnp.take(leaf, rows, axis=axis, mode="clip"), state)


def update_requests(state: ModelState, rows: jax.Array, part: ModelState) -> ModelState:
    """Puts back what :func:`select_requests` took; the memory is the part's."""

    def put(axis: int, leaf: jax.Array, new: jax.Array) -> jax.Array:
        return leaf.at[:, rows].set(new, mode="drop") if axis else leaf.at[rows].set(new, mode="drop")

    return _over_requests(put, state, part).replace(memory=part.memory)


def _over_requests(f: Callable[..., jax.Array], state: ModelState, *others: ModelState) -> ModelState:
    """Applies f(batch axis, leaf, *other leaves) to every leaf that has a batch axis."""

    def over(name: str, axis: int):
        return jax.tree.map(lambda *leaves: f(axis, *leaves), *(getattr(s, name) for s in (state, *others)))

    def ring(name: str) -> Ring:
        rings = [getattr(s, name) for s in (state, *others)]
        entries = jax.tree.map(lambda *leaves: f(1, *leaves), *(r.entries for r in rings))
        return Ring(entries, f(0, *(r.positions for r in rings)))

    return state.replace(
        page_table=over("page_table", 0),
        encoder_ring=ring("encoder_ring"),
        decoder_ring=ring("decoder_ring"),
        tails=over("tails", 1),
        ngram_tail=over("ngram_tail", 0),
        length=over("length", 0),
    )
