"""The exchange of expert parallelism: a row goes once to every device that holds one of its experts, its sums return.

Every device keeps one queue of rows for each device along the axes. In a round it sends the next ``capacity`` rows of
every queue, computes what it received, and sends the sums back; rounds go on until the longest queue of all devices
is empty. So buffers are bounded by parts · capacity rows (and rows · min(k, parts) for sums), no row is ever dropped,
and a routing that sends all rows to one device is only slower. The capacity covers an even routing in one round.

Sums of a row lie side by side until all rounds are done and are added up in an order that does not depend on rounds:
what a row receives does not depend, to the last bit, on how many other rows want the same device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Compute = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
"""Parameters of this device's experts, rows ``[rows, d]``, this device's numbers of their experts int32 ``[rows, k]``
(any other number: none of them) and weights ``[rows, k]`` to the weighted sum over those experts, float32
``[rows, d]``. Closes over no array."""

_EVEN_SHARE, _DEVIATIONS = 1.25, 5
"""Room in a round: a mean, as a queue's length at even routing, times the first, and its deviations beyond that."""

_GPU_SLICES = 512
"""Slices that a GPU's ragged collective is cut into. XLA copies each with one block of threads: on two H200s, 1024 rows
of 20 KiB to each took 7.8 ms in one slice and 0.23 ms in 64."""


@dataclasses.dataclass(frozen=True)
class Link:
    """What an exchange is compiled for.

    Attributes:
      axes: mesh axes that rows travel along, outermost first.
      parts: devices along them.
      held: experts of each.
      capacity: rows that a device sends to another in one round.
    """

    axes: tuple[str, ...]
    parts: int
    held: int
    capacity: int


def share(parts: int, chosen: int) -> float:
    """The share of a device's rows that have an expert on a given one of ``parts`` devices, at even routing."""
    return 1 - (1 - 1 / parts) ** chosen


def capacity(rows: int, parts: int, chosen: int) -> int:
    """Rows of a round for each device: enough for an even routing of ``rows`` rows with ``chosen`` experts each."""
    return max(1, min(rows, likely_most(rows * share(parts, chosen))))


def likely_most(mean: float) -> int:
    """What a count with this mean, spread by chance, hardly ever exceeds."""
    return math.ceil(_EVEN_SHARE * mean + _DEVIATIONS * math.sqrt(mean))


class Queues(NamedTuple):
    """A device's rows in the queues of the devices that they go to, in the order of their numbers.

    Attributes:
      target: int32 ``[rows, m]``, the devices of each row, distinct; ``parts`` where there are fewer.
      rank: int32 ``[rows, m]``, places in their queues.
      order: int32 ``[rows · m]``, pairs row · m + place among the row's targets, by queue and then by rank.
      first: int32 ``[parts]``, where each queue begins in ``order``.
      count: int32 ``[parts]``, lengths of the queues.
    """

    target: jax.Array
    rank: jax.Array
    order: jax.Array
    first: jax.Array
    count: jax.Array


def line_up(experts: jax.Array, parts: int, held: int) -> Queues:
    """Queues of rows with these experts, int32 ``[rows, k]`` in 0 … parts · held; the last number goes nowhere."""
    home = experts // held
    if parts <= experts.shape[1]:
        devices = jnp.arange(parts, dtype=jnp.int32)
        wanted = jnp.any(home[:, :, None] == devices, axis=1)
        target = jnp.where(wanted, devices, parts)
    else:
        earlier = jnp.tril(home[:, :, None] == home[:, None, :], k=-1)
        target = jnp.where(jnp.any(earlier, axis=-1), parts, home)
    flat = target.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    count = jnp.sum(flat[:, None] == jnp.arange(parts), axis=0, dtype=jnp.int32)
    first = jnp.cumsum(count) - count
    rank = jnp.argsort(order) - jnp.append(first, 0)[flat]
    return Queues(target, rank.reshape(target.shape).astype(jnp.int32), order.astype(jnp.int32), first, count)


