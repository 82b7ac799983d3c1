"""The parameters that modules declare: their shapes, dtypes and logical axes, and what that means on a mesh."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
from flax.core import meta
from jax.sharding import NamedSharding, PartitionSpec

from dsv41.checkpoint.placement import ParameterTree, Path, flatten_tree, unflatten_tree
from dsv41.layers.dspark import Drafter
from dsv41.model import Model
from dsv41.numerics.rounding import RoundingPolicy
from dsv41.settings import Settings
from dsv41.sharding.parallel import Parallel
from dsv41.sharding.rules import PADDED


def declared_variables(model: Model | Drafter) -> ParameterTree:
    """The whole parameters as their modules declare them: shapes and dtypes, boxed with names of logical axes."""
    settings = model.settings
    # What does not change a parameter is left out: models that differ in nothing else are traced once.
    bare = Settings(
        settings.config,
        RoundingPolicy.preset("off"),
        settings.packed_weights,
        Settings.default(settings.config).page_tokens,
        settings.engram_in_step,
    )
    return _declared(dataclasses.replace(model, settings=bare))


@functools.lru_cache(maxsize=32)
def _declared(model: Model | Drafter) -> ParameterTree:
    return jax.eval_shape(functools.partial(model.init, method="declare_all"), jax.random.key(0))["params"]


def abstract_variables(model: Model | Drafter) -> ParameterTree:
    """Shapes and dtypes of the parameters as ``jax.ShapeDtypeStruct`` leaves; nothing is allocated.

    On a mesh they say where they lie, and dimensions that parts need not divide (rows of Engram's tables) are rounded
    up so that they do.
    """
    parallel = model.settings.parallel
    if parallel.mesh is None:
        return nn.meta.unbox(declared_variables(model))
    leaves = {}
    for path, leaf in flatten_tree(declared_variables(model)).items():
        spec = _partition(path, leaf, parallel)
        part = parallel.shape("/".join(path), leaf.names, leaf.value.shape)
        shape = tuple(n * parallel.divided(places) for n, places in zip(part, spec, strict=True))
        leaves[path] = jax.ShapeDtypeStruct(shape, leaf.value.dtype, sharding=NamedSharding(parallel.mesh, spec))
    return unflatten_tree(leaves)


def padded_leaves(model: Model | Drafter) -> dict[Path, int]:
    """The parameters that a mesh may give rows of zeros behind their own, and the number of their own rows.

    They are those whose first dimension is a logical axis of :data:`~dsv41.sharding.rules.PADDED`.
    """
    declared = flatten_tree(declared_variables(model))
    return {path: leaf.value.shape[0] for path, leaf in declared.items() if leaf.names and leaf.names[0] in PADDED}


def parameter_partitions(model: Model | Drafter, parallel: Parallel) -> ParameterTree:
    """The ``PartitionSpec`` of each parameter, from the logical axes that its module declares.

    Raises:
      MeshError: a parameter does not fit the mesh; names the parameter and both axes.
    """
    declared = flatten_tree(declared_variables(model))
    return unflatten_tree({path: _partition(path, leaf, parallel) for path, leaf in declared.items()})


def _partition(path: Path, leaf: meta.AxisMetadata, parallel: Parallel) -> PartitionSpec:
    return parallel.partition("/".join(path), leaf.names, leaf.value.shape)
