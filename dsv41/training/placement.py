"""Where masters and what an optimiser keeps of them lie: spread over all devices, not only where layers want them.

A layer wants most parameters on many devices at once: all but the experts on every one along ``data`` and ``expert``.
Masters and momenta, three to six times as many bytes, are then divided along the axes that are left as well. A step
rounds its part to the dtype that the layers declare, joins the rounded parts, and gets the gradient of its part back,
summed in float32: neither whole masters nor whole float32 gradients exist on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from dsv41.checkpoint.placement import ParameterTree, Path, flatten_tree, unflatten_tree
from dsv41.declared import abstract_variables, declared_variables, parameter_partitions
from dsv41.layers.dspark import Drafter
from dsv41.model import Model
from dsv41.sharding.parallel import Parallel
from dsv41.sharding.rules import part_shape
from pallas_kernels.products import narrow


def spread_partition(spec: PartitionSpec, shape: tuple[int, ...], parallel: Parallel) -> PartitionSpec:
    """The partition, with each mesh axis that it leaves out on the dimension whose parts are largest, if it divides it.

    Larger axes choose first; they lie inside those that were there. An axis that divides no dimension stays out.
    """
    places = [(names,) if isinstance(names, str) else tuple(names or ()) for names in spec]
    places += [()] * (len(shape) - len(places))
    used = {axis for names in places for axis in names}
    left = [(axis, size) for axis, size in parallel.axes if size > 1 and axis not in used]
    for axis, size in sorted(left, key=lambda item: -item[1]):
        parts = [n // parallel.divided(names) for n, names in zip(shape, places, strict=True)]
        fitting = [dim for dim, part in enumerate(parts) if part % size == 0]
        if fitting:
            dim = max(fitting, key=lambda dim: parts[dim])
            places[dim] += (axis,)
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in places))


def master_partitions(module: Model | Drafter) -> ParameterTree:
    """The ``PartitionSpec`` of each master on the module's mesh."""
    parallel = module.settings.parallel
    wanted, leaves = flatten_tree(parameter_partitions(module, parallel)), flatten_tree(declared_variables(module))

    def of(path: Path) -> PartitionSpec:
        # The whole parts of padded leaves, not their own rows, are what is divided further.
        shape = part_shape(leaves[path].value.shape, wanted[path], dict(parallel.axes))
        places = (*wanted[path], *(None,) * (len(shape) - len(wanted[path])))
        padded = tuple(n * parallel.divided(names) for n, names in zip(shape, places, strict=True))
        return spread_partition(wanted[path], padded, parallel)

    return unflatten_tree({path: of(path) for path in leaves})


def abstract_masters(module: Model | Drafter) -> ParameterTree:
    """Shapes of the float32 masters as ``jax.ShapeDtypeStruct`` leaves; on a mesh they say where they lie."""
    leaves = flatten_tree(abstract_variables(module))
    where = master_shardings(module)
    return unflatten_tree(
        {path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=where.get(path)) for path, leaf in leaves.items()}
    )


def master_shardings(module: Model | Drafter) -> dict[Path, Sharding]:
    """Where each master lies; empty without a mesh."""
    mesh = module.settings.parallel.mesh
    if mesh is None:
        return {}
    return {path: NamedSharding(mesh, _short(spec)) for path, spec in flatten_tree(master_partitions(module)).items()}


def _short(spec: PartitionSpec) -> PartitionSpec:
    """As compiled steps say it, to whom one that ends with None is another partition: they would compile twice."""
    places = list(spec)
    while places and places[-1] is None:
        places.pop()
    return PartitionSpec(*places)


def spread(module: Model | Drafter, masters: ParameterTree) -> ParameterTree:
    """Masters where a run on the module's mesh keeps them; without a mesh, where they are."""
    where = master_shardings(module)
    if not where:
        return masters
    return unflatten_tree({path: jax.device_put(x, where[path]) for path, x in flatten_tree(masters).items()})


def alike(tree: Any, where: Mapping[Path, Sharding]) -> Any:
    """A sharding for each leaf of a training state: that of the master that its path ends with; else on every device.

    Args:
      tree: a state, or an optimiser's; its leaves are not looked at.
      where: of the masters, not empty.
    """
    nothing = NamedSharding(next(iter(where.values())).mesh, PartitionSpec())

    def of(path: tuple, _) -> Sharding:
        names: Path = ()
        for key in reversed(path):
            if not isinstance(key, jax.tree_util.DictKey):
                break
            names = (key.key, *names)
        return where.get(names, nothing)

    return jax.tree_util.tree_map_with_path(of, tree)


def held(module: Model | Drafter, state: Any) -> Any:
    """Inside a jitted step: the state, to be left where its masters lie."""
    where = master_shardings(module)
    return lax.with_sharding_constraint(state, alike(state, where)) if where else state


class _Joined(NamedTuple):
    """How a leaf becomes what a layer computes with: its dtype, and the axes to join along each dimension."""

    dtype: jnp.dtype
    dims: tuple[tuple[int, tuple[str, ...]], ...]


def as_declared(module: Model | Drafter, params: ParameterTree) -> ParameterTree:
    """Masters as the modules compute with them: rounded to the dtypes that they declare."""
    return jax.tree.map(lambda x, leaf: narrow(x, leaf.dtype), params, abstract_variables(module))


def joined(module: Model | Drafter, params: ParameterTree) -> ParameterTree:
    """:func:`as_declared` on one device of the mesh, where only parts of the masters lie.

    Args:
      params: this device's part of the masters (:func:`master_partitions`).
    """
    parallel = module.settings.parallel
    if parallel.mesh is None:
        return as_declared(module, params)
    leaves = flatten_tree(abstract_variables(module))
    wanted, there = flatten_tree(parameter_partitions(module, parallel)), flatten_tree(master_partitions(module))

    def one(path: Path, x: jax.Array) -> jax.Array:
        dims = _added(wanted[path], there[path])
        dtype = leaves[path].dtype
        return _join(_Joined(dtype, dims), x) if dims else narrow(x, dtype)

    return unflatten_tree({path: one(path, x) for path, x in flatten_tree(params).items()})


def _added(wanted: PartitionSpec, there: PartitionSpec) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Dimensions along which a master is divided further, and the axes."""
    found = []
    for dim, names in enumerate(there):
        names = (names,) if isinstance(names, str) else names or ()
        before = wanted[dim] if dim < len(wanted) else ()
        before = (before,) if isinstance(before, str) else before or ()
        if len(names) > len(before):
            found.append((dim, tuple(names[len(before) :])))
    return tuple(found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _join(how: _Joined, x: jax.Array) -> jax.Array:
    x = narrow(x, how.dtype)
    for dim, axes in how.dims:
        x = lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


def _scatter(how: _Joined, _, gradient: jax.Array) -> tuple[jax.Array]:
    # Widened before it is summed: the sum over a hundred devices in bfloat16 would lose most of its bits.
    gradient = gradient.astype(jnp.float32)
    for dim, axes in reversed(how.dims):
        gradient = lax.psum_scatter(gradient, axes, scatter_dimension=dim, tiled=True)
    return (gradient,)


_join.defvjp(lambda how, x: (_join(how, x), None), _scatter)
