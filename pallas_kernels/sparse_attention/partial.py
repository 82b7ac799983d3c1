"""Attention to a part of the entries, and how the parts of several shards of the context join."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.products import narrow

# How far below the sink the subtracted maximum may fall: e³² and its square are finite, and the reference subtracts
# the entries' maximum, which decides how the probabilities round.
SINK_MARGIN = 32.0


class Partial(NamedTuple):
    """Sums over some of a query's entries, neither divided nor with the sink; all float32.

    Attributes:
      out: ``[..., batch, query, heads, head_dim]``, Σ_i p_i e_i with p_i = exp(scale · q · e_i − top).
      top: ``[..., batch, query, heads]``, the largest logit; −inf where nothing is seen. It is taken as a constant:
        what it is does not change the merged result, so it has no derivative.
      total: as ``top``, Σ_i p_i.
    """

    out: jax.Array
    top: jax.Array
    total: jax.Array


def merge_partials(partials: Partial, sink: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The attention to the entries of all parts together.

    Args:
      partials: leaves with a leading axis over the parts, in any order. An entry in two parts counts twice.
      sink: ``[heads]`` float32, finite.
      dtype: of the result (static).

    Returns:
      ``[batch, query, heads, head_dim]``: what one call over all entries gives, to the rounding of its sums and of its
      probabilities; exactly 0 where no part saw anything.
    """
    top = lax.stop_gradient(jnp.maximum(partials.top.max(axis=0), sink - SINK_MARGIN))
    out, total = _add(partials, top)
    return narrow(out / (total + jnp.exp(sink - top))[..., None], dtype)


def join_partials(partials: Partial) -> Partial:
    """One part of all parts; leaves with a leading axis over them, which the result has not."""
    top = lax.stop_gradient(partials.top.max(axis=0))
    out, total = _add(partials, finite_top(top))
    return Partial(out, top, total)


def _add(partials: Partial, subtracted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums of the parts' ``out`` and ``total``, as if they had subtracted this."""
    weight = jnp.exp(lax.stop_gradient(partials.top) - subtracted)
    return jnp.sum(partials.out * weight[..., None], axis=0), jnp.sum(partials.total * weight, axis=0)


def finite_top(top: jax.Array) -> jax.Array:
    """What to subtract from logits whose largest is ``top``: −inf − −inf would be NaN."""
    return jnp.where(top == -jnp.inf, 0, top)
