"""A run's curve: ``metrics.jsonl``, one JSON object a step, and optionally the same for TensorBoard.

::

    {"step": 3, "wall": 1.52, "loss": 5.1, …, "held_out": {"bits_per_byte": 2.4}}

``wall`` counts seconds of training, those of interrupted runs before included up to where this one went on. A number
that is not finite is null. ``held_out`` is there where the step was evaluated, ``bad`` (the path of a
parameter whose gradient is not finite, "loss" or "gradient_norm") where it was skipped.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

METRICS_FILE = "metrics.jsonl"
_TENSORBOARD = "tensorboard"


class MetricsLog:
    """Appends lines to a run's curve; a context manager."""

    def __init__(self, directory: pathlib.Path, step: int, tensorboard: bool = False) -> None:
        """
        Args:
          directory: the run's.
          step: where the run goes on: lines of later steps, which an interrupted run left, are cut off, and so is a
            last line without an end.
          tensorboard: True also writes event files (needs tensorboardX).

        Raises:
          ModuleNotFoundError: tensorboardX is not installed.
        """
        path = directory / METRICS_FILE
        self.wall = _cut(path, step) if path.exists() else 0.0
        self._file = path.open("a")
        self._events = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(directory / _TENSORBOARD), purge_step=step + 1)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def write(self, step: int, wall: float, metrics: Mapping[str, Any]) -> None:
        """Appends a line.

        Args:
          wall: seconds of training.
          metrics: numbers and strings by name; a mapping of them is a nested object.
        """
        line = {"step": step, "wall": round(wall, 3)} | {name: _plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in scalars(line).items():
                self._events.add_scalar(name.replace(".", "/"), value, step)

    def sync(self) -> None:
        """Returns when all lines are on disk: a checkpoint must not outlive the curve that led to it."""
        os.fsync(self._file.fileno())


def read_metrics(directory: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a run's curve; a last one that is still being written is left out.

    Raises:
      OSError: there is none.
    """
    text = (directory / METRICS_FILE).read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a line but for its step, by name; those of a nested object as ``object.name``."""
    found = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": number for inner, number in scalars(value).items()}
        elif isinstance(value, int | float) and name != "step":
            found[name] = value
    return found


def _cut(path: pathlib.Path, step: int) -> float:
    """Cuts a curve after ``step``; returns the seconds that led there."""
    end, wall = 0, 0.0
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            values = json.loads(line)
            if values["step"] > step:
                break
            end, wall = end + len(line), values["wall"]
    os.truncate(path, end)
    return wall


def _plain(value: Any) -> Any:
    """A metric as JSON has it: as few digits as tell a float32 from its neighbours, null where it is not finite."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, str):
        return value
    number = np.asarray(value)[()]
    if np.issubdtype(number.dtype, np.integer):
        return int(number)
    if number.dtype != np.float64:
        number = np.float32(number)
    return float(str(number)) if math.isfinite(number) else None