def rows_of_round(queues: Queues, number: jax.Array, capacity: int) -> jax.Array:
    """Rows that round ``number`` sends, int32 ``[parts, capacity]``; the number of rows where a queue has ended."""
    rows, m = queues.target.shape
    rank = number * capacity + jnp.arange(capacity)
    pair = queues.order[jnp.minimum(queues.first[:, None] + rank, rows * m - 1)]
    return jnp.where(rank < queues.count[:, None], pair // m, rows)


def slots_of_round(queues: Queues, number: jax.Array, capacity: int) -> jax.Array:
    """Where each row's sums lie in what round ``number`` returns ``[parts · capacity, ...]``: int32 ``[rows, m]``.

    One beyond the end where another round has them, or none.
    """
    parts = queues.count.shape[0]
    place = queues.rank - number * capacity
    inside = (queues.target < parts) & (place >= 0) & (place < capacity)
    return jnp.where(inside, queues.target * capacity + place, parts * capacity)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def exchange(
    link: Link, compute: Compute, params: Any, x: jax.Array, experts: jax.Array, weights: jax.Array
) -> jax.Array:
    """The weighted sum over each row's experts along the link's axes.

    The backward pass runs the exchange backwards, round by round: rows travel again with the gradients of their sums,
    since keeping what was received would keep every round's buffers, and how many rounds there are is only known when
    they run.

    Args:
      params: of this device's experts, as ``compute`` takes them.
      x: this device's rows ``[rows, d]``.
      experts: int32 ``[rows, k]``, expert e of device p of the axes as p · held + e; parts · held is nobody's.
      weights: float32 ``[rows, k]``.

    Returns:
      float32 ``[rows, d]``.
    """
    route = _route(link, experts)

    def one(number: jax.Array, sums: jax.Array) -> jax.Array:
        rows, ids, scales = _received(link, route, number, x, experts, weights)
        return sums + _returned(link, route, number, compute(params, rows, ids, scales))

    sums = jnp.zeros((*route.queues.target.shape, x.shape[1]), jnp.float32)
    return jnp.sum(_rounds(link, route, one, sums), axis=1)


def _forward(link: Link, compute: Compute, params: Any, x: jax.Array, experts: jax.Array, weights: jax.Array):
    return exchange(link, compute, params, x, experts, weights), (params, x, experts, weights)


def _backward(link: Link, compute: Compute, saved: tuple, dy: jax.Array):
    params, x, experts, weights = saved
    route = _route(link, experts)
    leaves, tree = jax.tree.flatten(params)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def one(number: jax.Array, sums: tuple) -> tuple:
        rows, ids, scales = _received(link, route, number, x, experts, weights)
        # What nobody sent has no expert, but a gradient multiplies it with what did not arrive for it.
        dsum = jnp.where(_arrived(link, route, number)[:, None], _delivered(link, route, number, dy), 0)

        def computed(values: list, rows: jax.Array, scales: jax.Array) -> jax.Array:
            whole = list(leaves)
            for i, value in zip(floats, values, strict=True):
                whole[i] = value
            return compute(jax.tree.unflatten(tree, whole), rows, ids, scales)

        dvalues, drows, dscales = jax.vjp(computed, [leaves[i] for i in floats], rows, scales)[1](dsum)
        dx, dweights = (jnp.sum(_returned(link, route, number, d), axis=1) for d in (drows, dscales))
        return jax.tree.map(lambda total, new: total + new.astype(total.dtype), sums, (dvalues, dx, dweights))

    def zeros(leaf: jax.Array) -> jax.Array:
        return jnp.zeros(leaf.shape, jnp.float32)

    sums = ([zeros(leaves[i]) for i in floats], zeros(x), zeros(weights))
    dvalues, dx, dweights = _rounds(link, route, one, sums)
    dleaves = [np.zeros(leaf.shape, jax.dtypes.float0) for leaf in leaves]
    for i, value in zip(floats, dvalues, strict=True):
        dleaves[i] = value.astype(leaves[i].dtype)
    return jax.tree.unflatten(tree, dleaves), dx.astype(x.dtype), None, dweights.astype(weights.dtype)


exchange.defvjp(_forward, _backward)


class _Route(NamedTuple):
    """What an exchange knows before its first round.

    Attributes:
      queues: this device's.
      due: int32 ``[parts]``, rows that will come from each device.
      rounds: int32, equal on all devices of the axes.
    """

    queues: Queues
    due: jax.Array
    rounds: jax.Array


def _route(link: Link, experts: jax.Array) -> _Route:
    queues = line_up(experts, link.parts, link.held)
    counts = lax.all_gather(queues.count, link.axes)  # [from, to]
    due = lax.dynamic_index_in_dim(counts, lax.axis_index(link.axes), axis=1, keepdims=False)
    return _Route(queues, due, -(-jnp.max(counts) // link.capacity))


def _rounds(link: Link, route: _Route, one: Callable[[jax.Array, Any], Any], sums: Any) -> Any:
    # The first round, nearly always the only one, lies outside of the loop: a scheduler moves other work, such as the
    # shared expert's, between the start and the end of a collective, but never into a loop.
    sums = one(jnp.int32(0), sums)
    longest = route.queues.target.shape[0]
    return sums if longest <= link.capacity else lax.fori_loop(1, route.rounds, one, sums)


def _received(
    link: Link, route: _Route, number: jax.Array, x: jax.Array, experts: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows that this device gets in a round ``[parts · capacity, d]``, with their experts on it, and weights."""
    source = rows_of_round(route.queues, number, link.capacity)
    chosen = experts.at[source].get(mode="fill", fill_value=link.parts * link.held)
    mine = chosen // link.held == jnp.arange(link.parts)[:, None, None]
    chosen = jnp.where(mine, chosen % link.held, link.held)
    scales = lax.bitcast_convert_type(weights.at[source].get(mode="fill", fill_value=0), jnp.int32)
    sent = _sizes(link, route.queues.count, number)
    due = _sizes(link, route.due, number)
    choices = jnp.concatenate([chosen, scales], axis=-1)  # one small collective instead of two
    choices = _travel(link, choices.reshape(link.parts * link.capacity, -1), sent, due)
    chosen, scales = jnp.split(choices, 2, axis=-1)
    arrived = _arrived(link, route, number)[:, None]
    chosen = jnp.where(arrived, chosen, link.held)
    scales = jnp.where(arrived, lax.bitcast_convert_type(scales, weights.dtype), 0)
    return _delivered(link, route, number, x), chosen, scales


def _delivered(link: Link, route: _Route, number: jax.Array, x: jax.Array) -> jax.Array:
    """Rows that other devices' ``x`` [rows, d] has for this one in a round ``[parts · capacity, d]``, else anything."""
    source = rows_of_round(route.queues, number, link.capacity).reshape(-1)
    packed = x.at[source].get(mode="fill", fill_value=0)
    return _travel(link, packed, _sizes(link, route.queues.count, number), _sizes(link, route.due, number))


def _returned(link: Link, route: _Route, number: jax.Array, y: jax.Array) -> jax.Array:
    """What became of this device's rows in a round, ``y`` [parts · capacity, d] of the devices that computed it.

    Returns:
      float32 ``[rows, m, d]``, zeros where a row did not travel to that device in this round.
    """
    back = _travel(link, y, _sizes(link, route.due, number), _sizes(link, route.queues.count, number))
    slots = slots_of_round(route.queues, number, link.capacity)
    return back.at[slots].get(mode="fill", fill_value=0).astype(jnp.float32)


def _arrived(link: Link, route: _Route, number: jax.Array) -> jax.Array:
    """Which rows of a round's buffers came from another device: bool ``[parts · capacity]``."""
    return (jnp.arange(link.capacity) < _sizes(link, route.due, number)[:, None]).reshape(-1)


def _sizes(link: Link, length: jax.Array, number: jax.Array) -> jax.Array:
    """Rows of queues of this length that one round moves."""
    return jnp.clip(length - number * link.capacity, 0, link.capacity)


def slices_of(rows: jax.Array, capacity: int, wanted: int) -> tuple[jax.Array, jax.Array]:
    """Cuts buffers of ``capacity`` rows, of which ``rows`` int32 ``[parts]`` are in use, into about ``wanted`` slices.

    Returns:
      where slices begin, int32 ``[slices]``, and how many rows each has, int32 ``[parts, slices]``.
    """
    size = -(-capacity // min(wanted, capacity))
    begin = jnp.arange(0, capacity, size, dtype=jnp.int32)
    return begin, jnp.clip(rows[:, None] - begin, 0, jnp.minimum(size, capacity - begin))


def _travel(link: Link, packed: jax.Array, sent: jax.Array, due: jax.Array) -> jax.Array:
    """Sends rows ``[parts · capacity, width]``, of each device's ``capacity`` the first ``sent``.

    Where the platform can, only rows that exist travel; otherwise whole buffers do. Beyond ``due`` stands anything: in
    a prefill chunk of the official model (PODS.md), to clear the buffers would be 0.66 GB a layer, 0.4 ms of a v6e.
    """

    def ragged(slices: int, packed: jax.Array, sent: jax.Array, due: jax.Array) -> jax.Array:
        begin, sent = slices_of(sent, link.capacity, slices)
        _, due = slices_of(due, link.capacity, slices)
        here = jnp.arange(link.parts, dtype=jnp.int32)[:, None] * link.capacity + begin
        there = jnp.broadcast_to(lax.axis_index(link.axes) * link.capacity + begin, here.shape)
        offsets = (here.reshape(-1), sent.reshape(-1), there.reshape(-1), due.reshape(-1))
        empty = lax.empty(packed.shape, packed.dtype)
        return lax.ragged_all_to_all(packed, empty, *offsets, axis_name=link.axes)

    def dense(packed: jax.Array, sent: jax.Array, due: jax.Array) -> jax.Array:
        return lax.all_to_all(packed, link.axes, split_axis=0, concat_axis=0, tiled=True)

    # Chosen where the program is lowered to, which need not be this host.
    gpu = functools.partial(ragged, max(1, _GPU_SLICES // link.parts))
    return lax.platform_dependent(packed, sent, due, tpu=functools.partial(ragged, 1), cuda=gpu, default=dense)
