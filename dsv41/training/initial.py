"""Parameters before the first step."""

from __future__ import annotations

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

    def fill(path: Path) -> jax.Array:
        boxed: meta.AxisMetadata = declared[path]
        shape, where = boxed.value.shape, wanted[path]
        padding = tuple((0, new - old) for old, new in zip(shape, where.shape, strict=True))
        rank = len(shape) - sum(name == "layers" for name in boxed.names)
        how = _Drawn(_kind(path[-1], rank), shape, padding, text.initializer_range, text.hc_mult, seed)
        return _program(how, where.sharding)(np.uint32(zlib.crc32("/".join(path).encode())))

    leaves = {path: fill(path) for path in declared}
    if model.settings.parallel.mesh is None:
        leaves = jax.device_put(leaves, jax.local_devices()[0])
    return unflatten_tree(leaves)


class _Drawn(NamedTuple):
    """What a parameter's program depends on besides its number; parameters that are alike share one."""

    kind: str
    shape: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    spread: float
    copies: int
    seed: int


def _kind(name: str, rank: int) -> str:
    if name.startswith("hc_") and name.endswith(("_scale", "_base")):
        return name.rpartition("_")[2]
    if name.startswith("hc_"):
        return "normal"
    if name in ("q_weight", "k_weight") or (rank == 1 and name == "weight"):
        return "ones"
    return "zeros" if rank == 1 else "normal"  # sinks and routers' biases


@functools.lru_cache(maxsize=256)
def _program(how: _Drawn, where: Sharding | None) -> Callable[[np.uint32], jax.Array]:
    def make(number: jax.Array) -> jax.Array:
        return jnp.pad(_values(how, jax.random.fold_in(jax.random.key(how.seed), number)), how.padding)

    return jax.jit(make, out_shardings=where)


def _values(how: _Drawn, key: jax.Array) -> jax.Array:
    shape, copies = how.shape, how.copies
    if how.kind == "scale":
        return jnp.full(shape, _HC_SCALE, jnp.float32)
    if how.kind == "base":
        comb = _HC_DIAGONAL * np.eye(copies, dtype=np.float32).ravel()
        read = np.full(copies, -np.log(copies - 1) if copies > 1 else _HC_DIAGONAL, np.float32)
        base = np.concatenate([read, np.zeros(copies, np.float32), comb])
        return jnp.broadcast_to(jnp.asarray(base), shape)
    if how.kind == "normal":
        return how.spread * jax.random.normal(key, shape, jnp.float32)
    return jnp.full(shape, how.kind == "ones", jnp.float32)
