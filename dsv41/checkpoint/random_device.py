"""Random weights made where they lie: for timing and for comparing back ends at sizes that a host would draw for hours.

The values have the distributions of :class:`~dsv41.checkpoint.random.RandomSource` but are others: they depend on the
device's generator, on the stacking of the layers and on the sharding.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from dsv41.checkpoint.layout import TensorSpec, checkpoint_layout
from dsv41.checkpoint.placement import ParameterTree, Path, flatten_tree, parameter_place, unflatten_tree
from dsv41.checkpoint.random import code_table, moments, scale_table
from dsv41.config import ModelConfig

# What is drawn at once: the bits of a leaf of several gigabytes would need as much again.
_SLICE_VALUES = 2**26

# Compiles and runs fastest; only distributions matter here.
_GENERATOR = "rbg"


def random_parameters(
    config: ModelConfig, target: ParameterTree, seed: int, padded: Mapping[Path, int] | None = None
) -> ParameterTree:
    """Draws the leaves of a parameter tree on their devices.

    Args:
      target: nested dict of ``jax.ShapeDtypeStruct``, with or without sharding, as of
        :func:`dsv41.checkpoint.load_checkpoint`.
      seed: any integer.
      padded: leaves with more rows than their tensor, and the rows of the tensor; those behind are zeros.

    Returns:
      The tree with arrays in place of the target's leaves.
    """
    layout = checkpoint_layout(config)
    weights = {spec.scale_name: spec for spec in layout.values() if spec.block is not None}
    specs: dict[Path, TensorSpec] = {}
    for spec in layout.values():
        specs.setdefault(parameter_place(config, spec.name).path, spec)
    key = jax.random.key(seed, impl=_GENERATOR)

    def draw(path: Path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        mine = jax.random.fold_in(key, zlib.crc32("/".join(path).encode()))
        rows = None if padded is None else padded.get(path)
        return _leaf(mine, leaf, specs[path], weights.get(specs[path].name), rows)

    wanted = flatten_tree(target)
    # One program for each shape, compiled side by side: that is most of the time. Several processes must start
    # programs in one order.
    with concurrent.futures.ThreadPoolExecutor(None if jax.process_count() == 1 else 1) as pool:
        return unflatten_tree(dict(zip(wanted, pool.map(draw, *zip(*wanted.items(), strict=True)), strict=True)))


def _leaf(
    key: jax.Array, leaf: jax.ShapeDtypeStruct, spec: TensorSpec, weight: TensorSpec | None, rows: int | None
) -> jax.Array:
    """One leaf that holds tensors like ``spec``; ``weight`` is what ``spec`` has the scales of, if it has any."""
    if leaf.dtype in (jnp.uint8, jnp.float8_e4m3fn):
        table = code_table(spec) if weight is None else scale_table(weight)
        spread, mean = table.view(np.uint8), None
    else:
        mean, deviation = moments(spec)
        spread, mean = np.float32(deviation), np.float32(mean)
    if isinstance(leaf.sharding, NamedSharding):
        # Bits of a key are an argument that every process of a mesh has; the key itself lies on one device.
        return _draw_parts(
            np.asarray(jax.random.key_data(key)), spread, mean, leaf.shape, leaf.dtype, leaf.sharding, rows
        )
    return _draw(key, spread, mean, leaf.shape, leaf.dtype, leaf.sharding)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _draw(key: jax.Array, spread, mean, shape: tuple[int, ...], dtype, sharding) -> jax.Array:
    """A leaf on one device."""
    out = _values(key, spread, mean, shape, dtype)
    return out if sharding is None else lax.with_sharding_constraint(out, sharding)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _draw_parts(
    bits: jax.Array, spread, mean, shape: tuple[int, ...], dtype, sharding: NamedSharding, rows: int | None
) -> jax.Array:
    """A leaf on a mesh: each device draws its own part, as no compiler divides the generator."""
    spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    part = sharding.shard_shape(shape)

    def draw(bits: jax.Array, *moments: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(bits, impl=_GENERATOR)
        axes = [axis for places in spec if places for axis in ((places,) if isinstance(places, str) else places)]
        out = _values(jax.random.fold_in(key, lax.axis_index(axes)) if axes else key, *moments, part, dtype)
        if rows is None or rows == shape[0]:
            return out
        first = lax.axis_index(spec[0]) * part[0] if spec[0] else 0
        own = (first + jnp.arange(part[0]) < rows).reshape(-1, *(1,) * (len(part) - 1))
        return jnp.where(own, out, jnp.zeros_like(out))

    run = jax.shard_map(draw, mesh=sharding.mesh, in_specs=PartitionSpec(), out_specs=sharding.spec, check_vma=False)
    return run(bits, spread, mean)


def _values(key: jax.Array, spread, mean, shape: tuple[int, ...], dtype) -> jax.Array:
    """Codes from a table of equally likely ones (mean None), or normal values; the first axes in turn if many."""

    def values(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if mean is not None:
            return (jax.random.normal(key, shape, jnp.float32) * spread + mean).astype(dtype)
        bits = jax.random.bits(key, shape, jnp.uint16 if len(spread) == 2**16 else jnp.uint8)
        codes = jnp.take(spread, bits.astype(jnp.int32) % len(spread), mode="clip")
        return codes if dtype == jnp.uint8 else lax.bitcast_convert_type(codes, dtype)

    axes = 0
    while axes < len(shape) - 1 and math.prod(shape[axes:]) > _SLICE_VALUES:
        axes += 1
    out = lax.map(lambda k: values(k, shape[axes:]), jax.random.split(key, math.prod(shape[:axes])))
    return out.reshape(shape)
