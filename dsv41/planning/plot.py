"""Memory and step time against context, as a picture."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from dsv41.planning.plan import TEMPORARIES, Plan

_STATE = ("global memory", "page table", "encoder rings", "decoder rings", "compressor tails", "drafter rings")
_GIB = 2**30


def plot_plans(plans: Sequence[Plan], path: pathlib.Path) -> None:
    """Draws plans that differ in their context only.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    contexts, first = [plan.context for plan in plans], plans[0]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    memory, time = figure.subplots(1, 2)
    state = [sum(plan.memory.get(part, 0) for part in _STATE) / _GIB for plan in plans]
    estimate = [plan.memory[TEMPORARIES] / _GIB for plan in plans]
    rest = [plan.memory_bytes / _GIB - a - b for plan, a, b in zip(plans, state, estimate, strict=True)]
    memory.stackplot(contexts, rest, state, estimate, labels=("parameters", "state of requests", TEMPORARIES))
    memory.axhline(first.chip.device_bytes / _GIB, color="black", linestyle="--", label=f"a device ({first.chip.name})")
    memory.set(ylabel="GiB a device", title=f"memory, {first.batch} requests on {first.mesh.name}")
    time.plot(contexts, [plan.serial_s * 1e3 for plan in plans], label="one after the other")
    # One of the three that follow lies on it.
    time.plot(contexts, [plan.overlapped_s * 1e3 for plan in plans], label="overlapped", linewidth=5, alpha=0.4)
    for name in first.seconds:
        time.plot(contexts, [plan.seconds[name] * 1e3 for plan in plans], ":", label=name)
    time.set(ylabel="ms", ylim=(0, None), title=f"least time of a {first.kind} step")
    for axes in (memory, time):
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [_tokens(context) for context in contexts])
        axes.set_xlabel("context, tokens")
        axes.legend(fontsize="small")
    figure.savefig(path)


def _tokens(count: int) -> str:
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if count >= unit:
            return f"{count / unit:g}{name}"
    return str(count)
