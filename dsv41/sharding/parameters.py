"""Where a model's parameters lie on a mesh."""

from __future__ import annotations

import math

import jax
from flax.core import meta
from jax.sharding import PartitionSpec

from dsv41.checkpoint import ParameterTree
from dsv41.loading import declared_variables
from dsv41.model import Model
from dsv41.sharding.mesh import MeshPreset
from dsv41.sharding.rules import part_shape, partition


def parameter_partitions(model: Model, preset: MeshPreset) -> ParameterTree:
    """The ``PartitionSpec`` of each parameter, from the logical axes that its module declares.

    Raises:
      MeshError: a parameter does not fit the mesh; names the parameter and both axes.
    """

    def of(path: tuple, leaf: meta.AxisMetadata) -> PartitionSpec:
        name = "/".join(str(getattr(key, "key", key)) for key in path)
        return partition(name, leaf.names, leaf.value.shape, preset.axes, preset.rules)

    return jax.tree_util.tree_map_with_path(of, declared_variables(model), is_leaf=_is_declaration)


def device_bytes(model: Model, preset: MeshPreset) -> dict[str, int]:
    """Bytes of parameters on one device of the mesh, by the tree's first key and for the routed experts apart."""
    totals: dict[str, int] = {}
    declared = jax.tree_util.tree_flatten_with_path(declared_variables(model), is_leaf=_is_declaration)[0]
    specs = jax.tree.leaves(parameter_partitions(model, preset), is_leaf=lambda x: isinstance(x, PartitionSpec))
    for (path, leaf), spec in zip(declared, specs, strict=True):
        keys = [str(getattr(key, "key", key)) for key in path]
        part = "experts" if "experts" in keys else keys[0]
        size = math.prod(part_shape(leaf.value.shape, spec, preset.axes)) * leaf.value.dtype.itemsize
        totals[part] = totals.get(part, 0) + size
    return totals


def _is_declaration(x: object) -> bool:
    return isinstance(x, meta.AxisMetadata)
