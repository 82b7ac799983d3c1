"""Expert parallelism: rows travel to the devices of their experts and their sums come back; none is dropped.

Two ways, chosen for each compiled shape by a mesh's ``dispatch``. With P devices along the axes, R rows on each, k
experts a row, b bytes a value and sums in four bytes, one device receives

    gather      (P − 1) · R · d · (b + 4)         every row of every other device, and their sums for its own
    exchange    (P − 1) · R · d · (b + 4) · s     the share s = 1 − (1 − 1/P)^k of both, at even routing

and holds P · R rows at once, or about P · R · s (:mod:`dsv41.sharding.exchange`). The exchange never moves more, but
lines rows up first and waits for one collective more, so "auto" takes it where what it spares would take longer than
that. For DeepSeek-V4.1-Flash (d = 5120, k = 6, b = 2) it does from 10 rows a device on 128 devices, 20 on 64, 348 on 8
and 2046 on 4; on 2, where nearly every row has experts on both, hardly ever.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv41.sharding.exchange import Compute, Link, capacity, exchange, share
from dsv41.sharding.parallel import Parallel

_LATENCY_BYTES = 32 * 2**20
"""What a link of 450 GB/s moves in 75 µs: so much longer than gathering did an exchange of as many bytes take on two
H200s, at 128 rows a device (148 and 74 µs) as at 1024 (298 and 219 µs)."""


def over_experts(
    parallel: Parallel,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    num_experts: int,
    compute: Compute,
    params: Any,
) -> jax.Array:
    """The weighted sum over each row's experts, wherever they lie.

    Args:
      x: this device's rows ``[rows, d]``.
      experts: int32 ``[rows, k]`` in 0 … num_experts; the last number is nobody's.
      weights: float32 ``[rows, k]``.
      num_experts: of the whole model.
      compute: what a device's experts make of rows.
      params: this device's experts, its first argument.

    Returns:
      float32 ``[rows, d]``.
    """
    places = parallel.places("experts")
    if not places:
        return compute(params, x, experts, weights)
    own = parallel.part("experts", num_experts)
    # Along axes that do not divide rows, every device has the same rows already and computes its experts' part.
    held = tuple(axis for axis in places if axis in parallel.places("batch"))
    rest = tuple(axis for axis in places if axis not in held)
    parts, (rows, chosen) = parallel.divided(held), experts.shape
    if own < chosen:
        compute = functools.partial(_without_gaps, compute, own)
    if held and dispatch(parallel, rows, chosen, x.shape[1], x.dtype.itemsize) == "exchange":
        link = Link(held, parts, own, capacity(rows, parts, chosen))
        y = exchange(link, compute, params, x, _along(parallel, places, held, experts, own), weights)
        return lax.psum(y, rest) if rest else y
    if held:
        x, experts, weights = (lax.all_gather(a, held, axis=0, tiled=True) for a in (x, experts, weights))
    y = compute(params, x, _own(experts - parallel.index("experts") * own, own), weights)
    if held:
        y = lax.psum_scatter(y, held, scatter_dimension=0, tiled=True)
    return lax.psum(y, rest) if rest else y


def dispatch(parallel: Parallel, rows: int, chosen: int, width: int, itemsize: int) -> str:
    """How rows reach their experts, "gather" or "exchange": the mesh's choice, or by bytes (see above).

    Args:
      rows: of one device.
      chosen: experts of each.
      width: values of a row, of ``itemsize`` bytes.
    """
    if parallel.dispatch != "auto":
        return parallel.dispatch
    parts = parallel.divided([axis for axis in parallel.places("experts") if axis in parallel.places("batch")])
    spared = (parts - 1) * rows * width * (itemsize + 4) * (1 - share(parts, chosen))
    return "exchange" if spared >= _LATENCY_BYTES else "gather"


def _without_gaps(
    compute: Compute, own: int, params: Any, x: jax.Array, numbers: jax.Array, weights: jax.Array
) -> jax.Array:
    """``compute`` with as many columns as a row can have experts here: room is made for every one, nobody's too."""
    here = jnp.argsort(numbers >= own, axis=1, stable=True)[:, :own]
    return compute(params, x, *(jnp.take_along_axis(a, here, axis=1) for a in (numbers, weights)))


def _own(numbers: jax.Array, count: int) -> jax.Array:
    """Numbers of this device's experts; ``count`` where an expert lies elsewhere."""
    return jnp.where((numbers >= 0) & (numbers < count), numbers, count)


def _along(
    parallel: Parallel, places: tuple[str, ...], held: tuple[str, ...], experts: jax.Array, own: int
) -> jax.Array:
    """Experts numbered along the axes ``held`` only; nobody's where another device of the other axes has them."""
    device, number, stride = experts // own, experts % own, own
    here = device < parallel.divided(places)
    for axis in reversed(places):
        size = parallel.divided(axis)
        if axis in held:
            number, stride = number + device % size * stride, stride * size
        else:
            here &= device % size == lax.axis_index(axis)
        device = device // size
    return jnp.where(here, number, own * parallel.divided(held))
