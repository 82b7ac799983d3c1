"""Parameters before the first step."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

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
        loops = sum(name == "layers" for name in boxed.names)
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32("/".join(path).encode()))
        padding = [(0, new - old) for old, new in zip(shape, where.shape, strict=True)]

        def make() -> jax.Array:
            return jnp.pad(_values(path, key, shape, loops, text.initializer_range, text.hc_mult), padding)

        return jax.jit(make, out_shardings=where.sharding)()

    leaves = {path: fill(path) for path in declared}
    if model.settings.parallel.mesh is None:
        leaves = jax.device_put(leaves, jax.local_devices()[0])
    return unflatten_tree(leaves)


def _values(path: Path, key: jax.Array, shape: tuple[int, ...], loops: int, spread: float, copies: int) -> jax.Array:
    name, rank = path[-1], len(shape) - loops
    if name.startswith("hc_"):
        if name.endswith("_scale"):
            return jnp.full(shape, _HC_SCALE, jnp.float32)
        if name.endswith("_base"):
            comb = _HC_DIAGONAL * np.eye(copies, dtype=np.float32).ravel()
            read = np.full(copies, -np.log(copies - 1) if copies > 1 else _HC_DIAGONAL, np.float32)
            base = np.concatenate([read, np.zeros(copies, np.float32), comb])
            return jnp.broadcast_to(jnp.asarray(base), shape)
        return spread * jax.random.normal(key, shape, jnp.float32)
    if name in ("q_weight", "k_weight") or (rank == 1 and name == "weight"):
        return jnp.ones(shape, jnp.float32)
    if rank == 1:  # sinks and routers' biases
        return jnp.zeros(shape, jnp.float32)
    return spread * jax.random.normal(key, shape, jnp.float32)
