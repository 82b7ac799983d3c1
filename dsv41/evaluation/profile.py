"""Device time by kernel, from a trace that ``jax.profiler`` wrote."""

from __future__ import annotations

import collections
import pathlib
import re
from typing import NamedTuple

from jax.profiler import ProfileData

# Lines of a device's plane that hold what ran on it: CUDA streams, or a TPU's operations.
_LINES = re.compile(r"^(Stream|XLA Ops)")
# XLA numbers the instances of one kind of kernel.
_NUMBER = re.compile(r"[._]\d+$")


class KernelTime(NamedTuple):
    """One kind of kernel: how often it ran and for how many microseconds in all."""

    name: str
    count: int
    microseconds: float


def kernel_times(directory: pathlib.Path) -> list[KernelTime]:
    """The kernels of all devices in the trace under ``directory``, costliest first; none on a CPU.

    Raises:
      FileNotFoundError: there is no trace.
    """
    files = sorted(directory.rglob("*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"{directory}: no trace (*.xplane.pb)")
    counts: collections.Counter[str] = collections.Counter()
    nanoseconds: collections.Counter[str] = collections.Counter()
    for plane in ProfileData.from_file(str(files[-1])).planes:
        if not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            if not _LINES.match(line.name):
                continue
            for event in line.events:
                name = _NUMBER.sub("", event.name)
                counts[name] += 1
                nanoseconds[name] += event.duration_ns
    return [KernelTime(name, counts[name], total / 1e3) for name, total in nanoseconds.most_common()]
