"""Collectives that a compiler put into a program to move parts of whole arrays: read from the compiled program's text.

Those that a step has itself, inside ``shard_map``, are counted from its trace (:mod:`dsv41.planning.collectives`),
where loops have their lengths; most of a training step's update has none, and is divided by the compiler alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from dsv41.planning.collectives import Collective, moved

_OWN = "shard_map"
_KINDS = {
    "all-gather": "all-gather",
    "all-reduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "collective-permute": "permute",
}
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
_COMPUTATION = re.compile(r"^(ENTRY )?(%\S+) \(.*\{$")
_OPERATION = re.compile(rf"^\s+(?:ROOT )?%\S+ = (.*?) ({'|'.join(_KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=(%[\w.\-]+)")
_WHILE = re.compile(r" while\(.*condition=(%[\w.\-]+), body=(%[\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LENGTH = re.compile(r"s32\[\]\S* constant\((\d+)\)")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_TILED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")


class _Operation(NamedTuple):
    kind: str
    devices: tuple[int, ...]
    nbytes: int


def partitioned_collectives(text: str, sizes: Mapping[str, int]) -> list[Collective]:
    """The collectives of a compiled program that its trace does not have, most bytes first.

    Args:
      text: of ``Compiled.as_text()``.
      sizes: of the mesh's axes, in their order.
    """
    bodies, entry = computations(text)
    totals: dict[tuple[str, tuple[str, ...], int], tuple[int, float]] = {}
    for operation, times in _operations(bodies, entry, 1):
        parts = len(operation.devices)
        key = operation.kind, _axes(operation.devices, sizes), parts
        count, nbytes = totals.get(key, (0, 0.0))
        totals[key] = count + times, nbytes + times * moved(operation.kind, operation.nbytes, parts)
    found = [Collective(*key, count, nbytes) for key, (count, nbytes) in totals.items()]
    return sorted(found, key=lambda c: -c.bytes)


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of each computation, and the name of the first to run."""
    found: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            lines = found.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        else:
            lines.append(line)
    return found, entry


def _operations(computations: Mapping[str, list[str]], name: str, times: int) -> Iterator[tuple[_Operation, int]]:
    for line in computations.get(name, ()):
        if loop := _WHILE.search(line):
            lengths = [int(n) for n in _LENGTH.findall("\n".join(computations.get(loop[1], ())))]
            yield from _operations(computations, loop[2], times * max(lengths, default=1))
        elif found := _OPERATION.match(line):
            operation = _operation(line, *found.groups())
            if _OWN not in line and len(operation.devices) > 1:
                yield operation, times
        elif " fusion(" not in line or "async_collective" in line:
            called = _CALLED.findall(line)
            if branches := _BRANCHES.search(line):
                called += branches[1].split(", ")
            for inner in called:
                yield from _operations(computations, inner, times)


def _operation(line: str, result: str, kind: str, start: str | None) -> _Operation:
    arrays = [
        _BYTES.get(dtype, 4) * math.prod(int(n) for n in dims.split(",") if n) for dtype, dims in _ARRAY.findall(result)
    ]
    devices = _group(line)
    if start:  # operands come first, then results and what the operation notes for itself
        nbytes = arrays[0] if arrays else 0
    else:
        nbytes = sum(arrays)
        if kind == "all-gather":
            nbytes //= max(1, len(devices))
        elif kind == "reduce-scatter":
            nbytes *= max(1, len(devices))
    return _Operation(_KINDS[kind], devices, nbytes)


def _group(line: str) -> tuple[int, ...]:
    """The devices of one group, by their places in the flattened mesh; of a permutation two."""
    if pairs := _PAIRS.search(line):
        for pair in pairs[1].replace("{", "").split("},"):
            a, b = map(int, pair.split(","))
            if a != b:
                return a, b
        return ()
    if listed := _LISTED.search(line):
        return tuple(map(int, listed[1].split(",")))
    if tiled := _TILED.search(line):
        groups, each, dims, order = tiled.groups()
        return tuple(_ids(dims, order).reshape(int(groups), int(each))[0].tolist())
    if named := _NAMED.search(line):
        axes, dims, order, wanted = named.groups()
        sizes = dict(part.split("=") for part in axes.split(","))
        shape = [int(size) for size in sizes.values()]
        ids = _ids(dims, order) if dims else np.arange(math.prod(shape))
        index = tuple(slice(None) if name in wanted.split(",") else 0 for name in sizes)
        return tuple(ids.reshape(shape)[index].reshape(-1).tolist())
    raise ValueError(f"no groups of devices in {line.strip()!r}")


def _ids(dims: str, order: str | None) -> np.ndarray:
    """Numbers from 0 on, laid out with these dimensions, transposed, and flattened."""
    shape = [int(n) for n in dims.split(",")]
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose([int(n) for n in order.split(",")]) if order else ids).reshape(-1)


def _axes(devices: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which these devices differ."""
    places = np.unravel_index(np.asarray(devices), tuple(sizes.values()))
    return tuple(axis for axis, place in zip(sizes, places, strict=True) if len(set(place.tolist())) > 1)
