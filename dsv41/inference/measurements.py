"""What finished rounds of speculation tell: how often drafts are accepted, what confidences mean, what steps cost."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one round verifies.

    Attributes:
      active: bool ``[batch]``.
      depth: int32 ``[batch]``, drafts to verify of each request; 0 for inactive ones.
      width: tokens a request of the compiled step that holds them, the pending token included.
      confidence: ``[batch, block]`` of the drafts; None if nothing was drafted.
    """

    active: np.ndarray
    depth: np.ndarray
    width: int
    confidence: np.ndarray | None

    @property
    def tokens(self) -> int:
        """Live tokens of the step, over all requests."""
        return int(np.sum(self.active) + np.sum(self.depth))


class AcceptanceStatistics:
    """Counts over all rounds, for reports.

    Attributes:
      drafted, verified, reached, accepted: int64 ``[block]`` by position in the block. A draft is reached if it was
        verified and all before it were accepted; only then does its own acceptance say something.
      steps: steps of requests, plain ones included.
    """

    def __init__(self, block: int) -> None:
        self.drafted, self.verified, self.reached, self.accepted = np.zeros((4, block), np.int64)
        self.steps = 0

    def add(self, plan: Plan, accepted: np.ndarray) -> None:
        """Counts a round; ``accepted`` int ``[batch]``."""
        position = np.arange(len(self.drafted))
        live, depth, accepted = plan.active[:, None], plan.depth[:, None], np.asarray(accepted)[:, None]
        if plan.confidence is not None:
            self.drafted += plan.active.sum()
        self.verified += (live & (position < depth)).sum(0)
        self.reached += (live & (position < depth) & (position <= accepted)).sum(0)
        self.accepted += (live & (position < accepted)).sum(0)
        self.steps += int(plan.active.sum())

    def merge(self, other: AcceptanceStatistics) -> None:
        """Adds the counts of another."""
        for name in ("drafted", "verified", "reached", "accepted"):
            getattr(self, name).__iadd__(getattr(other, name))
        self.steps += other.steps

    @property
    def acceptance(self) -> np.ndarray:
        """Share of the reached drafts that were accepted, float64 ``[block]``; NaN where none was reached."""
        return np.divide(self.accepted, self.reached, out=np.full(len(self.reached), np.nan), where=self.reached > 0)

    @property
    def mean_accepted(self) -> float:
        """Accepted drafts a step of a request; a step commits one token more. NaN before the first step."""
        return self.accepted.sum() / self.steps if self.steps else math.nan


LARGEST_TEMPERATURE = 16.0
"""Of confidences, whose temperatures stay between its inverse and it."""


class Calibration:
    """Turns confidence logits into probabilities of acceptance: σ(logit / temperature), a temperature per position.

    The logarithms of the temperatures follow the outcomes by stochastic Newton steps on the cross-entropy: gradient
    over accumulated curvature, whose slow decay lets them follow a drift. What they start at is weighted as some
    observations, and they stay within 1/16 to 16.

    Args:
      block: positions.
      temperature: what each starts at, within these bounds; None: 1.
    """

    _START_CURVATURE, _MEMORY, _LARGEST_STEP, _BOUND = 4.0, 0.999, 0.25, math.log(LARGEST_TEMPERATURE)

    def __init__(self, block: int, temperature: Sequence[float] | None = None) -> None:
        self._log_temperature = np.zeros(block) if temperature is None else np.log(np.asarray(temperature, np.float64))
        self._curvature = np.full(block, self._START_CURVATURE)

    @property
    def temperature(self) -> np.ndarray:
        """float64 ``[block]``."""
        return np.exp(self._log_temperature)

    def probabilities(self, confidence: np.ndarray) -> np.ndarray:
        """Logits ``[batch, block]`` to the probability that a draft is accepted once all before it are; float64."""
        # σ by tanh, which does not overflow.
        return 0.5 + 0.5 * np.tanh(0.5 * np.asarray(confidence, np.float64) / self.temperature)

    def update(self, plan: Plan, accepted: np.ndarray) -> None:
        """Learns from the drafts of a round that were reached; ``accepted`` int ``[batch]``."""
        position, accepted = np.arange(len(self._curvature)), np.asarray(accepted)[:, None]
        evidence = plan.active[:, None] & (position < plan.depth[:, None]) & (position <= accepted)
        # A logit of 0 teaches nothing. Elsewhere the confidence may be anything, NaN included.
        logit = np.where(evidence, plan.confidence, 0.0) / self.temperature
        p = 0.5 + 0.5 * np.tanh(0.5 * logit)
        gradient = np.sum((p - (position < accepted)) * logit, axis=0)
        curvature = np.sum(p * (1 - p) * logit**2, axis=0)
        memory = self._MEMORY ** evidence.sum(0)
        self._curvature = np.maximum(self._curvature * memory + curvature, self._START_CURVATURE)
        step = np.clip(gradient / self._curvature, -self._LARGEST_STEP, self._LARGEST_STEP)
        self._log_temperature = np.clip(self._log_temperature + step, -self._BOUND, self._BOUND)


class ThroughputCurve:
    """Measured seconds of a step against its batch tokens, for each compiled width.

    A point is the median of the last measurements whose token counts have the same nearest power of two, so that one
    hiccup does not count. Between points seconds are interpolated, made never to fall with the tokens or the width;
    outside them, and at widths wider or narrower than any measured one, they are those of the nearest point. So a
    width that was never measured looks cheap and is soon tried.
    """

    _KEPT = 15

    def __init__(self) -> None:
        self._samples: dict[tuple[int, int], collections.deque[tuple[int, float]]] = {}
        self._points: dict[int, dict[int, tuple[float, float]]] = {}
        self._draft_seconds = 0.0
        self._drafts: collections.deque[float] = collections.deque(maxlen=self._KEPT)

    def record(self, width: int, tokens: int, seconds: float) -> None:
        """A measured step of ``width`` tokens a request, ``tokens`` live ones in all (at least 1)."""
        near = round(math.log2(tokens))
        samples = self._samples.setdefault((width, near), collections.deque(maxlen=self._KEPT))
        samples.append((tokens, seconds))
        self._points.setdefault(width, {})[near] = tuple(map(statistics.median, zip(*samples, strict=True)))

    def record_draft(self, seconds: float) -> None:
        """A measured draft of a block for all requests."""
        self._drafts.append(seconds)
        self._draft_seconds = statistics.median(self._drafts)

    def measured(self, width: int) -> bool:
        """Whether a step of this width was ever measured."""
        return width in self._points

    @property
    def draft_seconds(self) -> float:
        """Of drafting; 0 before the first measurement."""
        return self._draft_seconds

    def seconds(self, widths: Sequence[int], tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Seconds of steps of these widths at token counts ``[tokens]``, float64 ``[widths, tokens]``.

        All are alike before the first measurement.
        """
        if not self._points:
            return np.ones((len(widths), len(tokens)))
        measured = sorted(self._points)
        by_width = np.maximum.accumulate([self._of_width(width, tokens) for width in measured], axis=0)
        place = np.interp(widths, measured, np.arange(len(measured)))
        below = place.astype(int)
        above, share = np.minimum(below + 1, len(measured) - 1), (place - below)[:, None]
        return (1 - share) * by_width[below] + share * by_width[above]

    def _of_width(self, width: int, tokens: np.ndarray) -> np.ndarray:
        at, seconds = zip(*(point for _, point in sorted(self._points[width].items())), strict=True)
        return np.interp(tokens, at, np.maximum.accumulate(seconds))
