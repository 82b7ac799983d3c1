"""Steps on a mesh: the same function, run as one program a device over its part of every argument.

A step is written for one device's part (:class:`~dsv41.sharding.parallel.Parallel` joins parts inside). What remains
is to say how each argument and result is divided, which :func:`sharded_step` is told by *kinds*. On one device a step
is a plain jitted function.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dsv41.declared import parameter_partitions
from dsv41.layers.dspark import Drafter
from dsv41.model import Model
from dsv41.sharding.chips import TPU_OPTIONS
from dsv41.sharding.parallel import Parallel
from dsv41.state.request import ModelState
from dsv41.state.ring import Ring

Statics = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a tree of arrays is divided.

    Attributes:
      spec: partitions, a prefix of the tree, from a step's static arguments and their mesh.
      gathered: a result whose parts are joined on every device, so that any host can read it.
    """

    spec: Callable[[Statics, Parallel], Any]
    gathered: bool = False


def _variables(module: type) -> Callable[[Statics, Parallel], Any]:
    def spec(statics: Statics, parallel: Parallel) -> Any:
        (model,) = (static for static in statics if isinstance(static, module))
        partitions = {"params": parameter_partitions(model, parallel)}
        return partitions | ({"constants": PartitionSpec()} if module is Model else {})

    return spec


def _ring(parallel: Parallel) -> Ring:
    return Ring(parallel.spec(None, "batch"), parallel.spec("batch"))


def state_spec(parallel: Parallel) -> ModelState:
    """Partitions of a model's state, a prefix of its tree."""
    requests = parallel.spec("batch")
    return ModelState(
        memory=parallel.spec(None, "pages"),
        page_table=requests,
        encoder_ring=_ring(parallel),
        decoder_ring=_ring(parallel),
        tails=parallel.spec(None, "batch"),
        ngram_tail=requests,
        length=requests,
    )


VARIABLES = Kind(_variables(Model))
DRAFTER_VARIABLES = Kind(_variables(Drafter))
STATE = Kind(lambda _, parallel: state_spec(parallel))
RING = Kind(lambda _, parallel: _ring(parallel))
REQUESTS = Kind(lambda _, parallel: parallel.spec("batch"))
"""Requests lie along the first axis of every leaf."""
LAYERED = Kind(lambda _, parallel: parallel.spec(None, "batch"))
"""Requests lie along the second axis of every leaf."""
GATHERED = Kind(lambda _, parallel: PartitionSpec(), gathered=True)
"""A result with requests along its first axis, whole on every device."""


def sharded_step(
    static: int, donate: Sequence[int], arguments: Sequence[Kind], results: Any
) -> Callable[[Callable], Callable]:
    """Makes a step a jitted function on one device or on the mesh of its first static argument.

    Args:
      static: so many leading arguments are static; the first has ``settings``.
      donate: arguments whose buffers the results may take.
      arguments: kinds of the arguments behind the static ones.
      results: kinds of the results, a prefix of their tree.
    """

    def decorate(step: Callable) -> Callable:
        plain = jax.jit(step, static_argnums=tuple(range(static)), donate_argnums=tuple(donate))
        signature = inspect.signature(step)

        @functools.lru_cache(maxsize=16)
        def divided(count: int, *statics: Any) -> tuple[Callable, tuple[Any, ...]]:
            parallel = statics[0].settings.parallel
            is_kind = lambda leaf: isinstance(leaf, Kind)  # noqa: E731
            in_specs = tuple(kind.spec(statics, parallel) for kind in arguments[:count])
            out_specs = jax.tree.map(lambda kind: kind.spec(statics, parallel), results, is_leaf=is_kind)

            def part(*arrays: Any) -> Any:
                def joined(kind: Kind, tree: Any) -> Any:
                    return jax.tree.map(lambda x: parallel.gather(x, "batch", 0), tree) if kind.gathered else tree

                return jax.tree.map(joined, results, step(*statics, *arrays), is_leaf=is_kind)

            # Every device of a tensor or context group computes the same replicated values, which cannot be inferred.
            run = jax.shard_map(part, mesh=parallel.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
            # What a step does not read (the decoder's weights in a prefill) is there all the same, and counts as such.
            donated = tuple(i - static for i in donate)
            options = compiler_options(parallel)
            return jax.jit(run, donate_argnums=donated, keep_unused=True, compiler_options=options), in_specs

        def bound(args: tuple, options: dict) -> tuple:
            given = signature.bind(*args, **options)
            if given.kwargs:  # one before them is not given
                given.apply_defaults()
            return given.args

        @functools.wraps(step)
        def call(*args: Any, **options: Any) -> Any:
            if args[0].settings.parallel.mesh is None:
                return plain(*args, **options)
            args = bound(args, options)
            run, in_specs = divided(len(args) - static, *args[:static])
            return run(
                *(place(a, spec, args[0].settings.parallel) for a, spec in zip(args[static:], in_specs, strict=True))
            )

        def trace(*args: Any, **options: Any) -> jax.stages.Traced:
            parallel = args[0].settings.parallel
            if parallel.mesh is None:
                return plain.trace(*args, **options)
            args = bound(args, options)
            run, in_specs = divided(len(args) - static, *args[:static])
            return run.trace(*map(functools.partial(describe, parallel=parallel), args[static:], in_specs))

        call.trace, call.lower = trace, lambda *args, **options: trace(*args, **options).lower()
        call.compiled_programs = plain._cache_size
        return call

    return decorate


def compiler_options(parallel: Parallel) -> dict[str, bool] | None:
    """What a step's compiler is told on the mesh's devices."""
    return dict(TPU_OPTIONS) if parallel.mesh.devices.flat[0].platform == "tpu" else None


def place(tree: Any, spec: Any, parallel: Parallel) -> Any:
    """Puts the arrays of a host, equal in all processes, where a mesh wants them; arrays on the mesh stay.

    Args:
      spec: partitions, a prefix of the tree.
    """

    def put(spec: PartitionSpec, part: Any) -> Any:
        sharding = NamedSharding(parallel.mesh, spec)

        def leaf(x: Any) -> jax.Array:
            if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and x.sharding.mesh == parallel.mesh:
                return x
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(leaf, part)

    return jax.tree.map(put, spec, tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def describe(tree: Any, spec: Any, parallel: Parallel) -> Any:
    """Shapes and dtypes of a tree of arrays or of ``jax.ShapeDtypeStruct``, and where a mesh wants them.

    Args:
      spec: partitions, a prefix of the tree.
    """

    def put(spec: PartitionSpec, part: Any) -> Any:
        sharding = NamedSharding(parallel.mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part)

    return jax.tree.map(put, spec, tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
