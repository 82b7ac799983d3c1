"""One row of the benchmark: a case on its native back end, on XLA and in PyTorch."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
from collections.abc import Callable

import jax
import numpy as np

from pallas_kernels import backend
from pallas_kernels.benchmark import pytorch
from pallas_kernels.benchmark.case import Case
from pallas_kernels.benchmark.limits import Limits
from pallas_kernels.benchmark.timing import seconds, seconds_in_program

# Inputs of all sets together: several times the level-2 cache of any present chip. Arguments too small to fill it with
# so many sets are read from it; more would make the program that calls on each in turn too long to compile.
_ROTATED_BYTES = 256 * 2**20
_MAX_SETS = 8
# A launch; and calls in the body of a timed loop on XLA, where each is many launches and long to compile.
_SHORTEST_S, _XLA_TURNS = 5e-6, 4


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured; times in seconds, None where there is none.

    Attributes:
      back_end: what the operation ran on, with the reason if not on its native one.
      floor_s: the larger of bytes over copy bandwidth and operations over matrix rate.
      torch_error: of PyTorch's result, as ``error``.
      failed: why a time is missing, by what was to be timed.
    """

    operation: str
    name: str
    back_end: str
    seconds: float | None
    operations: float
    bytes: float
    floor_s: float
    xla_s: float | None
    torch_s: float | None
    error: float | None
    failed: dict[str, str]
    note: str
    torch_error: float | None = None
    torch_note: str = ""

    @property
    def of_floor(self) -> float | None:
        """Floor over time: 1 is the machine's limit."""
        return None if self.seconds is None else self.floor_s / self.seconds


def measure(case: Case, limits: Limits, longest_floor_s: float = math.inf) -> Row:
    """Times a case on fresh random data; what fails (or would take too long) is said in the row, not raised.

    Args:
      longest_floor_s: a case whose floor is beyond it is not run.
    """
    floor = limits.floor(case.operations, case.bytes)
    row = Row(case.operation, case.name, "", None, case.operations, case.bytes, floor, None, None, None, {}, case.note)
    row = dataclasses.replace(row, torch_note=case.torch_note)
    if floor > longest_floor_s:
        return dataclasses.replace(row, failed={"all": f"its floor is {floor:.2g} s here"})
    rng = np.random.default_rng()
    first = case.arrays(rng)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    more = min(_MAX_SETS - 1, max(int(_ROTATED_BYTES / size), case.feed is not None))
    sets = [first] + [case.arrays(rng) for _ in range(more)]

    failed: dict[str, str] = {}
    backend.forget()
    native = xla = torch = error = torch_error = None
    try:
        errors: list[float] = []
        # Half the floor's rate is a fair guess; a wrong one only makes programs longer or shorter.
        guess = max(2 * floor, _SHORTEST_S)
        native = _seconds(case, sets, guess, lambda out: errors.append(float(case.error(first, out))))
        error = errors[0]
    except Exception as problem:  # a row that failed must not cost the others
        failed["native"] = _short(problem)
    taken = "; ".join(backend.report().get(case.operation, []))
    if native is not None and not case.native:
        xla = native if taken == "xla" else None
    if xla is None and taken != "xla":
        try:
            with backend.use("xla"):
                xla = _seconds(case, sets[:2], native or guess, turns=_XLA_TURNS)
        except Exception as problem:
            failed["xla"] = _short(problem)
    if case.torch is not None and importlib.util.find_spec("torch"):
        try:
            run = case.torch(first)
            torch = _torch_seconds(run)
            # A way that computes something else would be no baseline.
            torch_error = float(case.error(first, pytorch.arrays(run())))
        except Exception as problem:
            failed["torch"] = _short(problem)
    return dataclasses.replace(
        row,
        back_end=taken,
        seconds=native,
        xla_s=xla,
        torch_s=torch,
        error=error,
        torch_error=torch_error,
        failed=failed,
    )


def _seconds(case: Case, sets: list[dict], guess_s: float, check: Callable = lambda out: None, **options: int) -> float:
    # A CPU is its own host: there dispatch is part of the work, and the chain in a program would not hold.
    if jax.default_backend() == "cpu":
        run = jax.jit(case.call)
        check(run(sets[0]))
        return seconds(run, [(arrays,) for arrays in sets])
    return seconds_in_program(case.call, sets, case.feed, guess_s=guess_s, check=check, **options)


def _torch_seconds(run: Callable) -> float:
    torch = importlib.import_module("torch")
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    return seconds(run, [()], lambda out: synchronize())


def _short(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).splitlines()[0][:160] if str(problem) else ''}"
