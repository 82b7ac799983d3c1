"""One training step of the drafter, and one look at it: the backbone computes, stays as it is, and gets no gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dsv41.checkpoint.placement import ParameterTree
from dsv41.declared import parameter_partitions
from dsv41.layers.dspark import Drafter
from dsv41.model import Model
from dsv41.training.dspark import (
    DraftSums,
    DraftTerms,
    DsparkConfig,
    choose_anchors,
    draft_losses,
    draft_metrics,
    draft_terms,
)
from dsv41.training.forward import TrainBatch, Variables, forward
from dsv41.training.placement import held, joined, master_partitions
from dsv41.training.step import summed
from dsv41.training.update import Metrics, TrainState, Update, max_load


class DraftRecipe(NamedTuple):
    """What a drafter's step depends on besides its arrays; hashable.

    Attributes:
      model, drafter: with the settings of training.
      options: the losses' factors, the anchors.
      update: what moves the drafter's masters.
      seed: of the anchors.
    """

    model: Model
    drafter: Drafter
    options: DsparkConfig
    update: Update
    seed: int = 0


def draft_sums_and_gradient(
    recipe: DraftRecipe, params: ParameterTree, backbone: Variables, batch: TrainBatch, key: jax.Array
) -> tuple[DraftSums, ParameterTree]:
    """The sums of a micro-batch over the whole mesh, and the gradient of their ``loss``, not divided by any weight."""
    parallel = recipe.model.settings.parallel

    def run(params: ParameterTree, backbone: Variables, batch: TrainBatch, key: jax.Array) -> DraftSums:
        key = jax.random.fold_in(key, parallel.index("batch"))
        outputs = forward(recipe.model, backbone, batch)
        own = joined(recipe.drafter, params)
        sums = draft_losses(recipe.model, recipe.drafter, recipe.options, backbone, own, outputs, batch, key)
        mine = sums._replace(loads={})
        return jax.tree.map(lambda x: parallel.sum(x, "batch"), mine)._replace(loads=sums.loads)

    run = _on_mesh(recipe, run, PartitionSpec())

    def loss(params: ParameterTree) -> tuple[jax.Array, DraftSums]:
        sums = run(params, backbone, batch, key)
        return sums.loss, sums

    (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return sums, gradient


@functools.partial(jax.jit, static_argnums=0)
def held_out_terms(
    recipe: DraftRecipe, params: ParameterTree, backbone: Variables, batch: TrainBatch, key: jax.Array
) -> DraftTerms:
    """The terms of a batch, whole on every device: for metrics, and for :func:`~dsv41.training.dspark.calibrate`.

    Args:
      params: the drafter's masters.
      key: chooses the anchors, the same ones on every mesh.
    """
    parallel = recipe.model.settings.parallel

    def run(params: ParameterTree, backbone: Variables, batch: TrainBatch, columns: jax.Array) -> DraftTerms:
        outputs, own = forward(recipe.model, backbone, batch), joined(recipe.drafter, params)
        terms, _ = draft_terms(recipe.model, recipe.drafter, backbone, own, outputs, batch, columns)
        return jax.tree.map(lambda x: parallel.gather(x, "batch", 0), terms)

    columns = choose_anchors(key, batch, recipe.options.anchors)
    return _on_mesh(recipe, run, parallel.spec("batch"))(params, backbone, batch, columns)


def _on_mesh(recipe: DraftRecipe, run: Callable, last: PartitionSpec) -> Callable:
    """A function of masters, backbone, rows, and what lies as ``last`` says, one program a device; its result is whole
    on each."""
    parallel = recipe.model.settings.parallel
    if parallel.mesh is None:
        return run
    nothing = PartitionSpec()
    variables = {"params": parameter_partitions(recipe.model, parallel), "constants": nothing}
    specs = (master_partitions(recipe.drafter), variables, parallel.spec("batch"), last)
    return jax.shard_map(run, mesh=parallel.mesh, in_specs=specs, out_specs=nothing, check_vma=False)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def draft_train_step(
    recipe: DraftRecipe, state: TrainState, backbone: Any, batches: TrainBatch
) -> tuple[TrainState, Metrics]:
    """One update of the drafter.

    Args:
      state: of the drafter's masters; donated.
      backbone: the model's variables, in its modules' dtypes.
      batches: micro-batches, leaves ``[micro-batches, rows, length]``.

    Returns:
      the new state and float32 scalars, see :func:`~dsv41.training.dspark.draft_metrics` and
      :meth:`~dsv41.training.update.Update.__call__`; ``loss`` is the mean over weighted positions.
    """
    key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
    keys = jax.random.split(key, batches.tokens.shape[0])

    def one(part: tuple[TrainBatch, jax.Array]) -> tuple[DraftSums, ParameterTree]:
        return draft_sums_and_gradient(recipe, state.params, backbone, *part)

    sums, gradient = summed(one, (batches, keys))
    # How many positions there are depends on the anchors: it is known only now.
    weight = jnp.maximum(sums.weight, 1e-20)
    gradient = jax.tree.map(lambda g: g / weight, gradient)
    image = jax.tree.map(jnp.zeros_like, sums.loads)
    state, moved = recipe.update(state, gradient, sums.loss / weight, sums.loads, image)
    metrics = {
        "loss": sums.loss / weight,
        "tokens": jnp.sum(batches.targets >= 0).astype(jnp.float32),
        "max_load": max_load(sums.loads, image),
        **draft_metrics(sums),
    }
    moved |= {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}
    return held(recipe.drafter, state), moved
