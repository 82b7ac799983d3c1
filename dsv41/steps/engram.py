"""Steps in two parts around the first Engram, so that its table's rows are read while the layers below it run.

The first part embeds the tokens and runs the encoder up to its first Engram (officially one layer of forty). Its
dispatch returns at once; the host then waits for the rows, and dispatches the rest with them. Between the parts the
state is theirs: nothing else may use or change it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from dsv41.layers.engram import EngramRows
from dsv41.model import Begun, Decoded, Model, TokenBatch
from dsv41.state.request import EncoderDelta, ModelState, Segment, commit_decoder, commit_encoder
from dsv41.steps.acceptance import Rule
from dsv41.steps.prefill import Variables
from dsv41.steps.sampling import Sampler, sample
from dsv41.steps.verify import Verification, commit_accepted, pending_and_drafts


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def begin_tokens(model: Model, variables: Variables, state: ModelState, batch: TokenBatch) -> tuple[ModelState, Begun]:
    """The first part of a step over ``batch``; the state (donated) is committed by the second part only."""
    begun = model.apply(variables, state, batch, method="begin")
    # The memory travels in the state alone: what two arguments share could not be given on to the second part.
    return state.replace(memory=begun.flow.memory), begun.replace(flow=begun.flow.replace(memory={}))


def finish_forward(
    model: Model, variables: Variables, state: ModelState, begun: Begun, engram_rows: EngramRows
) -> tuple[ModelState, Segment, EncoderDelta, Decoded]:
    """The rest of a forward pass, inside a step that decides how many of its tokens count.

    Args:
      engram_rows: of all Engram layers, for the tokens of the batch.

    Returns:
      the state with the extended memory, and what to commit of the pass.
    """
    begun = begun.replace(flow=begun.flow.replace(memory=state.memory))
    segment, delta = model.apply(variables, state, begun, engram_rows=engram_rows, method="finish")
    state = state.replace(memory=delta.memory)
    return state, segment, delta, model.apply(variables, state, segment, engram_rows=engram_rows, method="decode")


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def finish_tokens(
    model: Model, variables: Variables, state: ModelState, begun: Begun, engram_rows: EngramRows
) -> tuple[ModelState, jax.Array]:
    """The second part of a step: all its tokens are consumed.

    Returns:
      the state (donated), and logits ``[batch, query, vocab]`` float32 of every position.
    """
    state, segment, delta, decoded = finish_forward(model, variables, state, begun, engram_rows)
    logits = model.apply(variables, decoded.hidden, method="logits")
    state = commit_encoder(state, delta, segment.count)
    return commit_decoder(state, decoded.entries, segment.start, segment.count), logits


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def begin_generate(
    model: Model, variables: Variables, state: ModelState, sampler: Sampler, active: jax.Array
) -> tuple[ModelState, Begun]:
    """:func:`begin_tokens` for the pending token of every active request."""
    return begin_tokens(model, variables, state, TokenBatch(sampler.pending[:, None], active.astype(jnp.int32)))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 5))
def finish_generate(
    model: Model,
    variables: Variables,
    state: ModelState,
    begun: Begun,
    engram_rows: EngramRows,
    sampler: Sampler,
    active: jax.Array,
) -> tuple[ModelState, Sampler, jax.Array]:
    """The second part of :func:`~dsv41.steps.decode.generate_step`; state and sampler are donated."""
    state, logits = finish_tokens(model, variables, state, begun, engram_rows)
    sampler = sample(sampler, logits[:, 0], active)
    return state, sampler, sampler.pending


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def begin_verify(
    model: Model,
    variables: Variables,
    state: ModelState,
    sampler: Sampler,
    drafts: jax.Array,
    depth: jax.Array,
    active: jax.Array,
) -> tuple[ModelState, Begun]:
    """:func:`begin_tokens` for the pending tokens and their drafts."""
    return begin_tokens(model, variables, state, pending_and_drafts(sampler, drafts, depth, active))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 6))
def finish_verify(
    model: Model,
    rule: Rule,
    variables: Variables,
    state: ModelState,
    begun: Begun,
    engram_rows: EngramRows,
    sampler: Sampler,
    drafts: jax.Array,
    probabilities: jax.Array | None,
    depth: jax.Array,
    active: jax.Array,
) -> tuple[ModelState, Sampler, Verification]:
    """The second part of :func:`~dsv41.steps.verify.verify_step`; state and sampler are donated."""
    state, segment, delta, decoded = finish_forward(model, variables, state, begun, engram_rows)
    return commit_accepted(
        model, rule, variables, state, sampler, segment, delta, decoded, drafts, probabilities, depth, active
    )
