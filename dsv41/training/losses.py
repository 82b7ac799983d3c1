"""Losses as sums and weights, so that micro-batches, devices and padding change nothing but where they are added."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsv41.model import Model
from dsv41.training.forward import Variables
from pallas_kernels.tiling import largest_tile, pad_axis


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Which losses, with which factors.

    Attributes:
      balance: of the sequence-wise balance loss.
      z_loss: of the mean square of the logits' log-sum-exp; 0: off.
      index_distillation: of the divergence between index scores and attention, which alone trains indexers; 0: off.
      replay_simulation: share of rows whose decoder windows are cut at a random column, as a replay would.
    """

    balance: float = 1e-4
    z_loss: float = 0.0
    index_distillation: float = 0.0
    replay_simulation: float = 0.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{field.name}: {value} is negative or not finite")
        if self.replay_simulation > 1:
            raise ValueError(f"replay_simulation: {self.replay_simulation} is more than all rows")


class CrossEntropy(NamedTuple):
    """Sums over positions with a target, float32 scalars.

    Attributes:
      loss: −log p(target), nats; squared: squares of the log-sum-exp of the logits; correct: best token is the target.
      tokens: how many positions there are.
    """

    loss: jax.Array
    squared: jax.Array
    correct: jax.Array
    tokens: jax.Array


def cross_entropy(model: Model, variables: Variables, hidden: jax.Array, targets: jax.Array) -> CrossEntropy:
    """Next-token cross-entropy; logits exist for a few positions at a time and are made again in the backward pass.

    Args:
      hidden: ``[rows, length, d]``.
      targets: int32 ``[rows, length]``; −1: no loss.
    """
    parallel, vocab = model.settings.parallel, model.settings.text.vocab_size
    part = parallel.part("vocab", vocab)
    begin = parallel.index("vocab") * part

    @jax.checkpoint
    def some(inputs: tuple[jax.Array, jax.Array]) -> CrossEntropy:
        x, target = inputs
        live = target >= 0
        logits = model.apply(variables, jnp.where(live[:, None], x, 0), method="local_logits")
        top = lax.stop_gradient(logits.max(axis=-1))
        places = parallel.places("vocab")
        top = lax.pmax(top, places) if places else top
        total = parallel.sum(jnp.sum(jnp.exp(logits - top[:, None]), axis=-1), "vocab")
        log_sum = jnp.log(total) + top
        local = target - begin
        own = (local >= 0) & (local < part)
        at = jnp.take_along_axis(logits, jnp.where(own, local, 0)[:, None], axis=-1)[:, 0]
        at = parallel.sum(jnp.where(own, at, 0), "vocab")
        correct = live & (at >= top)
        sums = (log_sum - at, jnp.square(log_sum), correct, live)
        return CrossEntropy(*(jnp.sum(jnp.where(live, s, 0), dtype=jnp.float32) for s in sums))

    rows = targets.size
    tile = largest_tile(rows, lambda rows: 4 * part * rows)
    count = -(-rows // tile)
    x = pad_axis(hidden.reshape(rows, -1), 0, count * tile - rows).reshape(count, tile, -1)
    target = pad_axis(targets.reshape(rows), 0, count * tile - rows, -1).reshape(count, tile)
    return jax.tree.map(lambda sums: jnp.sum(sums, axis=0), lax.map(some, (x, target)))
