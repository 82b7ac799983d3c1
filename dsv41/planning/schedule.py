"""What runs while a compiled program's collectives travel, read from its schedule.

A program that is compiled for TPUs is a list in the order in which it runs. A collective is asynchronous if it begins
at one place of the list and ends at a later one: what stands between runs while the links work. libtpu also has
collectives that advance inside the kernels beside them. Both are found here; how long either side takes is not in the
text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dsv41.planning.partitioned import computations


class Scheduled(NamedTuple):
    """Collectives of one kind and module with the same work beside them.

    Attributes:
      kind: all-gather, all-reduce, …
      module: that they belong to, as ``ffn/experts``.
      beside: modules whose matrix products and Pallas kernels run between their beginning and their end, sorted; None
        for those that nothing runs beside, as they are not asynchronous.
      count: places in the program; those in a loop's body count once.
    """

    kind: str
    module: str
    beside: tuple[str, ...] | None
    count: int


_KINDS = "ragged-all-to-all|all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute"
_COLLECTIVE = re.compile(rf"^\s+(?:ROOT )?(%\S+) = .*? ({_KINDS})(-start)?\(")
_DONE = re.compile(rf" (?:{_KINDS})-done\((%[\w.\-]+)\)")
_FUSION = re.compile(r" fusion\(.*calls=(%[\w.\-]+)")
_FUSED_END = re.compile(r'custom_call_target="AsyncCollective(Start|Done)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")
_REDUCTION = re.compile(r"to_apply=(%[\w.\-]+)")
_OPERATION = re.compile(r'op_name="([^"]*)"')
_WORK = ('custom_call_target="tpu_custom_call"', "kind=kOutput", " convolution(", " dot(")


def scheduled_collectives(text: str) -> list[Scheduled]:
    """The collectives of a scheduled program, the most frequent first.

    Args:
      text: of ``Compiled.as_text()``.

    Raises:
      ValueError: the program is not scheduled.
    """
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError("the program's text is not that of a scheduled one")
    bodies, _ = computations(text)
    fused = {call[1] for lines in bodies.values() for line in lines if (call := _FUSION.search(line))}
    found = Counter(each for name, lines in bodies.items() if name not in fused for each in _of_body(bodies, lines))
    return sorted((Scheduled(*each, count) for each, count in found.items()), key=lambda s: (-s.count, s[:2]))


def _of_body(bodies: Mapping[str, list[str]], lines: list[str]) -> Iterator[tuple[str, str, tuple[str, ...] | None]]:
    """Kind, module and what runs beside, of each collective of one computation."""
    travelling: dict[str, tuple[str, str, set[str]]] = {}
    for line in lines:
        inside = bodies.get(call[1], []) if (call := _FUSION.search(line)) else []
        if end := next((e for each in inside if (e := _FUSED_END.search(each))), None):
            own = next(each for each in inside if _COLLECTIVE.match(each))
            channel = _CHANNEL.search(own)[0]
            if end[1] == "Start":
                travelling[channel] = (_COLLECTIVE.match(own)[2], _owner(bodies, own), set())
            elif channel in travelling:
                yield _ended(travelling.pop(channel))
        elif done := _DONE.search(line):
            if done[1] in travelling:
                yield _ended(travelling.pop(done[1]))
        elif found := _COLLECTIVE.match(line):
            name, kind, start = found.groups()
            if start:
                travelling[name] = (kind, _owner(bodies, line), set())
            else:
                yield kind, _owner(bodies, line), None
        elif work := next((each for each in (line, *inside) if any(mark in each for mark in _WORK)), None):
            for _, _, beside in travelling.values():
                beside.add(_module(work) or _module(line))


def _ended(travelled: tuple[str, str, set[str]]) -> tuple[str, str, tuple[str, ...]]:
    kind, module, beside = travelled
    return kind, module, tuple(sorted(beside - {""}))


def _owner(bodies: Mapping[str, list[str]], line: str) -> str:
    """The module of a collective; one that the compiler made of another keeps a name in its reduction only."""
    reduction = _REDUCTION.search(line)
    within = bodies.get(reduction[1], []) if reduction else []
    return next((module for each in (line, *within) if (module := _module(each))), "")


def _module(line: str) -> str:
    """The module of an operation inside its layer, two names of its path at most; "" for one without."""
    name = _OPERATION.search(line)
    path = name[1].split("/")[:-1] if name else []
    while path and re.match(r"jit\(|shard_map$|cond$|while$|body$|branch_\d+_fun$|Model\.", path[-1]):
        path.pop()
    layer = [place for place, part in enumerate(path) if part.startswith("runs_")]
    own = path[layer[-1] + 1 :] if layer else [part for part in path if not re.match(r"jit\(|shard_map$", part)]
    return "/".join(own[:2])
