"""Random weights made where they lie: for timing and for comparing back ends at sizes that a host would draw for hours.

The values have the distributions of :class:`~dsv41.checkpoint.random.RandomSource` but are others: they depend on the
device's generator, on the stacking of the layers and on the sharding.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.checkpoint.layout import TensorSpec, checkpoint_layout
from dsv41.checkpoint.placement import ParameterTree, Path, flatten_tree, parameter_place, unflatten_tree
from dsv41.checkpoint.random import code_table, moments, scale_table
from dsv41.config import ModelConfig

# What is drawn at once: the bits of a leaf of several gigabytes would need as much again.
_SLICE_VALUES = 2**26


def random_parameters(config: ModelConfig, target: ParameterTree, seed: int) -> ParameterTree:
    """Draws the leaves of a parameter tree on their devices.

    Args:
      target: nested dict of ``jax.ShapeDtypeStruct``, with or without sharding, as of
        :func:`dsv41.checkpoint.load_checkpoint`.
      seed: any integer.

    Returns:
      The tree with arrays in place of the target's leaves.
    """
    layout = checkpoint_layout(config)
    weights = {spec.scale_name: spec for spec in layout.values() if spec.block is not None}
    specs: dict[Path, TensorSpec] = {}
    for spec in layout.values():
        specs.setdefault(parameter_place(config, spec.name).path, spec)
    # "rbg" is the generator that compiles and runs fastest; only distributions matter here.
    key = jax.random.key(seed, impl="rbg")

    def draw(path: Path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        mine = jax.random.fold_in(key, zlib.crc32("/".join(path).encode()))
        return _leaf(mine, leaf, specs[path], weights.get(specs[path].name))

    wanted = flatten_tree(target)
    # One program for each shape, compiled side by side: that is most of the time.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return unflatten_tree(dict(zip(wanted, pool.map(draw, *zip(*wanted.items(), strict=True)), strict=True)))


def _leaf(key: jax.Array, leaf: jax.ShapeDtypeStruct, spec: TensorSpec, weight: TensorSpec | None) -> jax.Array:
    """One leaf that holds tensors like ``spec``; ``weight`` is what ``spec`` has the scales of, if it has any."""
    if leaf.dtype in (jnp.uint8, jnp.float8_e4m3fn):
        table = code_table(spec) if weight is None else scale_table(weight)
        return _draw(key, table.view(np.uint8), None, leaf.shape, leaf.dtype, leaf.sharding)
    mean, deviation = moments(spec)
    return _draw(key, np.float32(deviation), np.float32(mean), leaf.shape, leaf.dtype, leaf.sharding)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _draw(key: jax.Array, spread, mean, shape: tuple[int, ...], dtype, sharding) -> jax.Array:
    """Codes from a table of equally likely ones (mean None), or normal values; the first axes in turn if many."""

    def values(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if mean is not None:
            return (jax.random.normal(key, shape, jnp.float32) * spread + mean).astype(dtype)
        bits = jax.random.bits(key, shape, jnp.uint16 if len(spread) == 2**16 else jnp.uint8)
        codes = jnp.take(spread, bits.astype(jnp.int32) % len(spread), mode="clip")
        return codes if dtype == jnp.uint8 else jax.lax.bitcast_convert_type(codes, dtype)

    axes = 0
    while axes < len(shape) - 1 and math.prod(shape[axes:]) > _SLICE_VALUES:
        axes += 1
    out = jax.lax.map(lambda k: values(k, shape[axes:]), jax.random.split(key, math.prod(shape[:axes])))
    out = out.reshape(shape)
    return out if sharding is None else jax.lax.with_sharding_constraint(out, sharding)
