"""What a run measures on held-out documents."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dsv41.sharding.parallel import Parallel
from dsv41.sharding.steps import place
from dsv41.training.data import Batch, DataConfig, held_out_batches
from dsv41.training.draft_step import DraftRecipe, held_out_terms
from dsv41.training.dspark import DraftTerms, draft_metrics, sum_terms
from dsv41.training.forward import TrainBatch, Variables, alignment
from dsv41.training.losses import LossConfig
from dsv41.training.packing import Documents
from dsv41.training.placement import master_partitions
from dsv41.training.step import Counts, Recipe, loss_sums
from dsv41.training.update import TrainState

Measured = dict[str, float]
Evaluate = Callable[[TrainState], Measured]


def best_params(state: TrainState) -> Any:
    """The masters that a run is judged by and exported as: their average where there is one."""
    return state.params if state.ema is None else state.ema


def placed(batch: Batch, parallel: Parallel, leading: int = 0) -> TrainBatch:
    """A batch where a mesh wants it; ``leading`` axes lie before that of its rows. All processes have all of it."""
    if parallel.mesh is None:
        return TrainBatch(**batch)
    return TrainBatch(**place(batch, parallel.spec(*[None] * leading, "batch"), parallel))


def backbone_metrics(recipe: Recipe, constants: Any, data: DataConfig, documents: Documents) -> Evaluate:
    """Measures a model's state.

    Returns:
      a function that gives ``cross_entropy`` (nats a token), ``accuracy``, and ``bits_per_byte``: of the documents'
      tokens, their end tokens included, over the bytes of their texts.
    """
    settings = recipe.model.settings

    def evaluate(state: TrainState) -> Measured:
        totals = np.zeros(3)
        for batch in held_out_batches(data, documents, alignment(settings)):
            totals += np.asarray(_sums(recipe, best_params(state), constants, placed(batch, settings.parallel)))
        nats, correct, tokens = totals
        return {
            "cross_entropy": nats / tokens,
            "accuracy": correct / tokens,
            "bits_per_byte": nats / math.log(2) / documents.text_bytes,
        }

    return evaluate


@functools.partial(jax.jit, static_argnums=0)
def _sums(recipe: Recipe, params: Any, constants: Any, batch: TrainBatch) -> jax.Array:
    """Cross-entropy, correct tokens and tokens of a batch, float32 ``[3]``."""
    recipe = recipe._replace(losses=LossConfig(balance=0.0))
    parallel = recipe.model.settings.parallel

    def run(params: Any, constants: Any, batch: TrainBatch) -> jax.Array:
        sums = loss_sums(recipe, params, constants, batch, None, Counts(jnp.float32(1), jnp.float32(1)))
        return jnp.stack([sums.cross_entropy, sums.correct])

    if parallel.mesh is not None:
        nothing, rows = PartitionSpec(), parallel.spec("batch")
        specs = (master_partitions(recipe.model), nothing, rows)
        run = jax.shard_map(run, mesh=parallel.mesh, in_specs=specs, out_specs=nothing, check_vma=False)
    found = run(params, constants, batch)
    return jnp.append(found, jnp.sum(batch.targets >= 0).astype(jnp.float32))


def drafter_metrics(recipe: DraftRecipe, backbone: Variables, data: DataConfig, documents: Documents) -> Evaluate:
    """Measures a drafter's state: what :func:`~dsv41.training.dspark.draft_metrics` says, of the same anchors each
    time, on one device and on a mesh."""

    def evaluate(state: TrainState) -> Measured:
        terms = drafter_terms(recipe, backbone, data, documents, best_params(state))
        sums = functools.reduce(
            functools.partial(jax.tree.map, jnp.add), (sum_terms(recipe.options, part, {}) for part in terms)
        )
        return {name: float(value) for name, value in draft_metrics(sums).items()}

    return evaluate


def drafter_terms(
    recipe: DraftRecipe, backbone: Variables, data: DataConfig, documents: Documents, params: Any
) -> Iterator[DraftTerms]:
    """The terms of every held-out batch, on the host, for metrics and for calibration; ``params`` are the drafter's
    masters."""
    settings = recipe.model.settings
    for number, batch in enumerate(held_out_batches(data, documents, alignment(settings))):
        key = jax.random.fold_in(jax.random.key(recipe.seed), number)
        terms = held_out_terms(recipe, params, backbone, placed(batch, settings.parallel), key)
        yield jax.tree.map(np.asarray, terms)
