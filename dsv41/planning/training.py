"""A whole training step compiled for a pod that is not there, and the least time that one could take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dsv41.checkpoint.placement import flatten_tree
from dsv41.declared import abstract_variables, declared_variables, parameter_partitions
from dsv41.model import Model
from dsv41.planning.collectives import joined_counts
from dsv41.planning.compiled import Compiled, compile_traced
from dsv41.planning.ledger import Work, step_ledger
from dsv41.planning.parameters import held_parameters
from dsv41.planning.partitioned import partitioned_collectives
from dsv41.planning.spread import Spread, all_gather, all_reduce
from dsv41.planning.steps import Step
from dsv41.settings import Settings
from dsv41.sharding.mesh import MeshPreset
from dsv41.sharding.rules import part_shape
from dsv41.training.forward import TrainBatch
from dsv41.training.losses import LossConfig
from dsv41.training.optimizers import Group, OptimizerConfig, make_optimizer, parameter_groups
from dsv41.training.placement import abstract_masters, alike, master_partitions, master_shardings
from dsv41.training.step import Recipe, train_step
from dsv41.training.update import TrainState, Update

_FLOAT = 4


class TrainingShape(NamedTuple):
    """What is compiled.

    Attributes:
      rows: of a micro-batch, on the whole mesh; length: tokens of each.
      micro_batches: whose gradients a step adds up.
    """

    rows: int
    length: int
    micro_batches: int = 1


class Held(NamedTuple):
    """Bytes of one device that no schedule can do without when the backward pass begins.

    Attributes:
      masters, optimizer: held between steps.
      rounded: parameters as the layers compute with them, joined.
    """

    masters: int
    optimizer: int
    rounded: int


def compile_training(
    settings: Settings,
    preset: MeshPreset,
    devices: list[jax.Device],
    device_bytes: int,
    shape: TrainingShape,
    optimizer: OptimizerConfig,
    progress: Callable[[str], None] = lambda message: None,
    options: Mapping[str, bool | float] | None = None,
) -> tuple[Compiled, Held]:
    """Compiles forward pass, backward pass and update, from shapes alone.

    Args:
      settings: of :meth:`~dsv41.settings.Settings.for_training`.
      device_bytes: of a device: where not even :class:`Held` fits, nothing is compiled.
      progress: called with what is done next.
      options: of the compiler, see :func:`~dsv41.planning.compiled.compile_step`.

    Returns:
      the step, whose collectives are its own and, if it fits, those that the compiler divides the update with; and what
      a device holds between steps.

    Raises:
      MeshError: a size does not fit the mesh, or the mesh not the devices.
    """
    model = Model(dataclasses.replace(settings, parallel=preset.parallel(devices)))
    recipe = Recipe(model, LossConfig(), _update(optimizer, model))
    state = abstract_state(model, recipe.update)
    parallel = model.settings.parallel

    held = Held(_bytes(state.params), _bytes(state.optimizer), _bytes(abstract_variables(model)))
    progress("at least " + ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in held._asdict().items()))
    if sum(held) > device_bytes:
        misfit = (
            f"does not fit: masters, optimizer state and rounded parameters alone need {sum(held) / 2**30:.2f} GiB of "
            f"{device_bytes / 2**30:.2f} a device, {(sum(held) - device_bytes) / 2**30:.2f} too many; not compiled"
        )
        return Compiled(0, 0, 0, 0, 0.0, [], [], {}, None, misfit), held

    def array(shape: tuple[int, ...], spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(parallel.mesh, spec))

    rows = array((shape.micro_batches, shape.rows, shape.length), parallel.spec(None, "batch"))
    constants = {"token_map": array((model.settings.text.vocab_size,), PartitionSpec())}
    compiled = compile_traced(
        lambda: train_step.trace(recipe, state, constants, TrainBatch(rows, rows, rows)),
        preset.axes,
        progress,
        options,
    )
    if compiled.executable is not None:
        moved = partitioned_collectives(compiled.executable.as_text(), preset.axes)
        compiled = dataclasses.replace(compiled, collectives=joined_counts(compiled.collectives + moved))
    return compiled, held


def _update(config: OptimizerConfig, model: Model) -> Update:
    declared = declared_variables(model)
    # The rate is a number here and a table of numbers in a run: one more scalar operation.
    optimizer = make_optimizer(config, declared, 1e-4, model.settings.parallel)
    return Update.of(optimizer, parameter_groups(config, declared))


def abstract_state(model: Model, update: Update) -> TrainState:
    """The shapes of a training state on the model's mesh, and where its leaves lie."""
    masters, where = abstract_masters(model), master_shardings(model)
    state = TrainState(jnp.int32(0), masters, jax.eval_shape(update.optimizer.init, masters), None)

    def placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, state, alike(state, where))


