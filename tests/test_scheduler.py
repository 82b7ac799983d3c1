"""The scheduler: depths that pay and keep sampling exact, calibration, fallback to plain decoding, statistics."""

from __future__ import annotations

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from dsv41.inference.measurements import AcceptanceStatistics, Calibration, Plan, ThroughputCurve
from dsv41.inference.scheduler import FixedDepth, ThroughputScheduler

BLOCK = 5
PLENTY = 1000
EVERY_WIDTH = tuple(range(1, BLOCK + 2))


def ready_scheduler(seconds, widths, draft_seconds: float = 0.0, batch: int = 4, **rounds: int) -> ThroughputScheduler:
    """A scheduler past its first trial, whose curve has measured ``seconds(width, tokens)``."""
    scheduler = ThroughputScheduler(BLOCK, widths, trial_rounds=0, **rounds)
    for width in widths:
        for power in range(1, 2 + int(np.log2(batch * (BLOCK + 1)))):
            scheduler.curve.record(width, 2**power, seconds(width, 2**power))
        scheduler.curve.record(width, 1, seconds(width, 1))
    scheduler.curve.record_draft(draft_seconds)
    return scheduler


def logits(p) -> np.ndarray:
    p = np.asarray(p, np.float64)
    return np.log(p) - np.log1p(-p)


def depths(scheduler: ThroughputScheduler, p: np.ndarray, caps=None, active=None) -> np.ndarray:
    batch = len(p)
    caps = np.full(batch, PLENTY) if caps is None else np.asarray(caps)
    active = np.ones(batch, bool) if active is None else np.asarray(active)
    return scheduler.choose(logits(p), active, caps).depth


# The greedy choice


def best_prefix(p: np.ndarray, draft_seconds: float, seconds) -> tuple[np.ndarray, float]:
    """Depths of the best prefix of all draft positions by falling survival, and its tokens per second."""
    survival = np.cumprod(p, axis=1)
    places = sorted(np.ndindex(*p.shape), key=lambda place: (-survival[place], place[1], place[0]))
    expected = tokens = len(p)
    best, depth, best_rate = np.zeros(len(p), int), np.zeros(len(p), int), expected / (draft_seconds + seconds(tokens))
    for row, position in places:
        expected, tokens = expected + survival[row, position], tokens + 1
        depth[row] += 1
        rate = expected / (draft_seconds + seconds(tokens))
        if rate > best_rate:
            best, best_rate = depth.copy(), rate
    return best, best_rate


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.03, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_depths_are_the_best_prefix_where_seconds_rise_evenly(slope, batch):
    def seconds(tokens):
        return 0.5 + slope * tokens

    rng = np.random.default_rng(0)
    scheduler = ready_scheduler(lambda width, tokens: seconds(tokens), (BLOCK + 1,), 0.2, batch)
    chosen = []
    for _ in range(30):
        p = rng.uniform(0.05, 0.99, (batch, BLOCK))
        best, _ = best_prefix(p, 0.2, seconds)
        np.testing.assert_array_equal(depths(scheduler, p), best)
        chosen.append(best)
    assert slope != 0 or np.all(np.array(chosen) == BLOCK)
    assert slope not in (0.03, 0.1) or len(np.unique(chosen)) > 2


@pytest.mark.parametrize("cost", [0.01, 0.2, 0.5, 2.0])
def test_depths_are_the_best_width_where_only_the_width_costs(cost):
    rng = np.random.default_rng(1)
    scheduler = ready_scheduler(lambda width, tokens: 1 + cost * (width - 1), EVERY_WIDTH)
    found = set()
    for _ in range(20):
        p = np.sort(rng.uniform(0.05, 0.99, (4, BLOCK)))[:, ::-1]  # falling, so that there is one best width
        expected = 4 + np.insert(np.cumsum(np.cumprod(p, axis=1).sum(0)), 0, 0)
        best = int(np.argmax(expected / (1 + cost * np.arange(BLOCK + 1))))
        np.testing.assert_array_equal(depths(scheduler, p), np.full(4, best))
        found.add(best)
    assert len(found) > 1 or cost in (0.01, 2.0)


