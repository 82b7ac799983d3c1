"""How many kernels a compiled step launches, and how many of them in each of its loops over layers.

XLA's final program names them: every instruction outside a fusion that moves or makes data is one launch, and a loop
that the program runs layer by layer launches its body as often as it turns. Small steps are bound by these numbers.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

# Instructions that are names for data that is there already, or whose launches are counted elsewhere.
_FREE = {
    "after-all",
    "bitcast",
    "call",
    "conditional",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "tuple",
    "while",
}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*?[\])}] ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Loop(NamedTuple):
    """A loop of the program: how often it turns (0: not known), and launches in one turn, inner loops' included."""

    trips: int
    launches: int


class Launches(NamedTuple):
    """All launches of a program (loops of unknown length counted once), and its outermost loops in order."""

    total: int
    loops: tuple[Loop, ...]


def launches(program: str) -> Launches:
    """Counts in the text of a compiled program (``compiled.as_text()``).

    Of a conditional's branches the longest counts.

    Raises:
      ValueError: the text has no entry computation.
    """
    bodies, entry = _computations(program)
    if entry is None:
        raise ValueError("the program has no entry computation")

    @functools.cache
    def count(name: str) -> int:
        return sum(_launches_of(line, count) for line in bodies.get(name, ()))

    loops = tuple(
        Loop(int(_first(_TRIPS, line) or 0), count(_first(_CALLED, line) or ""))
        for line in bodies[entry]
        if _opcode(line) == "while"
    )
    return Launches(count(entry), loops)


def _computations(program: str) -> tuple[dict[str, list[str]], str | None]:
    """Lines of instructions by computation, and the entry's name."""
    bodies: dict[str, list[str]] = {}
    entry = current = None
    for line in program.splitlines():
        if header := _COMPUTATION.match(line):
            current = header[2]
            bodies[current] = []
            entry = current if header[1] else entry
        elif current is not None and _INSTRUCTION.match(line):
            bodies[current].append(line)
    return bodies, entry


def _opcode(line: str) -> str:
    found = _INSTRUCTION.match(line)
    return found[2] if found else ""


def _first(pattern: re.Pattern, line: str) -> str | None:
    found = pattern.search(line)
    return found[1] if found else None


def _launches_of(line: str, count) -> int:
    opcode = _opcode(line)
    if opcode == "while":
        return max(int(_first(_TRIPS, line) or 1), 1) * count(_first(_CALLED, line) or "")
    if opcode == "call":
        return count(_first(_CALLED, line) or "")
    if opcode == "conditional":
        names = [name.strip(" %") for name in (_first(_BRANCHES, line) or "").split(",")]
        return max(map(count, [*filter(None, names), *_CALLED.findall(line)]), default=0)
    return 0 if opcode in _FREE or opcode.endswith("-done") else 1
