"""Drafting: the drafter follows the backbone's committed positions and proposes the next block of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from dsv41.layers.dspark import Drafter
from dsv41.model import Model
from dsv41.sharding.steps import DRAFTER_VARIABLES, GATHERED, LAYERED, REQUESTS, RING, VARIABLES, sharded_step
from dsv41.state.ring import Ring, write_ring
from dsv41.steps.prefill import Variables
from dsv41.steps.sampling import Sampler, draw, probabilities


@struct.dataclass
class Drafts:
    """A proposed block after the pending token of each request.

    Attributes:
      tokens: int32 ``[batch, block]``.
      probabilities: float32 ``[batch, block, vocab]``, the distributions that they were drawn from; None where
        verification does not need them.
      confidence: float32 ``[batch, block]``, logit of the chance that the backbone accepts a draft whose
        predecessors it accepted. It depends on the tokens before the draft, not on the draft itself.
    """

    tokens: jax.Array
    probabilities: jax.Array | None
    confidence: jax.Array


def feed_drafter(
    drafter: Drafter, variables: Variables, ring: Ring, taps: jax.Array, start: jax.Array, count: jax.Array
) -> Ring:
    """The drafter's rings after positions that the backbone has consumed.

    Args:
      variables: the drafter's.
      taps: ``[targets, batch, query, d]``, what the backbone's target layers read at positions start, start + 1, …
      start, count: int32 ``[batch]``; the first ``count`` positions are committed.
    """
    positions = start[:, None] + jnp.arange(taps.shape[2], dtype=jnp.int32)
    return write_ring(ring, drafter.apply(variables, taps, positions, method="entries"), start, count)


@sharded_step(1, (2,), (DRAFTER_VARIABLES, RING, REQUESTS, LAYERED, REQUESTS, REQUESTS), RING)
def seed_drafter(
    drafter: Drafter,
    variables: Variables,
    ring: Ring,
    rows: jax.Array,
    taps: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> Ring:
    """:func:`feed_drafter` for some requests (int32 ``[rows]``) of the rings, which are donated; after a prefill.

    A number that is no request's stands for nobody.
    """
    part = Ring(
        ring.entries.map(lambda leaf: jnp.take(leaf, rows, 1, mode="clip")), ring.positions.at[rows].get(mode="clip")
    )
    part = feed_drafter(drafter, variables, part, taps, start, count)
    entries = jax.tree.map(lambda leaf, new: leaf.at[:, rows].set(new, mode="drop"), ring.entries, part.entries)
    return Ring(entries, ring.positions.at[rows].set(part.positions, mode="drop"))


@sharded_step(1, (1,), (RING, REQUESTS), RING)
def clear_drafter(drafter: Drafter, ring: Ring, cleared: jax.Array) -> Ring:
    """The rings (donated) with those of some requests, bool ``[batch]``, empty."""
    return ring.replace(positions=jnp.where(cleared[:, None], -1, ring.positions))


def block_embeddings(model: Model, variables: Variables, first: jax.Array) -> jax.Array:
    """What a draft passes through the drafter, ``[batch, block, d]``: first tokens int32 ``[batch]``, then noise."""
    text = model.settings.text
    noise = jnp.full((first.shape[0], text.dspark_block_size - 1), text.dspark_noise_token_id, jnp.int32)
    return model.apply(variables, jnp.concatenate([first[:, None], noise], axis=1), method="embed_tokens")


def draft_block(
    model: Model, drafter: Drafter, variables: Variables, drafter_variables: Variables, ring: Ring, start, first
) -> tuple[jax.Array, jax.Array]:
    """The part of a draft that all positions of the block share.

    Args:
      ring: entries of the positions before ``start``.
      start: int32 ``[batch]``, position of the first token.
      first: int32 ``[batch]``, the token there; noise follows it.

    Returns:
      hidden values ``[batch, block, d]``, and the logits ``[batch, block, vocab]`` of each next token before the
      Markov head has its say.
    """
    x = block_embeddings(model, variables, first)
    hidden = drafter.apply(drafter_variables, x, ring, start, method="hidden")
    normed = drafter.apply(drafter_variables, hidden, method="norm")
    return hidden, model.apply(variables, normed, method="logits")


@sharded_step(
    3,
    (5,),
    (VARIABLES, DRAFTER_VARIABLES, RING, LAYERED, REQUESTS, REQUESTS, REQUESTS, REQUESTS),
    (RING, Drafts(REQUESTS, REQUESTS, GATHERED)),
)
def draft_step(
    model: Model,
    drafter: Drafter,
    with_probabilities: bool,
    variables: Variables,
    drafter_variables: Variables,
    ring: Ring,
    taps: jax.Array,
    start: jax.Array,
    count: jax.Array,
    sampler: Sampler,
    active: jax.Array,
) -> tuple[Ring, Drafts]:
    """Takes in what the last step committed and drafts on from the pending tokens.

    Args:
      ring: donated.
      taps, start, count: see :func:`feed_drafter`; a count of 0 leaves a request's ring as it is.
      sampler: its pending tokens begin the block, its temperatures and random numbers draw it. It does not move.
      active: bool ``[batch]``; other requests get drafts without meaning.

    Returns:
      the rings, and the drafts.
    """
    ring = feed_drafter(drafter, drafter_variables, ring, taps, start, count)
    begin = start + count
    hidden, base = draft_block(model, drafter, variables, drafter_variables, ring, begin, sampler.pending)

    def next_token(previous: jax.Array, inputs: tuple[jax.Array, jax.Array, jax.Array]):
        logits, x, offset = inputs
        bias = drafter.apply(drafter_variables, previous, method="markov")
        logits = logits + bias.logits
        confidence = drafter.apply(drafter_variables, x, bias.embedding, method="confidence")
        # Draw i of a request takes random number i, as the backbone's own would: then the two often agree.
        token = draw(sampler.replace(counter=sampler.counter + offset), logits, active)
        return token, (token, distribution(logits) if with_probabilities else None, confidence)

    def distribution(logits: jax.Array) -> jax.Array:
        # Verification reads no distribution of a greedy request: none is made while all are greedy.
        return lax.cond(
            jnp.any(active & (sampler.temperature > 0)),
            lambda: probabilities(logits, sampler.temperature, sampler.top_p),
            lambda: jnp.zeros_like(logits),
        )

    offsets = jnp.arange(base.shape[1], dtype=jnp.uint32)
    by_position = (jnp.moveaxis(base, 1, 0), jnp.moveaxis(hidden, 1, 0), offsets)
    _, (tokens, p, confidence) = lax.scan(next_token, sampler.pending, by_position)
    return ring, Drafts(tokens.T, None if p is None else jnp.moveaxis(p, 0, 1), confidence.T)


def teacher_forced_logits(
    model: Model,
    drafter: Drafter,
    variables: Variables,
    drafter_variables: Variables,
    ring: Ring,
    start: jax.Array,
    tokens: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Draft logits of a whole block at once when the tokens before each position are known.

    Args:
      ring, start: see :func:`draft_block`.
      tokens: int32 ``[batch, block]``, the tokens at start, start + 1, …

    Returns:
      logits ``[batch, block, vocab]`` of each next token, and confidence logits ``[batch, block]``.
    """
    hidden, base = draft_block(model, drafter, variables, drafter_variables, ring, start, tokens[:, 0])
    bias = drafter.apply(drafter_variables, tokens, method="markov")
    return base + bias.logits, drafter.apply(drafter_variables, hidden, bias.embedding, method="confidence")
