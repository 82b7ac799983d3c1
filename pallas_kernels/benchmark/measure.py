"""One row of the benchmark: a case on its native back end, on XLA and in PyTorch."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math

import jax
import numpy as np

from pallas_kernels import backend
from pallas_kernels.benchmark.case import Case
from pallas_kernels.benchmark.limits import Limits
from pallas_kernels.benchmark.timing import seconds

# Inputs of all sets together: several times the level-2 cache of any present chip.
_ROTATED_BYTES = 256 * 2**20
_MAX_SETS = 8


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured; times in seconds, None where there is none.

    Attributes:
      back_end: what the operation ran on, with the reason if not on its native one.
      floor_s: the larger of bytes over copy bandwidth and operations over matrix rate.
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
    if floor > longest_floor_s:
        return dataclasses.replace(row, failed={"all": f"its floor is {floor:.2g} s here"})
    rng = np.random.default_rng()
    first = case.arrays(rng)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    sets = [(first,)] + [(case.arrays(rng),) for _ in range(min(_MAX_SETS - 1, int(_ROTATED_BYTES / size)))]

    failed: dict[str, str] = {}
    backend.forget()
    native = xla = torch = error = None
    try:
        run = jax.jit(case.call)
        error = float(case.error(first, run(first)))
        native = seconds(run, sets)
    except Exception as problem:  # a row that failed must not cost the others
        failed["native"] = _short(problem)
    taken = "; ".join(backend.report().get(case.operation, []))
    if native is not None and not case.native:
        xla = native if taken == "xla" else None
    if xla is None and taken != "xla":
        try:
            with backend.use("xla"):
                xla = seconds(jax.jit(case.call), sets[:2])
        except Exception as problem:
            failed["xla"] = _short(problem)
    if case.torch is not None and importlib.util.find_spec("torch"):
        try:
            torch = _torch_seconds(case, first)
        except Exception as problem:
            failed["torch"] = _short(problem)
    return dataclasses.replace(
        row, back_end=taken, seconds=native, xla_s=xla, torch_s=torch, error=error, failed=failed
    )


def _torch_seconds(case: Case, arrays: dict) -> float:
    torch = importlib.import_module("torch")
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    return seconds(case.torch(arrays), [()], lambda out: synchronize())


def _short(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).splitlines()[0][:160] if str(problem) else ''}"
