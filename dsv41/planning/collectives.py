"""What a traced step sends between devices: collectives by kind and mesh axis, loops counted as often as they turn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from dsv41.planning.spread import all_gather, all_reduce, exchange


class Collective(NamedTuple):
    """All collectives of one kind over the same mesh axes.

    Attributes:
      kind: all-gather, all-reduce, reduce-scatter, all-to-all, ragged-all-to-all or permute.
      axes: mesh axes, outermost first.
      parts: devices that take part in one.
      count: how often a step runs one; a loop whose length only the data know counts as one turn.
      bytes: that a device sends and receives in all of them, together; of ragged ones the most.
    """

    kind: str
    axes: tuple[str, ...]
    parts: int
    count: int
    bytes: float


_KINDS = {
    "all_gather": "all-gather",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "permute",
}


def collectives(jaxpr: Any, sizes: Mapping[str, int]) -> list[Collective]:
    """The collectives of a traced step, most bytes first.

    Args:
      jaxpr: of ``step.trace(…)``.
      sizes: of the mesh's axes.
    """
    totals: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}
    for equation, times in equations(jaxpr, 1):
        kind = _KINDS.get(equation.primitive.name)
        if kind is None:
            continue
        axes = _axes(equation.params)
        parts = math.prod(sizes[axis] for axis in axes)
        if parts == 1:
            continue
        # A ragged one has its output's buffer and its sizes as operands too.
        operands = equation.invars[:1] if kind.startswith("ragged") else equation.invars
        operand = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in operands if hasattr(v, "aval"))
        count, nbytes = totals.get((kind, axes), (0, 0.0))
        totals[kind, axes] = count + times, nbytes + times * moved(kind, operand, parts)
    found = [
        Collective(kind, axes, math.prod(sizes[axis] for axis in axes), count, nbytes)
        for (kind, axes), (count, nbytes) in totals.items()
    ]
    return sorted(found, key=lambda c: -c.bytes)


def joined_counts(found: Iterable[Collective]) -> list[Collective]:
    """Those of one kind over the same axes together, most bytes first."""
    totals: dict[tuple[str, tuple[str, ...], int], Collective] = {}
    for c in found:
        before = totals.get((c.kind, c.axes, c.parts), c._replace(count=0, bytes=0.0))
        totals[c.kind, c.axes, c.parts] = c._replace(count=before.count + c.count, bytes=before.bytes + c.bytes)
    return sorted(totals.values(), key=lambda c: -c.bytes)


def moved(kind: str, operand: float, parts: int) -> float:
    """Bytes that a device sends and receives for an operand of so many."""
    if kind == "all-gather":
        return all_gather(operand, parts)
    if kind == "all-reduce":
        return all_reduce(operand, parts)
    if kind == "permute":
        return 2 * operand
    return exchange(operand, parts)


def _branch(branches: tuple[Any, ...]) -> Any:
    """The branch that a TPU takes where platforms differ: it has the ragged collectives. Else the last."""
    ragged = (b for b in branches if any(e.primitive.name == "ragged_all_to_all" for e, _ in equations(b, 1)))
    return next(ragged, branches[-1])


def _axes(params: Mapping[str, Any]) -> tuple[str, ...]:
    names = params.get("axis_name", params.get("axes", ()))
    return tuple(names) if isinstance(names, (tuple, list)) else (names,)


def equations(jaxpr: Any, times: int) -> Iterator[tuple[Any, int]]:
    """Every equation of a program and of those inside it, with how often it runs; of branches one counts."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation, times
        if equation.primitive.name == "scan":
            yield from equations(equation.params["jaxpr"], times * equation.params["length"])
        elif equation.primitive.name == "cond":
            yield from equations(_branch(equation.params["branches"]), times)
        elif equation.primitive.name != "pallas_call":
            for inner in equation.params.values():
                if hasattr(inner, "eqns") or hasattr(getattr(inner, "jaxpr", None), "eqns"):
                    yield from equations(inner, times)