def _bytes(tree: Any) -> int:
    """Bytes of arrays on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def training_work(settings: Settings, preset: MeshPreset, shape: TrainingShape, optimizer: OptimizerConfig) -> Work:
    """The least that one device moves, computes and sends in a step.

    The backward pass counts as two forward passes, and recomputed layers as one more; masters, optimiser state and
    gradients are read and written once; rounded masters are joined and gradients summed once a micro-batch. Newton-
    Schulz iterations count as divided evenly over all devices.
    """
    spread = Spread(preset)
    step = Step(shape.length, 0, logits=shape.length)
    rows = spread.requests(shape.rows) * shape.micro_batches
    once = step_ledger(settings, held_parameters(settings, preset), spread, step, rows).total
    passes = 3 if settings.remat == "nothing" else 4
    model = Model(dataclasses.replace(settings, parallel=preset.sizes))
    links, elements = _joining(model)
    kept = elements * (4 * _FLOAT + 2 * jnp.dtype(optimizer.momentum_dtype).itemsize)
    return Work(
        passes * once.moved + kept,
        passes * once.operations + _orthogonalising(model, optimizer) / preset.devices,
        passes * once.links + shape.micro_batches * links,
    )


def _joining(model: Model) -> tuple[float, int]:
    """Bytes that a device sends and receives to join rounded masters and to sum gradients; elements of its masters."""
    parallel = model.settings.parallel
    total, elements = 0.0, 0
    there, wanted = flatten_tree(master_partitions(model)), flatten_tree(parameter_partitions(model, parallel))
    for path, leaf in flatten_tree(declared_variables(model)).items():
        shape = leaf.value.shape
        parts = [math.prod(part_shape(shape, spec[path], dict(parallel.axes))) for spec in (there, wanted)]
        own, joined = parts
        elements += own
        if own < joined:
            # All have float32 gradients of the joined part, and get the sum of their own: an all-gather run backwards.
            total += all_gather(own * (leaf.value.dtype.itemsize + _FLOAT), round(joined / own))
        elif (rest := math.prod(dict(parallel.axes).values()) // parallel.divided(_axes(wanted[path]))) > 1:
            total += all_reduce(own * _FLOAT, rest)
    return total, elements


def _axes(spec: PartitionSpec) -> list[str]:
    return [axis for names in spec for axis in ((names,) if isinstance(names, str) else names or ())]


def _orthogonalising(model: Model, config: OptimizerConfig) -> float:
    """Operations of all Newton-Schulz iterations: of a matrix [r, c], r ≤ c, 4·r²·c + 2·r³ each."""
    declared = declared_variables(model)
    leaves, total = flatten_tree(declared), 0.0
    for path, how in parameter_groups(config, declared).items():
        if how.group is Group.MUON:
            *lead, rows, columns = leaves[path].value.shape
            few, many = sorted((rows // how.blocks, columns))
            total += math.prod(lead) * how.blocks * config.muon_iterations * (4 * few**2 * many + 2 * few**3)
    return total