def test_a_wider_step_is_paid_for_by_all_requests_together():
    """A likely draft of one request does not pay for 1.9 times the time; one of each of four requests does."""
    p = np.full((4, BLOCK), 0.95)
    for cost, expected in ((1.9, 1), (2.1, 0)):
        scheduler = ready_scheduler(lambda width, tokens, cost=cost: cost if width > 1 else 1.0, (1, 2))
        np.testing.assert_array_equal(depths(scheduler, p), np.full(4, expected))
    alone = ready_scheduler(lambda width, tokens: 1.9 if width > 1 else 1.0, (1, 2))
    unlikely = np.concatenate([p[:1], np.full((3, BLOCK), 0.1)])
    np.testing.assert_array_equal(depths(alone, unlikely), np.zeros(4))


def test_a_much_wider_step_is_judged_by_all_that_it_may_hold():
    """Widths 1 and 6 alone: a first draft of 0.8 does not pay for 2 seconds, the five that follow are likely to."""
    scheduler = ready_scheduler(lambda width, tokens: 2.0 if width > 1 else 1.0, (1, BLOCK + 1))
    assert depths(scheduler, np.full((1, BLOCK), 0.8)) == BLOCK
    assert depths(scheduler, np.full((1, BLOCK), 0.4)) == 0


def test_unlikely_drafts_of_one_request_do_not_hold_up_another():
    scheduler = ready_scheduler(lambda width, tokens: 1 + 0.02 * tokens + 0.05 * width, EVERY_WIDTH)
    p = np.array([[0.99] * BLOCK, [0.001] * BLOCK])
    np.testing.assert_array_equal(depths(scheduler, p), [BLOCK, 0])
    np.testing.assert_array_equal(depths(scheduler, p[::-1]), [0, BLOCK])


probability = st.floats(0.01, 0.99)
row_of_probabilities = st.lists(probability, min_size=BLOCK, max_size=BLOCK)


@hypothesis.given(
    st.lists(row_of_probabilities, min_size=1, max_size=4),
    row_of_probabilities,
    st.integers(0, BLOCK - 1),
    st.sampled_from([EVERY_WIDTH, (1, 3, 6), (1, 6), (6,), (1, 2, 4)]),
    st.floats(0.0, 0.3),
    st.floats(0.0, 0.8),
    st.data(),
)
@hypothesis.settings(max_examples=300, deadline=None)
def test_later_confidences_never_decide_about_an_earlier_draft(p, other, position, widths, by_token, by_width, data):
    """What keeps sampling exact: confidence i tells of the tokens before draft i, later ones of draft i itself."""
    scheduler = ready_scheduler(lambda width, tokens: 1 + by_token * tokens**1.3 + by_width * width, widths)
    p = np.array(p)
    row = data.draw(st.integers(0, len(p) - 1))
    changed = p.copy()
    changed[row, position:] = other[position:]
    before, after = depths(scheduler, p)[row], depths(scheduler, changed)[row]
    assert min(before, position) == min(after, position)


@hypothesis.given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 8)), min_size=1, max_size=4), st.sampled_from([(1, 3, 6), (1, 4)])
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_depths_keep_to_caps_and_widths(rows, widths):
    active, caps = np.array([a for a, _ in rows]), np.array([c if a else -7 for a, c in rows])
    p = np.where(active[:, None], 0.99, np.nan) * np.ones(BLOCK)
    most = np.where(active, np.minimum(caps, widths[-1] - 1), 0)
    schedulers = (
        ready_scheduler(lambda width, tokens: 1.0, widths),  # everything pays
        ThroughputScheduler(BLOCK, widths),  # in its first trial
        FixedDepth(widths[-1] - 1, BLOCK, widths),
    )
    for scheduler in schedulers:
        plan = scheduler.choose(logits(p), active, caps)
        np.testing.assert_array_equal(plan.depth, most)
        assert plan.width == min(width for width in widths if width > plan.depth.max())
        assert plan.tokens == active.sum() + most.sum()
    assert schedulers[0].drafts(active, caps) == bool(most.any())
    assert schedulers[2].drafts(active, caps) == bool(most.any())


