"""Sampling with a seed per request: a request's tokens do not depend on its slot or its neighbours."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax


@struct.dataclass
class Sampler:
    """The sampling state of a batch of requests.

    Attributes:
      pending: int32 ``[batch]``, sampled but not yet consumed by the model.
      seed: uint32 ``[batch]``.
      counter: uint32 ``[batch]``, tokens drawn so far; draw i of a seed is always the same random number.
      temperature: float32 ``[batch]``; 0 takes the most likely token.
      top_p: float32 ``[batch]`` in (0, 1].
    """

    pending: jax.Array
    seed: jax.Array
    counter: jax.Array
    temperature: jax.Array
    top_p: jax.Array


def create_sampler(batch: int) -> Sampler:
    """Greedy samplers with nothing pending."""
    return Sampler(
        pending=jnp.zeros((batch,), jnp.int32),
        seed=jnp.zeros((batch,), jnp.uint32),
        counter=jnp.zeros((batch,), jnp.uint32),
        temperature=jnp.zeros((batch,), jnp.float32),
        top_p=jnp.ones((batch,), jnp.float32),
    )


def probabilities(logits: jax.Array, temperature: jax.Array, top_p: jax.Array) -> jax.Array:
    """The distribution that tokens are drawn from.

    Args:
      logits: float32 ``[batch, vocab]``.
      temperature, top_p: float32 ``[batch]``.

    Returns:
      ``[batch, vocab]`` float32: softmax of logits / temperature, cut to the smallest set of most likely tokens
      whose mass reaches top_p (the one that crosses it included, ties to the lower id), renormalised. At
      temperature 0: one-hot on the most likely token.
    """
    greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    warm = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    p = jax.nn.softmax(logits / warm, axis=-1)
    # Sorting the vocabulary is skipped while no request cuts it.
    p = lax.cond(jnp.any((temperature > 0) & (top_p < 1)), _nucleus, lambda p, _: p, p, top_p)
    return jnp.where((temperature > 0)[:, None], p, greedy)


def _nucleus(p: jax.Array, top_p: jax.Array) -> jax.Array:
    """Cuts ``[batch, vocab]`` to the most likely tokens that reach ``top_p`` [batch], renormalised."""
    token = jnp.broadcast_to(jnp.arange(p.shape[-1], dtype=jnp.int32), p.shape)
    # Sorted by falling probability, then rising id; the last one kept is the threshold, so nothing is sorted back.
    ranked, ids = lax.sort((-p, token), num_keys=2)
    before = jnp.cumsum(-ranked, axis=-1) + ranked
    last = jnp.maximum(jnp.sum(before < top_p[:, None], axis=-1, keepdims=True) - 1, 0)
    least, its_id = -jnp.take_along_axis(ranked, last, axis=-1), jnp.take_along_axis(ids, last, axis=-1)
    kept = (p > least) | ((p == least) & (token <= its_id)) | (top_p[:, None] >= 1)
    p = jnp.where(kept, p, 0.0)
    return p / jnp.sum(p, axis=-1, keepdims=True)


def draw_keys(sampler: Sampler) -> jax.Array:
    """The random key ``[batch]`` of each request's next draw: of its seed and its counter, of nothing else."""
    return jax.vmap(lambda seed, counter: jax.random.fold_in(jax.random.key(seed), counter))(
        sampler.seed, sampler.counter
    )


def draw(sampler: Sampler, logits: jax.Array, active: jax.Array) -> jax.Array:
    """The token that each request draws from logits ``[batch, vocab]`` with its next random number.

    Rows that are not active give any token. Nothing is drawn while every active request is greedy.

    Returns:
      int32 ``[batch]``; the sampler does not move.
    """

    def drawn() -> jax.Array:
        p = probabilities(logits, sampler.temperature, sampler.top_p)
        token = jax.vmap(jax.random.categorical)(draw_keys(sampler), jnp.log(p))
        return jnp.where(sampler.temperature > 0, token, greedy).astype(jnp.int32)

    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return lax.cond(jnp.any(active & (sampler.temperature > 0)), drawn, lambda: greedy)


def sample(sampler: Sampler, logits: jax.Array, active: jax.Array) -> Sampler:
    """Draws the next pending token of every active request from logits ``[batch, vocab]``."""
    return sampler.replace(
        pending=jnp.where(active, draw(sampler, logits, active), sampler.pending),
        counter=sampler.counter + active.astype(jnp.uint32),
    )
