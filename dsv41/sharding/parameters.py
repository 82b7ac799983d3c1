"""Where a model's parameters lie on a mesh."""

from __future__ import annotations

import math

from flax.core import meta
from jax.sharding import PartitionSpec

from dsv41.checkpoint.placement import ParameterTree, Path, flatten_tree, unflatten_tree
from dsv41.loading import declared_variables
from dsv41.model import Model
from dsv41.sharding.mesh import MeshPreset
from dsv41.sharding.rules import part_shape, partition


def parameter_partitions(model: Model, preset: MeshPreset) -> ParameterTree:
    """The ``PartitionSpec`` of each parameter, from the logical axes that its module declares.

    Raises:
      MeshError: a parameter does not fit the mesh; names the parameter and both axes.
    """

    declared = flatten_tree(declared_variables(model))
    return unflatten_tree({path: _partition(path, leaf, preset) for path, leaf in declared.items()})


def device_bytes(model: Model, preset: MeshPreset) -> dict[str, int]:
    """Bytes of parameters on one device of the mesh, by the tree's first key and for the routed experts apart."""
    totals: dict[str, int] = {}
    for path, leaf in flatten_tree(declared_variables(model)).items():
        part = "experts" if "experts" in path else path[0]
        shape = part_shape(leaf.value.shape, _partition(path, leaf, preset), preset.axes)
        totals[part] = totals.get(part, 0) + math.prod(shape) * leaf.value.dtype.itemsize
    return totals


def _partition(path: Path, leaf: meta.AxisMetadata, preset: MeshPreset) -> PartitionSpec:
    return partition("/".join(path), leaf.names, leaf.value.shape, preset.axes, preset.rules)
