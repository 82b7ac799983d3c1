"""The table of a verification: one row a comparison, and the comparisons themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
      group: what was run ("noquant · free", "layers", …).
      name: the compared tensor.
      measure: how the error is measured.
      error: the measured value.
      limit: what it is held to; None: reported only.
      passed: whether the limit holds; None: nothing to hold (reported, or skipped).
      note: counts, reasons.
    """

    group: str
    name: str
    measure: str
    error: float | None
    limit: float | None
    passed: bool | None
    note: str = ""


def at_most(group: str, name: str, measure: str, error: float, limit: float, note: str = "") -> Row:
    """A row that passes if error ≤ limit (a NaN never does)."""
    return Row(group, name, measure, float(error), limit, bool(error <= limit), note)


def at_least(group: str, name: str, measure: str, value: float, limit: float, note: str = "") -> Row:
    return Row(group, name, measure, float(value), limit, bool(value >= limit), note)


def reported(group: str, name: str, measure: str, value: float, note: str = "") -> Row:
    return Row(group, name, measure, float(value), None, None, note)


def skipped(group: str, name: str, reason: str) -> Row:
    return Row(group, name, "skipped", None, None, None, reason)


def max_abs(a: np.ndarray, b: np.ndarray) -> float:
    """Largest absolute difference; NaN if either has one, infinity if the shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    return float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)), initial=0.0))


def relative_rms(a: np.ndarray, b: np.ndarray) -> float:
    """‖a − b‖ / ‖b‖."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.sqrt(np.mean(np.square(a - b))) / max(np.sqrt(np.mean(np.square(b))), 1e-30))


def row_errors(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Largest absolute difference of each row (last axis), flattened."""
    return np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)), axis=-1).ravel()


def same_sets(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether rows (last axis) hold the same set of indices ≥ 0, whatever their order and padding."""
    width = max(a.shape[-1], b.shape[-1])

    def canonical(x: np.ndarray) -> np.ndarray:
        x = np.sort(np.where(x < 0, np.iinfo(np.int64).max, x.astype(np.int64)), axis=-1)
        pad = [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]
        return np.pad(x, pad, constant_values=np.iinfo(np.int64).max)

    return np.all(canonical(a) == canonical(b), axis=-1)


def greedy_agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Share of rows with the same most likely token."""
    return float(np.mean(a.argmax(-1) == b.argmax(-1)))


def divergence(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Mean and largest KL(softmax b ‖ softmax a) over rows of logits, in nats."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    ours, theirs = log_softmax(a), log_softmax(b)
    kl = np.sum(np.exp(theirs) * (theirs - ours), axis=-1)
    return float(kl.mean()), float(kl.max())


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Mean cosine of rows."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.mean(np.sum(a * b, -1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))))


def largest(measured: Mapping[str, float]) -> tuple[str, float]:
    """The name and value of the largest; a NaN is larger than all (``max`` would pass over it)."""
    return max(measured.items(), key=lambda item: np.nan_to_num(item[1], nan=np.inf))


def failed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.passed is False]
