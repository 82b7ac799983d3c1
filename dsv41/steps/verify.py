"""Verification: the pending token and its drafts in one pass; what the backbone accepts is committed.

Rollback is a commit that stops early. The pass changes nothing of a request but its global entries; all that a
rejected token would overwrite comes out as a delta: k + 1 window entries a layer, k + 1 projections a compressor
tail, the compressed ids. The commit writes the first `accepted` + 1 of them. For five drafts and the official sizes
that is 200 KiB a request (43 layers × 6 × 528 bytes and 3 tails × 6 × 4 KiB). Saving and restoring would read the
same slots first and write them twice; a copy of all rings is 2.8 MiB. Global entries are written through, 890 bytes a
token: one beyond a request's length is invisible and is written again before it is seen, so there is nothing to undo.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv41.model import Decoded, Model, TokenBatch
from dsv41.sharding.steps import GATHERED, LAYERED, REQUESTS, STATE, VARIABLES, sharded_step
from dsv41.state.request import EncoderDelta, ModelState, Segment, commit_decoder, commit_encoder
from dsv41.steps.acceptance import Rule, verify_tokens
from dsv41.steps.prefill import Variables
from dsv41.steps.sampling import Sampler


class Verification(NamedTuple):
    """What a verify step did.

    Attributes:
      tokens: int32 ``[batch, k + 1]``: the accepted drafts and then the new pending token; −1 beyond.
      accepted: int32 ``[batch]``, drafts accepted (0 for inactive requests).
      start: int32 ``[batch]``, position of the token that was pending.
      consumed: int32 ``[batch]``, positions committed: ``accepted`` + 1, or 0 for inactive requests.
      taps: ``[targets, batch, k + 1, d]``, what a drafter reads of the positions.
    """

    tokens: jax.Array
    accepted: jax.Array
    start: jax.Array
    consumed: jax.Array
    taps: jax.Array


@sharded_step(
    2,
    (3, 4),
    (VARIABLES, STATE, REQUESTS, REQUESTS, REQUESTS, REQUESTS, REQUESTS),
    (STATE, REQUESTS, Verification(GATHERED, GATHERED, REQUESTS, GATHERED, LAYERED)),
)
def verify_step(
    model: Model,
    rule: Rule,
    variables: Variables,
    state: ModelState,
    sampler: Sampler,
    drafts: jax.Array,
    probabilities: jax.Array | None,
    depth: jax.Array,
    active: jax.Array,
) -> tuple[ModelState, Sampler, Verification]:
    """Verifies up to k drafts of every active request.

    With depth 0 it is a plain decode step. A request's outcome does not depend on the depth of others.

    Args:
      state, sampler: donated; the sampler holds the pending tokens.
      drafts: int32 ``[batch, k]``, tokens proposed after the pending one.
      probabilities: float32 ``[batch, k, vocab]``, what they were drawn from; None under :attr:`Rule.COUPLED`.
      depth: int32 ``[batch]`` in 0 … k, drafts to verify.
      active: bool ``[batch]``; the state of other slots does not move.

    Returns:
      the state after the accepted tokens, the sampler with the next pending tokens, and what happened.
    """
    batch = pending_and_drafts(sampler, drafts, depth, active)
    segment, delta = model.apply(variables, state, batch, method="encode")
    decoded = model.apply(variables, state.replace(memory=delta.memory), segment, method="decode")
    return commit_accepted(
        model, rule, variables, state, sampler, segment, delta, decoded, drafts, probabilities, depth, active
    )


def pending_and_drafts(sampler: Sampler, drafts: jax.Array, depth: jax.Array, active: jax.Array) -> TokenBatch:
    """The tokens that a verify step consumes: ``[batch, k + 1]``; arguments as of :func:`verify_step`."""
    tokens = jnp.concatenate([sampler.pending[:, None], drafts], axis=1)
    return TokenBatch(tokens, jnp.where(active, 1 + depth, 0))


def commit_accepted(
    model: Model,
    rule: Rule,
    variables: Variables,
    state: ModelState,
    sampler: Sampler,
    segment: Segment,
    delta: EncoderDelta,
    decoded: Decoded,
    drafts: jax.Array,
    probabilities: jax.Array | None,
    depth: jax.Array,
    active: jax.Array,
) -> tuple[ModelState, Sampler, Verification]:
    """What follows the forward pass in a verify step: the rule decides, and what it accepts is committed."""
    logits = model.apply(variables, decoded.hidden, method="logits")
    verified = verify_tokens(rule, sampler, logits, drafts, probabilities, depth, active)
    consumed = jnp.where(active, 1 + verified.accepted, 0)
    state = commit_decoder(commit_encoder(state, delta, consumed), decoded.entries, segment.start, consumed)
    outcome = Verification(verified.tokens, verified.accepted, segment.start, consumed, decoded.taps)
    return state, verified.sampler, outcome
