"""Parameters before the first step."""

from __future__ import annotations

import enum
import functools
import zlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from jax.sharding import Sharding

from dsv41.checkpoint.placement import ParameterTree, Path, flatten_tree, unflatten_tree
from dsv41.declared import abstract_variables, declared_variables
from dsv41.layers.dspark import Drafter
from dsv41.model import Model

_HC_SCALE = 0.01
"""How much a stream's content sways its mixing at first."""
_HC_DIAGONAL = 4.0
"""Logit by which a copy at first stays with itself."""


def initial_parameters(model: Model | Drafter, seed: int) -> ParameterTree:
    """Float32 parameters to train from, on the first device or where the model's mesh wants them.

    Matrices and tables are normal with ``initializer_range``; norms and Engram's gains are 1, sinks and routers'
    biases 0. Hyper-connections begin as a plain residual network: each copy stays with itself, gets all of every
    sub-layer's output, and is read with the same weight as the others; what the streams hold sways this little.

    Args:
      seed: a parameter's values depend on it and on the parameter's path alone, on any mesh.
    """
    text = model.settings.text
    declared = flatten_tree(declared_variables(model))
    wanted = flatten_tree(abstract_variables(model))

    def fill(path: Path) -> jax.Array | np.ndarray:
        boxed: meta.AxisMetadata = declared[path]
        shape, where = boxed.value.shape, wanted[path]
        padding = tuple((0, new - old) for old, new in zip(shape, where.shape, strict=True))
        kind = _kind(path[-1], len(shape) - sum(name == "layers" for name in boxed.names))
        if kind is not _Kind.NORMAL:
            return _placed(np.pad(_constant(kind, shape, text.hc_mult), padding), where.sharding)
        how = _Drawn(shape, padding, text.initializer_range, seed)
        return _program(how, where.sharding)(np.uint32(zlib.crc32("/".join(path).encode())))

    leaves = {path: fill(path) for path in declared}
    if model.settings.parallel.mesh is None:
        leaves = jax.device_put(leaves, jax.local_devices()[0])
    return unflatten_tree(leaves)


class _Kind(enum.Enum):
    NORMAL = enum.auto()
    ZEROS = enum.auto()
    ONES = enum.auto()
    HC_SCALE = enum.auto()
    HC_BASE = enum.auto()


def _kind(name: str, rank: int) -> _Kind:
    if name.startswith("hc_"):
        return {"scale": _Kind.HC_SCALE, "base": _Kind.HC_BASE}.get(name.rpartition("_")[2], _Kind.NORMAL)
    if name in ("q_weight", "k_weight") or (rank == 1 and name == "weight"):
        return _Kind.ONES
    return _Kind.ZEROS if rank == 1 else _Kind.NORMAL  # sinks and routers' biases


def _constant(kind: _Kind, shape: tuple[int, ...], copies: int) -> np.ndarray:
    """Of the host: they are vectors, and a program for each shape of them would have to be compiled."""
    if kind is _Kind.HC_BASE:
        comb = _HC_DIAGONAL * np.eye(copies, dtype=np.float32).ravel()
        read = np.full(copies, -np.log(copies - 1) if copies > 1 else _HC_DIAGONAL, np.float32)
        return np.broadcast_to(np.concatenate([read, np.zeros(copies, np.float32), comb]), shape)
    value = {_Kind.ZEROS: 0, _Kind.ONES: 1, _Kind.HC_SCALE: _HC_SCALE}[kind]
    return np.full(shape, value, np.float32)


def _placed(value: np.ndarray, where: Sharding | None) -> jax.Array | np.ndarray:
    return value if where is None else jax.make_array_from_callback(value.shape, where, lambda index: value[index])


class _Drawn(NamedTuple):
    """What a parameter's program depends on besides its number; parameters that are alike share one."""

    shape: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    spread: float
    seed: int


@functools.lru_cache(maxsize=256)
def _program(how: _Drawn, where: Sharding | None) -> Callable[[np.uint32], jax.Array]:
    def make(number: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(how.seed), number)
        return jnp.pad(how.spread * jax.random.normal(key, how.shape, jnp.float32), how.padding)

    return jax.jit(make, out_shardings=where)
