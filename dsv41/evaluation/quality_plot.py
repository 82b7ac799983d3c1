"""The rows of :mod:`dsv41.evaluation.quality` and :mod:`dsv41.evaluation.retrieval` as one figure."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsv41.evaluation.quality import Row

Panel = Callable[[Any, Sequence[Row]], None]


def plot_quality(results: Mapping[str, Sequence[Row]], path: pathlib.Path) -> None:
    """Draws a panel for each question that has one, with standard errors.

    Args:
      results: rows by question, see :data:`PANELS`.
      path: ``.png`` or ``.svg``; it is there whole or not at all.

    Raises:
      ValueError: there is nothing to draw.
      ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    results = {question: rows for question, rows in results.items() if question in PANELS}
    if not results:
        raise ValueError("results: no question to draw")
    columns = min(len(results), 3)
    figure = Figure(figsize=(5 * columns, 3.8 * -(-len(results) // columns)), layout="constrained")
    grid = list(figure.subplots(-(-len(results) // columns), columns, squeeze=False).flat)
    for axes, (question, rows) in zip(grid, results.items(), strict=False):
        PANELS[question](axes, rows)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="x-small")
    for axes in grid[len(results) :]:
        axes.remove()
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format=path.suffix.removeprefix("."))
    partial.replace(path)


def _line(axes: Any, rows: Sequence[Row], x: str, y: str, error: str, label: str | None = None) -> None:
    """One curve; a baseline has no difference and stands at 0."""
    rows = sorted(rows, key=lambda row: row[x])
    errors = [row[error] or 0 for row in rows]
    axes.errorbar([row[x] for row in rows], [row[y] or 0 for row in rows], errors, marker=".", capsize=2, label=label)


def _groups(rows: Sequence[Row], *names: str) -> dict[tuple, list[Row]]:
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def _baseline(axes: Any, rows: Sequence[Row]) -> None:
    axes.bar([row["model"] for row in rows], [row["bits_per_byte"] for row in rows])
    axes.set(title="against counting", ylabel="bits a byte")


def _rounding(axes: Any, rows: Sequence[Row]) -> None:
    labels = [f"{row['weights']}\n{row['rounded']}" for row in rows]
    # The texts' own spread is the same for all; a bar is the error of the difference.
    errors = [row["difference_error"] or 0 for row in rows]
    axes.errorbar(range(len(rows)), [row["bits_per_byte"] for row in rows], errors, fmt="o", capsize=3)
    axes.set_xticks(range(len(rows)), labels, fontsize="x-small")
    axes.set(title="rounding", ylabel="bits a byte")


def _replay(axes: Any, rows: Sequence[Row]) -> None:
    replayed = [row for row in rows if row["difference"] is not None]
    _line(axes, replayed, "prompt", "difference", "difference_error")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(title="replay of a window − exact prefill", xlabel="prompt, tokens", ylabel="bits a token")


def _replay_length(axes: Any, rows: Sequence[Row]) -> None:
    for (prompt,), group in _groups([r for r in rows if r["difference"] is not None], "prompt").items():
        _line(axes, group, "replayed", "difference", "difference_error", f"prompt of {prompt}")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(title="replay − exact prefill", xlabel="replayed positions", ylabel="bits a token")


def _prefix(axes: Any, rows: Sequence[Row]) -> None:
    _line(axes, rows, "hit", "difference", "difference_error", f"prompt of {rows[0]['prompt']}")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(title="prefix hit with lost rings − no hit", xlabel="tokens of the hit", ylabel="bits a token")


def _sizes(title: str) -> Panel:
    def draw(axes: Any, rows: Sequence[Row]) -> None:
        for (begin, end), group in _groups(rows, "from", "to").items():
            _line(axes, group, "entries", "difference", "difference_error", f"positions {begin} … {end - 1}")
        axes.axhline(0, color="black", linewidth=0.5)
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel="entries", ylabel="bits a byte above the baseline")

    return draw


def _reuse(axes: Any, rows: Sequence[Row]) -> None:
    _line(axes, rows, "layer", "best", "best_error", "best selection")
    _line(axes, rows, "layer", "selected", "own_error", "selection of the layer's source")
    sources = [row for row in rows if row["layer"] == row["selected_by"]]
    axes.plot([row["layer"] for row in sources], [row["selected"] for row in sources], "o", label="selects itself")
    axes.set(title="attention to global entries", xlabel="layer", ylabel="share on the selection", ylim=(None, 1.02))


def _needle(axes: Any, rows: Sequence[Row]) -> None:
    for (phrase,), group in _groups(rows, "phrase").items():
        _line(axes, group, "distance", "bits_per_token", "standard_error", f"phrase {phrase}")
    axes.set_xscale("log", base=2)
    axes.set(title="end of a phrase read before", xlabel="distance, tokens", ylabel="bits a token", ylim=(0, None))


PANELS: Mapping[str, Panel] = {
    "baseline": _baseline,
    "rounding": _rounding,
    "replay": _replay,
    "replay-length": _replay_length,
    "prefix": _prefix,
    "pool": _sizes("candidate pool − full reindexing"),
    "top-k": _sizes("top-k − the configuration's"),
    "reuse": _reuse,
    "needle": _needle,
}
"""How the rows of a question are drawn; a question that is answered by one number is not."""
