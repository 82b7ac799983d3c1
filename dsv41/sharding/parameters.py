"""Bytes of a model's parameters on one device of a mesh."""

from __future__ import annotations

import math

from dsv41.checkpoint.placement import flatten_tree
from dsv41.declared import declared_variables
from dsv41.model import Model
from dsv41.sharding.parallel import Parallel


def device_bytes(model: Model, parallel: Parallel) -> dict[str, int]:
    """Bytes of parameters on one device of the mesh, by the tree's first key and for the routed experts apart.

    Raises:
      MeshError: a parameter does not fit the mesh; names the parameter and both axes.
    """
    totals: dict[str, int] = {}
    for path, leaf in flatten_tree(declared_variables(model)).items():
        part = "experts" if "experts" in path else path[0]
        shape = parallel.shape("/".join(path), leaf.names, leaf.value.shape)
        totals[part] = totals.get(part, 0) + math.prod(shape) * leaf.value.dtype.itemsize
    return totals
