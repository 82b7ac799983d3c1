"""Expert parallelism: rows travel to the devices of their experts and their sums come back; none is dropped."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dsv41.sharding.parallel import Parallel

Compute = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Rows ``[rows, d]``, this device's numbers of their experts int32 ``[rows, k]`` (any other number: none of them) and
weights ``[rows, k]`` to the weighted sum over those experts, float32 ``[rows, d]``."""


def over_experts(
    parallel: Parallel, x: jax.Array, experts: jax.Array, weights: jax.Array, num_experts: int, compute: Compute
) -> jax.Array:
    """The weighted sum over each row's experts, wherever they lie.

    Args:
      x: this device's rows ``[rows, d]``.
      experts: int32 ``[rows, k]`` in 0 … num_experts; the last number is nobody's.
      weights: float32 ``[rows, k]``.
      num_experts: of the whole model.
      compute: what this device's experts make of rows.

    Returns:
      float32 ``[rows, d]``.
    """
    places = parallel.places("experts")
    if not places:
        return compute(x, experts, weights)
    first = parallel.index("experts") * parallel.part("experts", num_experts)
    held = tuple(axis for axis in places if axis in parallel.places("batch"))
    rest = tuple(axis for axis in places if axis not in held)
    if held:
        x, experts, weights = (lax.all_gather(a, held, axis=0, tiled=True) for a in (x, experts, weights))
    y = compute(x, _own(experts - first, parallel.part("experts", num_experts)), weights)
    if held:
        y = lax.psum_scatter(y, held, scatter_dimension=0, tiled=True)
    return lax.psum(y, rest) if rest else y


def _own(numbers: jax.Array, count: int) -> jax.Array:
    """Numbers of this device's experts; ``count`` where an expert lies elsewhere."""
    return jnp.where((numbers >= 0) & (numbers < count), numbers, count)
