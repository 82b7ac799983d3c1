"""Curves of one run, or of several on the same axes."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dsv41.training.metrics import scalars


@dataclasses.dataclass(frozen=True)
class _Panel:
    """A picture's part: the metrics whose name, without ``held_out.``, begins with one of these."""

    title: str
    names: tuple[str, ...]


_PANELS = (
    _Panel("loss", ("loss", "cross_entropy")),
    _Panel("bits per byte", ("bits_per_byte",)),
    _Panel("learning rate", ("learning_rate",)),
    _Panel("expert load / mean load", ("max_load",)),
    _Panel("gradient norm", ("gradient_norm",)),
    _Panel("accepted drafts of a block", ("draft_accepted",)),
    _Panel("acceptance up to a position", ("draft_survival",)),
)
_HELD_OUT = "held_out."


def plot_runs(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: pathlib.Path) -> None:
    """Draws loss, bits per byte, learning rate, expert load, gradient norm and acceptance against steps.

    What no run has measured is left out. Held-out values are drawn with points, training values without.

    Args:
      runs: lines of :func:`~dsv41.training.metrics.read_metrics` by the run's name.
      path: ``.png`` or ``.svg``; it is there whole or not at all.

    Raises:
      ValueError: there is nothing to draw.
      ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    curves = {run: _curves(lines) for run, lines in runs.items()}
    panels = [p for p in _PANELS if any(_belongs(name, p) for found in curves.values() for name in found)]
    if not panels:
        raise ValueError(f"{', '.join(runs)}: no step with a loss yet")
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.6 * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(grid, panels, strict=False):
        _draw(axes, panel, curves)
    for axes in grid[len(panels) :]:
        axes.remove()
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format=path.suffix.removeprefix("."))
    partial.replace(path)


_Curves = dict[str, tuple[list[int], list[float]]]


def _curves(lines: Sequence[Mapping[str, Any]]) -> _Curves:
    found: _Curves = {}
    for line in lines:
        for name, value in scalars(line).items():
            steps, values = found.setdefault(name, ([], []))
            steps.append(line["step"])
            values.append(value)
    return found


def _belongs(name: str, panel: _Panel) -> bool:
    return name.removeprefix(_HELD_OUT).startswith(panel.names)


def _draw(axes: Any, panel: _Panel, curves: Mapping[str, _Curves]) -> None:
    for run, found in curves.items():
        for name, (steps, values) in found.items():
            if _belongs(name, panel):
                label = f"{run}: {name}" if len(curves) > 1 else name
                axes.plot(steps, values, marker="." if name.startswith(_HELD_OUT) else None, linewidth=1, label=label)
    axes.set(title=panel.title, xlabel="step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="x-small")
