"""Acceptance of drafted tokens: the committed tokens are distributed as the backbone's own, whatever was drafted.

Two rules. Coupled: the backbone draws its token of every position with the random number that plain decoding would
use there, and a draft is accepted while it equals that draw; so the committed tokens are those of plain decoding.
Rejection: a draft x, drawn from q, is accepted with probability min(1, p(x) / q(x)), and the first refused one is
replaced by a draw from (p − q)₊; so more drafts are accepted, and the tokens are others with the same distribution.
At temperature 0 both rules take the most likely tokens.

The distribution holds for any choice of depths in which whether draft i is verified does not depend on the value of
draft i or of later ones.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from dsv41.steps.sampling import Sampler, draw, draw_keys, probabilities

# Folded into the key of a token's counter, whose plain key has drawn the draft.
_ACCEPT, _CORRECT = 1, 2


class Rule(enum.Enum):
    """How drafts are accepted; a static choice of a compiled step."""

    COUPLED = "coupled"
    REJECTION = "rejection"


@struct.dataclass
class Verified:
    """What a verification commits.

    Attributes:
      tokens: int32 ``[batch, drafts + 1]``, the accepted drafts, then the correction or bonus token, then −1.
      accepted: int32 ``[batch]``, accepted drafts, 0 to the request's depth.
      sampler: pending is the correction or bonus token, the counter is past it.
    """

    tokens: jax.Array
    accepted: jax.Array
    sampler: Sampler


def acceptance_probability(p: jax.Array, q: jax.Array) -> jax.Array:
    """min(1, p / q), elementwise; 0 where p is 0, so that an impossible token is never accepted."""
    below = p < q
    return jnp.where(below, p / jnp.where(below, q, 1.0), (p > 0).astype(p.dtype))


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """(p − q)₊, normalised, ``[…, vocab]``; p itself where nothing is left (p equals q to rounding)."""
    rest = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(rest, axis=-1, keepdims=True)
    return jnp.where(mass > 0, rest / jnp.where(mass > 0, mass, 1.0), p)


def verify_tokens(
    rule: Rule,
    sampler: Sampler,
    logits: jax.Array,
    drafts: jax.Array,
    draft_probabilities: jax.Array | None,
    depth: jax.Array,
    active: jax.Array,
) -> Verified:
    """Accepts drafts and draws the token after the accepted ones.

    Args:
      rule: static.
      logits: float32 ``[batch, drafts + 1, vocab]``, the backbone's after the pending token and after each draft.
        Rows beyond a request's depth are not read.
      drafts: int32 ``[batch, drafts]``; draft i was drawn with the request's random number counter + i.
      draft_probabilities: float32 ``[batch, drafts, vocab]``, what the drafts were drawn from (the request's
        temperature and top_p applied); needed by the rejection rule alone, and not read at temperature 0.
      depth: int32 ``[batch]``, drafts to verify, 0 to drafts.
      active: bool ``[batch]``; other rows do not move, their tokens are −1.

    Raises:
      ValueError: the rejection rule without draft probabilities.
    """
    if rule is Rule.REJECTION and draft_probabilities is None:
        raise ValueError("draft_probabilities: None, but the rejection rule compares with them")
    positions = jnp.arange(logits.shape[1], dtype=jnp.int32)
    checked = positions[:-1] < depth[:, None]
    if rule is Rule.COUPLED:
        tokens, accepted = _coupled(sampler, logits, drafts, checked, active)
    else:
        tokens, accepted = _rejection(sampler, logits, drafts, draft_probabilities, checked, active)
    accepted = jnp.where(active, accepted, 0)
    live = active[:, None] & (positions <= accepted[:, None])
    pending = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
    return Verified(
        tokens=jnp.where(live, tokens, -1),
        accepted=accepted,
        sampler=sampler.replace(
            pending=jnp.where(active, pending, sampler.pending),
            counter=sampler.counter + jnp.where(active, accepted + 1, 0).astype(jnp.uint32),
        ),
    )


def _coupled(
    sampler: Sampler, logits: jax.Array, drafts: jax.Array, checked: jax.Array, active: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Tokens ``[batch, drafts + 1]``, valid up to the accepted number ``[batch]``, and that number."""
    batch, width, vocab = logits.shape
    each = _every_position(sampler, width)
    tokens = draw(each, logits.reshape(batch * width, vocab), jnp.repeat(active, width)).reshape(batch, width)
    return tokens, _leading(checked & (drafts == tokens[:, :-1]))


def _rejection(
    sampler: Sampler, logits: jax.Array, drafts: jax.Array, q: jax.Array, checked: jax.Array, active: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As :func:`_coupled`."""
    batch, width, vocab = logits.shape
    most_likely = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    equal = checked & (drafts == most_likely[:, :-1])

    def greedy() -> tuple[jax.Array, jax.Array]:
        return most_likely, _leading(equal)

    def drawn() -> tuple[jax.Array, jax.Array]:
        each = _every_position(sampler, width)
        keys = draw_keys(each).reshape(batch, width)
        p = probabilities(logits.reshape(batch * width, vocab), each.temperature, each.top_p)
        p = p.reshape(batch, width, vocab)
        odds = acceptance_probability(_of_tokens(p[:, :-1], drafts), _of_tokens(q, drafts))
        chance = jax.vmap(jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, _ACCEPT))))(keys[:, :-1])
        warm = (sampler.temperature > 0)[:, None]
        accepted = _leading(jnp.where(warm, checked & (chance < odds), equal))
        # The draft after the accepted ones was refused, or was not checked: then the token comes from p alone.
        at = accepted[:, None]
        refused = jnp.take_along_axis(jnp.pad(checked, ((0, 0), (0, 1))), at, axis=1)
        p_at = jnp.take_along_axis(p, at[..., None], axis=1)[:, 0]
        q_at = jnp.take_along_axis(q, jnp.minimum(at, width - 2)[..., None], axis=1)[:, 0] if width > 1 else p_at
        remaining = jnp.where(refused, residual(p_at, q_at), p_at)
        token = jax.vmap(lambda key, r: jax.random.categorical(jax.random.fold_in(key, _CORRECT), jnp.log(r)))(
            jnp.take_along_axis(keys, at, axis=1)[:, 0], remaining
        )
        tokens = jnp.pad(drafts, ((0, 0), (0, 1)))
        tokens = jnp.where(jnp.arange(width) == at, token[:, None], tokens)
        return jnp.where(warm, tokens, most_likely).astype(jnp.int32), accepted

    return lax.cond(jnp.any(active & (sampler.temperature > 0)), drawn, greedy)


def _every_position(sampler: Sampler, width: int) -> Sampler:
    """A row for each of ``width`` successive draws of each request, ``[batch · width]``."""
    each = jax.tree.map(lambda leaf: jnp.repeat(leaf, width), sampler)
    return each.replace(counter=each.counter + jnp.tile(jnp.arange(width, dtype=jnp.uint32), sampler.counter.shape[0]))


def _leading(accepted: jax.Array) -> jax.Array:
    """How many leading entries of bool ``[batch, drafts]`` are true."""
    return jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _of_tokens(p: jax.Array, tokens: jax.Array) -> jax.Array:
    """``[batch, query, vocab]`` and tokens ``[batch, query]`` to ``[batch, query]``."""
    return jnp.take_along_axis(p, tokens[..., None], axis=-1)[..., 0]
