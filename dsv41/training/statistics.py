"""What modules sow in a training pass, by the modules that sowed it, and what is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv41.sharding.load import expert_load
from dsv41.sharding.parallel import Parallel
from dsv41.training.balance import sequence_balance


class RouterSums(NamedTuple):
    """Of all routers.

    Attributes:
      balance: float32 scalar, of this device's rows: Σ over routers and tokens (:mod:`dsv41.training.balance`).
      text, image: tokens of each expert by router, float32 ``[loops…, experts]``, over all parts of the batch.
    """

    balance: jax.Array
    text: dict[str, jax.Array]
    image: dict[str, jax.Array]


def router_sums(
    parallel: Parallel, sown: Mapping, documents: jax.Array, is_image: jax.Array | None, with_balance: bool
) -> RouterSums:
    """Balance and loads.

    Args:
      sown: the collection "statistics", nested as parameters are.
      documents: int32 ``[rows, length]``, −1 at padding.
      is_image: bool ``[rows, length]``; None: all is text.
      with_balance: False leaves the balance 0.
    """
    valid = documents >= 0
    image = jnp.zeros_like(valid) if is_image is None else is_image & valid
    balance, loads = jnp.float32(0), {True: {}, False: {}}
    for path, router in find(sown, "scores").items():
        *loops, rows, length, number = router["scores"].shape
        scores = router["scores"].reshape(-1, rows, length, number)
        experts = router["experts"].reshape(scores.shape[0], rows, length, -1)
        if with_balance:
            balance += sum(sequence_balance(s, e, documents).total for s, e in zip(scores, experts, strict=True))
        for is_text, counted in ((True, valid & ~image), (False, image)):
            counts = jnp.stack([expert_load(e, number, parallel, counted) for e in experts])
            loads[is_text]["/".join(path)] = counts.reshape(*loops, number).astype(jnp.float32)
    return RouterSums(balance, loads[True], loads[False])


def find(sown: Mapping, name: str) -> dict[tuple[str, ...], dict[str, jax.Array]]:
    """What modules sowed that have sown ``name``, by their path; each thing was sown once."""
    found = {}

    def walk(tree: Mapping, path: tuple[str, ...]) -> None:
        if name in tree:
            found[path] = {key: values[0] for key, values in tree.items() if isinstance(values, tuple)}
        for key, below in tree.items():
            if isinstance(below, Mapping):
                walk(below, (*path, key))

    walk(sown, ())
    return found