def test_a_fixed_depth_is_fixed():
    scheduler = FixedDepth(2, BLOCK, (1, 3, 6))
    plan = scheduler.choose(np.zeros((3, BLOCK)), np.array([True, True, False]), np.array([9, 1, 9]))
    np.testing.assert_array_equal(plan.depth, [2, 1, 0])
    assert plan.width == 3
    assert scheduler.plain(plan.active).width == 1
    none = FixedDepth(0, BLOCK, (1,))
    assert not none.drafts(plan.active, np.full(3, PLENTY))


@pytest.mark.parametrize("depth", [-1, 3, 6])
def test_a_fixed_depth_must_fit(depth):
    with pytest.raises(ValueError, match=f"depth: {depth}"):
        FixedDepth(depth, BLOCK, (1, 3))


@pytest.mark.parametrize("widths", [(), (0, 1), (2, 2), (3, 1)])
def test_widths_must_rise(widths):
    with pytest.raises(ValueError, match="widths"):
        ThroughputScheduler(BLOCK, widths)


def test_a_negative_cap_is_an_error():
    with pytest.raises(ValueError, match="caps: -1 of request 1"):
        FixedDepth(1, BLOCK, (2,)).choose(np.zeros((2, BLOCK)), np.ones(2, bool), np.array([1, -1]))


def test_confidences_that_are_no_numbers_verify_nothing():
    scheduler = ready_scheduler(lambda width, tokens: 1.0, (1, 3, 6))
    confidence = np.full((2, BLOCK), np.nan)
    np.testing.assert_array_equal(scheduler.choose(confidence, np.ones(2, bool), np.full(2, PLENTY)).depth, [0, 0])


# The curve


def test_the_curve_interpolates_and_never_falls():
    curve = ThroughputCurve()
    for width, tokens, seconds in [(1, 4, 1.0), (6, 8, 2.0), (6, 24, 4.0), (6, 96, 3.0), (7, 8, 1.5)]:
        curve.record(width, tokens, seconds)
    found = curve.seconds([1, 3, 6, 7, 9], [1, 8, 16, 24, 50, 200])
    np.testing.assert_allclose(found[0], 1.0)
    np.testing.assert_allclose(found[2], [2, 2, 3, 4, 4, 4])
    np.testing.assert_allclose(found[1], 1 + (found[2] - 1) * 2 / 5)
    np.testing.assert_allclose(found[3:], [found[2], found[2]])  # wider is not faster; the last one was never measured
    assert curve.measured(6)
    assert not curve.measured(3)


def test_one_hiccup_does_not_bend_the_curve():
    curve = ThroughputCurve()
    for seconds in (1.0, 1.1, 60.0, 0.9, 1.0):
        curve.record(2, 8, seconds)
        curve.record_draft(seconds / 10)
    assert curve.seconds([2], [8]) == pytest.approx(1.0)
    assert curve.draft_seconds == pytest.approx(0.1)


def test_the_curve_follows_new_measurements():
    curve = ThroughputCurve()
    for seconds in (1.0,) * 20 + (2.0,) * 20:
        curve.record(2, 8, seconds)
    assert curve.seconds([2], [8]) == pytest.approx(2.0)


# Calibration


def outcome(rng, p: np.ndarray, depth: np.ndarray) -> np.ndarray:
    """Accepted drafts ``[batch]`` where draft i is accepted with probability p[:, i] after all before it."""
    position = np.arange(p.shape[1])
    accept = (rng.uniform(size=p.shape) < p) & (position < depth[:, None])
    return np.cumprod(accept, axis=1).sum(1)


