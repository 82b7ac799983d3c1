"""Decode: one token of every active request through all layers, then the next token is sampled."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv41.model import Model, TokenBatch
from dsv41.sharding.steps import GATHERED, REQUESTS, STATE, VARIABLES, sharded_step
from dsv41.state.request import ModelState
from dsv41.steps.prefill import Variables, decode_and_commit, encode_and_commit
from dsv41.steps.sampling import Sampler, sample


def forward_tokens(
    model: Model, variables: Variables, state: ModelState, batch: TokenBatch
) -> tuple[ModelState, jax.Array]:
    """Consumes the live tokens of ``batch`` in all layers; logits ``[batch, query, vocab]`` of every position."""
    state, segment = encode_and_commit(model, variables, state, batch)
    state, decoded = decode_and_commit(model, variables, state, segment)
    return state, model.apply(variables, decoded.hidden, method="logits")


@sharded_step(1, (2,), (VARIABLES, STATE, REQUESTS, REQUESTS), (STATE, REQUESTS))
def decode_step(
    model: Model, variables: Variables, state: ModelState, tokens: jax.Array, active: jax.Array
) -> tuple[ModelState, jax.Array]:
    """One decode step of a batch.

    Args:
      state: donated.
      tokens: int32 ``[batch]``, the pending token of each request.
      active: bool ``[batch]``; the state of other slots does not move.

    Returns:
      the state, and logits ``[batch, vocab]`` float32.
    """
    batch = TokenBatch(tokens[:, None], active.astype(jnp.int32))
    state, logits = forward_tokens(model, variables, state, batch)
    return state, logits[:, 0]


@sharded_step(1, (2, 3), (VARIABLES, STATE, REQUESTS, REQUESTS), (STATE, REQUESTS, GATHERED))
def generate_step(
    model: Model, variables: Variables, state: ModelState, sampler: Sampler, active: jax.Array
) -> tuple[ModelState, Sampler, jax.Array]:
    """One decode step and the draw of the next token.

    Args:
      state, sampler: donated; the sampler holds the pending tokens.
      active: bool ``[batch]``.

    Returns:
      state, sampler with the new pending tokens, and those tokens int32 ``[batch]``.
    """
    batch = TokenBatch(sampler.pending[:, None], active.astype(jnp.int32))
    state, logits = forward_tokens(model, variables, state, batch)
    sampler = sample(sampler, logits[:, 0], active)
    return state, sampler, sampler.pending
