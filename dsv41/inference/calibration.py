"""Calibrated confidences of a drafter: temperatures fitted on held-out texts, in a file beside the checkpoint.

The public layout has one confidence projection for all positions of a block, so a temperature for each position cannot
be folded into it; the checkpoint stays what it is, and who does not know the file loses nothing but a better start:
a scheduler goes on learning from what is accepted.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import tempfile
from collections.abc import Sequence

import numpy as np

from dsv41.checkpoint import CheckpointError
from dsv41.inference.measurements import LARGEST_TEMPERATURE

CALIBRATION_FILE = "dspark_calibration.json"
_FIELD = "temperature"


def fit_temperatures(confidence: np.ndarray, accepted: np.ndarray, live: np.ndarray) -> np.ndarray:
    """The temperatures at which σ(logit / temperature) tells acceptance best: least binary cross-entropy by position.

    They are sought between 1/16 and 16, as a scheduler's stay there; beyond, a confidence says nothing, or all.

    Args:
      confidence: logits ``[blocks, block]``.
      accepted: chance that each draft is accepted once all before it are, or whether it was (0 or 1), the same shape.
      live: bool, the same shape; what else stands in the others is not read.

    Returns:
      float64 ``[block]``; 1 for a position without any live draft.

    Raises:
      ValueError: a live logit is not finite, or a live chance is outside [0, 1]; names the position.
    """
    logits = np.where(live, confidence, 0.0).astype(np.float64)
    targets = np.where(live, accepted, 0.0).astype(np.float64)
    if bad := np.flatnonzero(~np.isfinite(logits).all(0)).tolist():
        raise ValueError(f"confidence: a logit of position {bad[0]} is not finite")
    # Rounded sums of 129,280 probabilities may leave [0, 1] by their last bits.
    if bad := np.flatnonzero(~((targets > -1e-4) & (targets < 1 + 1e-4)).all(0)).tolist():
        raise ValueError(f"accepted: a chance of position {bad[0]} is outside [0, 1]")
    # With s = 1 / temperature the loss is convex in s, so its slope changes sign once: bisection on log s.
    high = np.full(logits.shape[1], math.log(LARGEST_TEMPERATURE))
    low = -high
    for _ in range(50):
        middle = (low + high) / 2
        p = 0.5 + 0.5 * np.tanh(0.5 * logits * np.exp(middle))
        falls = np.sum((p - targets) * logits, axis=0) < 0
        low, high = np.where(falls, middle, low), np.where(falls, high, middle)
    return np.where((logits != 0).any(0), np.exp(-(low + high) / 2), 1.0)


def write_calibration(directory: pathlib.Path, temperature: Sequence[float] | np.ndarray) -> pathlib.Path:
    """Writes temperatures ``[block]`` beside the checkpoint in ``directory``, whole or not at all; returns the file."""
    path = directory / CALIBRATION_FILE
    values = {_FIELD: [float(t) for t in temperature]}
    descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=f".{CALIBRATION_FILE}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(values, file)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def read_calibration(directory: pathlib.Path, block: int) -> tuple[float, ...] | None:
    """The temperatures beside the checkpoint in ``directory``, one a position of the block; None without the file.

    Raises:
      CheckpointError: the file holds anything else than ``block`` temperatures that a scheduler takes.
    """
    path = directory / CALIBRATION_FILE
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    values = data.get(_FIELD) if isinstance(data, dict) else None
    if not isinstance(values, list) or len(values) != block:
        raise CheckpointError(f"{path}: {_FIELD}: {values!r} is no list of {block} numbers (dspark_block_size)")
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 1 / LARGEST_TEMPERATURE <= value <= LARGEST_TEMPERATURE:
            limits = f"1/{LARGEST_TEMPERATURE:g} … {LARGEST_TEMPERATURE:g}"
            raise CheckpointError(f"{path}: {_FIELD}: {value!r} is outside {limits}")
    return tuple(float(value) for value in values)