def test_calibration_finds_the_temperatures_of_the_outcomes():
    rng, batch = np.random.default_rng(0), 16
    true = np.array([0.5, 1.0, 2.0, 3.0, 1.5])
    calibration = Calibration(BLOCK)
    np.testing.assert_array_equal(calibration.temperature, np.ones(BLOCK))
    for _ in range(600):
        confidence = rng.normal(1.5, 2.0, (batch, BLOCK))
        accepted = outcome(rng, 1 / (1 + np.exp(-confidence / true)), np.full(batch, BLOCK))
        plan = Plan(np.ones(batch, bool), np.full(batch, BLOCK), BLOCK + 1, confidence)
        calibration.update(plan, accepted)
    np.testing.assert_allclose(calibration.temperature, true, rtol=0.3)
    np.testing.assert_allclose(
        calibration.probabilities(np.full((1, BLOCK), 2.0))[0], 1 / (1 + np.exp(-2 / true)), atol=0.06
    )


def test_only_drafts_whose_predecessors_were_accepted_are_evidence():
    calibration = Calibration(BLOCK)
    confidence = np.full((4, BLOCK), 3.0)
    confidence[2], confidence[1, 2:] = np.nan, np.nan  # what is no evidence may be anything
    plan = Plan(np.array([True, True, False, True]), np.array([3, 2, 3, 0]), BLOCK + 1, confidence)
    calibration.update(plan, np.array([1, 2, 0, 0]))
    changed = calibration.temperature != 1
    # Row 0: the first accepted, the second refused, the third not reached. Row 1: two accepted, no third verified.
    np.testing.assert_array_equal(changed, [True, True, False, False, False])
    assert calibration.temperature[0] < 1  # accepted more often than 0.95
    assert calibration.temperature[1] > 1  # than 0.95 less often


def test_calibration_stays_bounded_where_no_temperature_explains_the_outcomes():
    calibration = Calibration(1)
    plan = Plan(np.ones(1, bool), np.ones(1, np.int32), 2, np.full((1, 1), 20.0))
    for _ in range(300):
        calibration.update(plan, np.zeros(1, int))
    assert calibration.temperature[0] == pytest.approx(16)
    for confidence in (1e30, -1e30):
        assert np.isfinite(calibration.probabilities(np.full((1, 1), confidence))).all()


# Drafting or not


class Machine:
    """A batch whose drafts are accepted with one probability and whose steps take known seconds."""

    def __init__(
        self, scheduler, batch: int = 2, draft_seconds: float = 0.3, seconds=lambda width: 1.0 + 0.1 * (width - 1)
    ) -> None:
        self.scheduler, self.batch, self.draft_seconds, self.seconds = scheduler, batch, draft_seconds, seconds
        self.rng = np.random.default_rng(0)

    def run(self, rounds: int, p: float, caps: int = PLENTY) -> list[Plan]:
        plans = []
        for _ in range(rounds):
            active, limit = np.ones(self.batch, bool), np.full(self.batch, caps)
            if self.scheduler.drafts(active, limit):
                # The confidence head is sure of itself whatever happens.
                plan = self.scheduler.choose(np.full((self.batch, BLOCK), 3.0), active, limit)
            else:
                plan = self.scheduler.plain(active)
            accepted = outcome(self.rng, np.full((self.batch, BLOCK), p), plan.depth)
            draft_seconds = None if plan.confidence is None else self.draft_seconds
            self.scheduler.observe(plan, accepted, self.seconds(plan.width), draft_seconds)
            plans.append(plan)
        return plans


def drafted(plans: list[Plan]) -> np.ndarray:
    return np.array([plan.confidence is not None for plan in plans])


def test_a_plain_step_is_measured_before_drafting():
    machine = Machine(ThroughputScheduler(BLOCK, EVERY_WIDTH))
    np.testing.assert_array_equal(drafted(machine.run(3, 0.9)), [False, True, True])


