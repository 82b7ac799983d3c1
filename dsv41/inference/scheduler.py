"""How many drafts to verify: the choice that commits most tokens per second of the whole batch.

A round drafts a block for every request, chooses a depth for each, verifies, and tells the scheduler what came of it::

    if scheduler.drafts(active, caps):
        plan = scheduler.choose(confidence, active, caps)
    else:
        plan = scheduler.plain(active)
    ...  # a step of plan.width tokens a request verifies plan.depth drafts
    scheduler.observe(plan, accepted, step_seconds, draft_seconds)

The sampled distribution is the backbone's only if whether a draft is verified does not depend on the value of that
draft or of later ones. The confidence of a draft depends on the tokens before it, so a decision about draft i of a
request may use that request's confidences 0 to i (and all of other requests), and never one beyond i.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dsv41.inference.measurements import AcceptanceStatistics, Calibration, Plan, ThroughputCurve


class Scheduler(Protocol):
    """Chooses the depths of each round.

    Attributes:
      statistics: what was verified and accepted so far.
    """

    statistics: AcceptanceStatistics

    def drafts(self, active: np.ndarray, caps: np.ndarray) -> bool:
        """Whether this round drafts.

        Args:
          active: bool ``[batch]``.
          caps: int ``[batch]``, drafts that each request may have verified at most: its remaining tokens less the
            one that every step commits anyway. Those of inactive rows are not read.
        """

    def choose(self, confidence: np.ndarray, active: np.ndarray, caps: np.ndarray) -> Plan:
        """The depths of a round that drafted.

        Args:
          confidence: ``[batch, block]``, logits of the confidence head. Inactive rows are not read.

        Raises:
          ValueError: a cap of an active request is negative.
        """

    def plain(self, active: np.ndarray) -> Plan:
        """A round that did not draft."""

    def observe(self, plan: Plan, accepted: np.ndarray, step_seconds: float, draft_seconds: float | None) -> None:
        """Takes in the outcome of a round.

        Args:
          accepted: int ``[batch]``, drafts accepted.
          step_seconds: of the verification, compilation not included.
          draft_seconds: of the drafting; None if nothing was drafted.
        """


class FixedDepth:
    """Verifies the same number of drafts of every request, as far as its cap allows. See :class:`Scheduler`.

    Args:
      depth: drafts to verify.
      block: drafts that a round makes for each request.
      widths: compiled widths of the verify step.

    Raises:
      ValueError: the depth is outside the block or the widths.
    """

    def __init__(self, depth: int, block: int, widths: Sequence[int]) -> None:
        self._widths = _checked_widths(widths)
        self._depth = depth
        if not 0 <= depth <= min(block, self._widths[-1] - 1):
            raise ValueError(f"depth: {depth} drafts of a block of {block} do not fit into steps of widths {widths}")
        self.statistics = AcceptanceStatistics(block)

    def drafts(self, active: np.ndarray, caps: np.ndarray) -> bool:
        return bool(_limits(active, caps, self._depth).any())

    def choose(self, confidence: np.ndarray, active: np.ndarray, caps: np.ndarray) -> Plan:
        depth = _limits(active, caps, self._depth)
        return Plan(active.copy(), depth, _padded(self._widths, depth), confidence)

    def plain(self, active: np.ndarray) -> Plan:
        return _plain(active, self._widths)

    def observe(self, plan: Plan, accepted: np.ndarray, step_seconds: float, draft_seconds: float | None) -> None:
        self.statistics.add(plan, accepted)


class ThroughputScheduler:
    """Verifies a draft where the batch is expected to commit more tokens per second with it. See :class:`Scheduler`.

    Depths grow greedily: drafts of all requests by falling survival (the product of calibrated confidences up to
    them) as long as each raises committed tokens / (drafting + step). Drafts that fit into the width of the step so
    far come first. A wider step costs all requests at once, so it is judged by the next draft of all requests that
    are as deep as the step is wide, and by nothing beyond those.

    Whether to draft at all follows what drafting rounds really committed: where plain decoding gives more tokens per
    second, rounds are plain until the next trial. A trial verifies every draft for some rounds, which calibrates and
    measures anew, then as many rounds are judged. The first drafting rounds are a trial.

    Steps of every width should be measured (:attr:`curve`) before use; a plain step comes first if none was.

    Args:
      block: drafts that a round makes for each request.
      widths: compiled widths of the verify step, pending token included; the smallest serves plain rounds.
      trial_rounds: drafting rounds that verify everything, and those that are judged before drafting is given up.
      plain_rounds: plain rounds between trials.
      temperature: of the confidences at each position of the block, at first; None: 1.

    Raises:
      ValueError: no widths, or not all are positive and rising.
    """

    _MEMORY = 0.95  # of what drafting rounds committed: about the last 20

    def __init__(
        self,
        block: int,
        widths: Sequence[int],
        *,
        trial_rounds: int = 8,
        plain_rounds: int = 128,
        temperature: Sequence[float] | None = None,
    ) -> None:
        self._widths, self._block = _checked_widths(widths), block
        self._trial_rounds, self._plain_rounds = trial_rounds, plain_rounds
        self.statistics = AcceptanceStatistics(block)
        self.calibration, self.curve = Calibration(block, temperature), ThroughputCurve()
        self._plain_left = 0
        self._begin_trial()

    def drafts(self, active: np.ndarray, caps: np.ndarray) -> bool:
        return (
            bool(_limits(active, caps, self._most).any())
            and self.curve.measured(self._widths[0])
            and self._plain_left == 0
        )

    def choose(self, confidence: np.ndarray, active: np.ndarray, caps: np.ndarray) -> Plan:
        limit = _limits(active, caps, self._most)
        if self._round < self._trial_rounds:
            depth = limit
        else:
            depth = self._greedy_depth(self.calibration.probabilities(confidence), active, limit)
        return Plan(active.copy(), depth, _padded(self._widths, depth), np.array(confidence))

    def plain(self, active: np.ndarray) -> Plan:
        return _plain(active, self._widths)

    def observe(self, plan: Plan, accepted: np.ndarray, step_seconds: float, draft_seconds: float | None) -> None:
        self.statistics.add(plan, accepted)
        self.curve.record(plan.width, plan.tokens, step_seconds)
        if plan.confidence is None:
            self._plain_left = max(self._plain_left - 1, 0)
            return
        self.curve.record_draft(draft_seconds)
        self.calibration.update(plan, accepted)
        requests = int(plan.active.sum())
        committed = requests + int(np.sum(accepted, where=plan.active))
        # From the curve, not from the clock: one hiccup is no reason to stop drafting.
        drafting = self.curve.draft_seconds + self._seconds(plan.width, plan.tokens)
        plain = committed / requests * self._seconds(self._widths[0], requests)
        self._round += 1
        if self._round <= self._trial_rounds:  # of every draft, whether it pays or not
            return
        self._spent = self._MEMORY * self._spent + np.array([drafting, plain])
        if self._round >= 2 * self._trial_rounds and self._spent[0] > self._spent[1]:
            self._plain_left = self._plain_rounds
            self._begin_trial()

    @property
    def _most(self) -> int:
        return min(self._block, self._widths[-1] - 1)

    def _begin_trial(self) -> None:
        self._round = 0  # drafting rounds of the trial and since
        self._spent = np.zeros(2)  # seconds of drafting rounds, and of plain ones for the same tokens

    def _seconds(self, width: int, tokens: int) -> float:
        return float(self.curve.seconds([width], [tokens])[0, 0])

    def _greedy_depth(self, p: np.ndarray, active: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """Depths int32 ``[batch]`` for conditional probabilities ``[batch, block]``."""
        survival = np.cumprod(p, axis=1)
        depth = np.zeros(len(limit), np.int32)
        rows = np.flatnonzero(limit)
        most_tokens = np.arange(int(active.sum() + limit.sum()) + 1)
        expected = tokens = int(active.sum())
        by_width = self.curve.draft_seconds + self.curve.seconds(self._widths, most_tokens)
        for i, width in enumerate(self._widths):
            seconds = by_width[i]
            fits = np.minimum(limit, width - 1)
            # A request is in the heap with its next draft only. This is what keeps the decision about a draft from
            # looking at what its value determines; after the first that does not pay nothing else is tried.
            heap = [(-survival[row, depth[row]], depth[row], row) for row in rows if depth[row] < fits[row]]
            heapq.heapify(heap)
            while heap:
                more = expected - heap[0][0]
                if not more / seconds[tokens + 1] > expected / seconds[tokens]:
                    break
                row = heap[0][2]
                depth[row] += 1
                expected, tokens = more, tokens + 1
                if depth[row] < fits[row]:
                    heapq.heapreplace(heap, (-survival[row, depth[row]], depth[row], row))
                else:
                    heapq.heappop(heap)
            full = rows[(depth[rows] == width - 1) & (limit[rows] > depth[rows])]
            if width == self._widths[-1] or not len(full):
                break
            room = np.minimum(limit[full], self._widths[i + 1] - 1) - (width - 1)
            survives = survival[full, width - 1]
            chosen, rate = _widening(survives, p[full, width - 1], room, expected, tokens, by_width[i + 1])
            if not rate > expected / seconds[tokens]:
                break
            depth[full[chosen]] += 1
            expected, tokens = expected + float(survives[chosen].sum()), tokens + len(chosen)
        return depth


def _widening(
    survival: np.ndarray, p: np.ndarray, room: np.ndarray, expected: float, tokens: int, seconds: np.ndarray
) -> tuple[np.ndarray, float]:
    """Which requests would best continue in a wider step, and the tokens per second then.

    Args:
      survival, p: float ``[requests]``, of the next draft of each; p is conditional on the drafts before it.
      room: int ``[requests]``, drafts of each that the wider step may hold. The confidences of those after the next
        one must not be looked at: they are taken to be accepted as often as the next one.
      expected: tokens that the step commits so far.
      tokens: live tokens of the step so far.
      seconds: of the wider step and the drafting, by live tokens.
    """
    powers = np.arange(room.max())
    values = survival * np.sum((powers < room[:, None]) * p[:, None] ** powers, axis=1)
    order = np.argsort(-survival, kind="stable")
    rates = (expected + np.cumsum(values[order])) / seconds[tokens + np.cumsum(room[order])]
    best = int(np.argmax(rates))
    return order[: best + 1], float(rates[best])


def _checked_widths(widths: Sequence[int]) -> tuple[int, ...]:
    widths = tuple(widths)
    if not widths or widths[0] < 1 or any(b <= a for a, b in itertools.pairwise(widths)):
        raise ValueError(f"widths: {widths} are not positive and rising")
    return widths


def _limits(active: np.ndarray, caps: np.ndarray, most: int) -> np.ndarray:
    """Drafts that each request may have verified, int32 ``[batch]``; 0 for inactive ones."""
    negative = np.flatnonzero(active & (np.asarray(caps) < 0))
    if len(negative):
        raise ValueError(f"caps: {caps[negative[0]]} of request {negative[0]} is negative")
    return np.where(active, np.minimum(caps, most), 0).astype(np.int32)


def _padded(widths: Sequence[int], depth: np.ndarray) -> int:
    """The smallest compiled width that holds the pending token and the drafts of every request."""
    return next(width for width in widths if width > depth.max())


def _plain(active: np.ndarray, widths: Sequence[int]) -> Plan:
    return Plan(active.copy(), np.zeros(len(active), np.int32), widths[0], None)
