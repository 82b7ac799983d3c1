"""One training step: micro-batches in, one update out; on one device, or on a mesh with the model divided.

The loss runs as one program a device (``jax.shard_map``), so that layers and kernels are those of inference, and is
differentiated from outside: JAX's own rules turn each collective round. The update is left to the compiler, which sees
whole arrays. Everything that is summed over micro-batches or devices is a sum from the start: the number of tokens
that the loss is a mean over is counted beforehand, so that neither padding nor the number of parts changes a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from dsv41.checkpoint.placement import ParameterTree
from dsv41.model import Model
from dsv41.training.forward import TrainBatch, forward
from dsv41.training.losses import LossConfig, cross_entropy
from dsv41.training.placement import held, joined, master_partitions
from dsv41.training.statistics import find, router_sums
from dsv41.training.update import Metrics, TrainState, Update, max_load


class Recipe(NamedTuple):
    """What a step depends on besides its arrays; hashable.

    Attributes:
      model: with the settings of training (:meth:`~dsv41.settings.Settings.for_training`).
      losses: their factors.
      update: what moves the masters.
      seed: of the random cuts.
    """

    model: Model
    losses: LossConfig
    update: Update
    seed: int = 0


class Sums(NamedTuple):
    """What adds up over devices and micro-batches; float32.

    Attributes:
      loss: as it is minimised.
      cross_entropy, squared, correct: over positions with a target.
      balance: over routers and tokens; divergence: over index sources and tokens.
      text, image: tokens of each expert by router, ``[loops…, experts]``.
    """

    loss: jax.Array
    cross_entropy: jax.Array
    squared: jax.Array
    correct: jax.Array
    balance: jax.Array
    divergence: jax.Array
    text: dict[str, jax.Array]
    image: dict[str, jax.Array]


class Counts(NamedTuple):
    """What a step's losses are means over, float32: positions with a target, and all tokens."""

    targets: jax.Array
    tokens: jax.Array

    @classmethod
    def of(cls, batch: TrainBatch) -> Counts:
        """Of whole batches; at least 1, so that a batch of padding has losses of 0."""
        return cls(*(jnp.maximum(jnp.sum(x >= 0), 1).astype(jnp.float32) for x in (batch.targets, batch.documents)))


def loss_sums(
    recipe: Recipe, params: ParameterTree, constants: Any, batch: TrainBatch, cut: jax.Array | None, counts: Counts
) -> Sums:
    """The losses of rows of one micro-batch, on one device, summed over all devices.

    Args:
      params: this device's part of the masters.
      batch, cut: its rows; see :func:`~dsv41.training.forward.forward`.
      counts: of the whole step.
    """
    model, losses = recipe.model, recipe.losses
    parallel = model.settings.parallel
    variables = {"params": joined(model, params), "constants": constants}
    collect = ("statistics", "divergence") if losses.index_distillation else ("statistics",)
    outputs = forward(model, variables, batch, cut, collect)
    entropy = cross_entropy(model, variables, outputs.hidden, batch.targets)
    routers = router_sums(
        parallel, outputs.statistics["statistics"], batch.documents, batch.is_image, bool(losses.balance)
    )
    divergences = find(outputs.statistics.get("divergence", {}), "total").values()
    divergence = sum((jnp.sum(d["total"]) for d in divergences), start=jnp.float32(0))
    loss = (entropy.loss + losses.z_loss * entropy.squared) / counts.targets
    loss += (losses.balance * routers.balance + losses.index_distillation * divergence) / counts.tokens
    mine = (loss, entropy.loss, entropy.squared, entropy.correct, routers.balance, divergence)
    return Sums(*(parallel.sum(x, "batch") for x in mine), routers.text, routers.image)


def loss_and_gradient(
    recipe: Recipe, params: ParameterTree, constants: Any, batch: TrainBatch, cut: jax.Array | None, counts: Counts
) -> tuple[Sums, ParameterTree]:
    """:func:`loss_sums` of a whole micro-batch on the model's mesh, and the gradient of its loss, float32."""
    model = recipe.model
    parallel = model.settings.parallel
    run = functools.partial(loss_sums, recipe)
    if parallel.mesh is not None:
        nothing, rows = PartitionSpec(), parallel.spec("batch")
        specs = (master_partitions(model), nothing, rows, rows, nothing)
        # Every device of a tensor group computes the same sums, which cannot be inferred.
        run = jax.shard_map(run, mesh=parallel.mesh, in_specs=specs, out_specs=nothing, check_vma=False)

    def loss(params: ParameterTree) -> tuple[jax.Array, Sums]:
        sums = run(params, constants, batch, cut, counts)
        return sums.loss, sums

    (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return sums, gradient


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(recipe: Recipe, state: TrainState, constants: Any, batches: TrainBatch) -> tuple[TrainState, Metrics]:
    """One update.

    Args:
      state: donated.
      constants: the model's (the token map).
      batches: micro-batches, leaves ``[micro-batches, rows, length]``; one compiled step serves all fillings.

    Returns:
      the new state; and float32 scalars: ``loss`` and its parts, means over tokens; ``tokens`` with a target;
      ``max_load``; and what the update says of itself (:meth:`~dsv41.training.update.Update.__call__`).
    """
    counts = Counts.of(batches)
    cuts = _cuts(recipe, state.step, batches)

    def one(part: tuple[TrainBatch, jax.Array | None]) -> tuple[Sums, ParameterTree]:
        return loss_and_gradient(recipe, state.params, constants, *part, counts)

    sums, gradient = summed(one, (batches, cuts))
    state, moved = recipe.update(state, gradient, sums.loss, sums.text, sums.image)
    metrics = {
        "loss": sums.loss,
        "cross_entropy": sums.cross_entropy / counts.targets,
        "accuracy": sums.correct / counts.targets,
        "z": sums.squared / counts.targets,
        "balance": sums.balance / counts.tokens / max(1, _routers(sums.text)),
        "index_divergence": sums.divergence / counts.tokens,
        "tokens": counts.targets,
        "max_load": max_load(sums.text, sums.image),
    }
    return held(recipe.model, state), moved | {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}


def summed(one: Callable[[Any], Any], parts: Any) -> Any:
    """Σ of ``one(part)`` over the leading axis of the parts' leaves; one after the other, compiled once."""
    first = jax.tree.map(lambda x: x[0], parts)
    if len(jax.tree.leaves(parts)[0]) == 1:
        return one(first)
    one = jax.jit(one)  # traced once for its shapes and for the loop
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, first))
    return lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, one(part)), None), nothing, parts)[0]


def _cuts(recipe: Recipe, step: jax.Array, batches: TrainBatch) -> jax.Array | None:
    """Random columns at which decoder windows are cut, int32 ``[micro-batches, rows]``; the length cuts nothing."""
    share, (micro, rows, length) = recipe.losses.replay_simulation, batches.tokens.shape
    if not share:
        return None
    which, where = jax.random.split(jax.random.fold_in(jax.random.key(recipe.seed), step))
    cut = jax.random.randint(where, (micro, rows), 1, length)
    return jnp.where(jax.random.uniform(which, (micro, rows)) < share, cut, length)


def _routers(loads: dict[str, jax.Array]) -> int:
    return sum(load.size // load.shape[-1] for load in loads.values())
