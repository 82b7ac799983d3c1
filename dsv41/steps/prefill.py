"""Prefill: prompts enter in chunks; the decoder sees all positions (exact) or the last ones (replay).

Exact passes every chunk through both stacks. Bounded replay passes chunks through the encoder only, keeps the
last encoder outputs, and at the end passes those through the decoder with its window cut at their start: for
prompts up to the window it equals exact, for longer ones it is an approximation that the model was trained with.
The global memory is the same bytes in both.

On a mesh that divides the context, so are the columns of a chunk that is longer than the window
(:mod:`dsv41.sharding.split`); what leaves a step is whole on every device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv41.layers.engram import EngramRows
from dsv41.model import Decoded, Model, TokenBatch
from dsv41.sharding.steps import LAYERED, REQUESTS, STATE, VARIABLES, sharded_step
from dsv41.state.request import (
    ModelState,
    Segment,
    commit_decoder,
    commit_encoder,
    extend_segment,
    forget_decoder,
    select_requests,
    update_requests,
)

Variables = dict


def last_live(values: jax.Array, count: jax.Array) -> jax.Array:
    """The row of each request's last live token: ``[batch, query, …]`` to ``[batch, …]`` (the first if none)."""
    index = jnp.maximum(count - 1, 0).reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, index, axis=1)[:, 0]


def encode_and_commit(
    model: Model,
    variables: Variables,
    state: ModelState,
    batch: TokenBatch,
    write_from: jax.Array | None = None,
    engram_rows: EngramRows | None = None,
) -> tuple[ModelState, Segment]:
    """An encoder pass and its effect on the state."""
    segment, delta = model.apply(variables, state, batch, write_from, engram_rows=engram_rows, method="encode")
    return commit_encoder(state, delta, batch.count), segment


def decode_and_commit(
    model: Model, variables: Variables, state: ModelState, segment: Segment, engram_rows: EngramRows | None = None
) -> tuple[ModelState, Decoded]:
    """A decoder pass and its effect on the state."""
    decoded = model.apply(variables, state, segment, engram_rows=engram_rows, method="decode")
    return commit_decoder(state, decoded.entries, segment.start, segment.count), decoded


@sharded_step(
    1,
    (2, 4),
    (VARIABLES, STATE, REQUESTS, REQUESTS, REQUESTS, REQUESTS, REQUESTS),
    (STATE, REQUESTS),
)
def encode_chunk(
    model: Model,
    variables: Variables,
    state: ModelState,
    rows: jax.Array,
    tail: Segment,
    batch: TokenBatch,
    write_from: jax.Array,
    engram_rows: EngramRows | None = None,
) -> tuple[ModelState, Segment]:
    """Passes one chunk of some requests through the encoder (the decoder's global entries included).

    Args:
      state: of all requests; donated.
      rows: int32 ``[rows]``, the requests that the chunk belongs to.
      tail: the last encoder outputs before the chunk; donated.
      batch: ``[rows, chunk]`` tokens.
      write_from: int32 ``[rows]``, positions below it have their global entries already.
      engram_rows: what the encoder's Engrams look up for the chunk, ``[rows, chunk, …]``; None where the tables are
        parameters.

    Returns:
      the state and the encoder tail after the chunk.
    """
    part, segment = encode_and_commit(model, variables, select_requests(state, rows), batch, write_from, engram_rows)
    return update_requests(state, rows, part), extend_segment(tail, segment)


@sharded_step(1, (2,), (VARIABLES, STATE, REQUESTS, REQUESTS, REQUESTS), (STATE, REQUESTS, LAYERED))
def replay_decoder(
    model: Model,
    variables: Variables,
    state: ModelState,
    rows: jax.Array,
    tail: Segment,
    engram_rows: EngramRows | None = None,
) -> tuple[ModelState, jax.Array, jax.Array]:
    """Passes the encoder tail through the decoder, window attention cut at its start; appends nothing.

    Args:
      engram_rows: what the decoder's Engrams look up for the tail; None where the tables are parameters.

    Returns:
      the state (donated) with fresh decoder rings, logits ``[rows, vocab]`` of the last position, and taps
      ``[targets, rows, tail, d]`` for a drafter.
    """
    part = forget_decoder(select_requests(state, rows))
    part, decoded = decode_and_commit(model, variables, part, tail, engram_rows)
    logits = model.apply(variables, last_live(decoded.hidden, tail.count), method="logits")
    return update_requests(state, rows, part), logits, decoded.taps


@sharded_step(1, (2,), (VARIABLES, STATE, REQUESTS, REQUESTS, REQUESTS), (STATE, REQUESTS, LAYERED))
def exact_chunk(
    model: Model,
    variables: Variables,
    state: ModelState,
    rows: jax.Array,
    batch: TokenBatch,
    engram_rows: EngramRows | None = None,
) -> tuple[ModelState, jax.Array, jax.Array]:
    """Passes one chunk through all layers.

    Args:
      engram_rows: what all Engrams look up for the chunk; None where the tables are parameters.

    Returns:
      the state (donated), logits ``[rows, vocab]`` of each row's last live token, and taps
      ``[targets, rows, chunk, d]`` for a drafter.
    """
    part, segment = encode_and_commit(model, variables, select_requests(state, rows), batch, engram_rows=engram_rows)
    part, decoded = decode_and_commit(model, variables, part, segment, engram_rows)
    logits = model.apply(variables, last_live(decoded.hidden, batch.count), method="logits")
    return update_requests(state, rows, part), logits, decoded.taps