def test_good_drafts_go_on():
    plans = Machine(ThroughputScheduler(BLOCK, EVERY_WIDTH)).run(300, 0.9)
    assert drafted(plans)[1:].all()
    assert np.mean([plan.depth for plan in plans[50:]]) > 3


def test_bad_drafts_give_way_to_plain_decoding_with_trials():
    scheduler = ThroughputScheduler(BLOCK, EVERY_WIDTH, trial_rounds=4, plain_rounds=20)
    machine = Machine(scheduler)
    runs = [(kind, len(list(group))) for kind, group in itertools.groupby(drafted(machine.run(200, 0.05)))]
    assert runs[1] == (True, 8)  # four rounds of all drafts, four that are judged
    assert set(runs[2:-1]) == {(False, 20), (True, 8)}
    # The same machine with better drafts is found by a trial.
    assert drafted(machine.run(100, 0.9))[-50:].all()


def test_drafting_that_costs_more_than_it_gives_is_given_up():
    cheap = Machine(ThroughputScheduler(BLOCK, EVERY_WIDTH), draft_seconds=0.3)
    dear = Machine(ThroughputScheduler(BLOCK, EVERY_WIDTH), draft_seconds=3.0)
    assert drafted(cheap.run(60, 0.7))[-20:].all()
    assert not drafted(dear.run(60, 0.7))[-20:].any()


def test_a_trial_verifies_every_draft():
    scheduler = ThroughputScheduler(BLOCK, EVERY_WIDTH, trial_rounds=4)
    plans = Machine(scheduler).run(5, 0.05)
    assert all((plan.depth == BLOCK).all() for plan in plans[1:])


def test_a_trial_is_not_judged_by_its_deep_drafts():
    """Two drafts of 0.9 pay in steps whose seconds rise fast beyond three tokens; five, as a trial verifies, do not."""
    seconds = {1: 1.0, 2: 1.1, 3: 1.2, 4: 4.0, 5: 7.0, 6: 10.0}
    scheduler = ThroughputScheduler(BLOCK, EVERY_WIDTH)
    for width in EVERY_WIDTH:
        scheduler.curve.record(width, 4, seconds[width])
    plans = Machine(scheduler, seconds=seconds.get).run(60, 0.9)
    assert drafted(plans).all()
    assert plans[0].width == 6
    assert {plan.width for plan in plans[10:]} == {3}


def test_requests_with_nothing_left_to_draft_for_decode_plainly():
    assert not drafted(Machine(ThroughputScheduler(BLOCK, EVERY_WIDTH)).run(5, 0.9, caps=0)).any()


# Statistics


def test_statistics_count_by_position():
    statistics = AcceptanceStatistics(3)
    assert np.isnan(statistics.mean_accepted)
    active = np.array([True, True, True, False])
    plan = Plan(active, np.array([3, 2, 0, 0]), 4, np.zeros((4, 3)))
    statistics.add(plan, np.array([1, 2, 0, 0]))
    statistics.add(Plan(active, np.zeros(4, int), 1, None), np.zeros(4, int))
    np.testing.assert_array_equal(statistics.drafted, [3, 3, 3])
    np.testing.assert_array_equal(statistics.verified, [2, 2, 1])
    np.testing.assert_array_equal(statistics.reached, [2, 2, 0])
    np.testing.assert_array_equal(statistics.accepted, [2, 1, 0])
    np.testing.assert_array_equal(statistics.acceptance, [1.0, 0.5, np.nan])
    assert statistics.steps == 6
    assert statistics.mean_accepted == pytest.approx(3 / 6)


@pytest.mark.parametrize("scheduler", [FixedDepth(2, BLOCK, (1, 3)), ThroughputScheduler(BLOCK, EVERY_WIDTH)])
def test_schedulers_keep_statistics(scheduler):
    Machine(scheduler).run(40, 0.6)
    assert scheduler.statistics.steps == 80
    assert 0.3 < scheduler.statistics.acceptance[0] < 0.9
