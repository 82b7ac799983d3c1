"""Verification and rollback: what a step leaves behind is what plain decoding of the accepted tokens leaves."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.checkpoint import CheckpointReader, RandomSource
from dsv41.config import load_config
from dsv41.layers.dspark import Drafter
from dsv41.loading import checkpoint_variables, load_drafter
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.state.request import ModelState, create_sequential_state
from dsv41.state.ring import Ring, create_ring
from dsv41.steps.acceptance import Rule
from dsv41.steps.draft import seed_drafter
from dsv41.steps.sampling import Sampler, create_sampler
from dsv41.steps.verify import Verification, verify_step
from tests.conftest import GOLDEN, PAGE_TOKENS
from tests.helpers import SMALL_LAYOUT, TWO_LAYERS, assert_same_bytes, copied, owned, random_model, random_tokens

# Every number of drafts with every number of accepted ones, each in a row of its own.
CASES = tuple((k, a) for k in range(1, 6) for a in range(k + 1))
FEW_CASES = ((1, 0), (3, 1), (2, 2), (5, 3), (4, 4), (5, 5))
"""Every number of accepted drafts, for a model whose steps take long."""
BATCH, DRAFTS = len(CASES), 5
LAYOUT = (
    SMALL_LAYOUT
    | TWO_LAYERS
    | {"num_nextn_predict_layers": 2, "compress_ratios": (2, 1, 0, 0), "dspark_target_layer_ids": (0, 1)}
)
"""A tail, entries of both ratios, a pool, an Engram, taps: loops over layers are the forty-layer model's."""
START, LAST = 7, 24
"""Positions at which blocks are verified: both parities, the ring's wrap at 16, page ends at 8, 16 and 24."""


class Snapshot(NamedTuple):
    """A moment of the plain decoding of all rows."""

    state: ModelState
    ring: Ring
    sampler: Sampler


class Trajectory(NamedTuple):
    """Plain decoding from empty requests on: the snapshot at each position, one row a case (drafts, accepted)."""

    cases: tuple[tuple[int, int], ...]
    model: Model
    variables: dict
    drafter: Drafter
    drafter_variables: dict
    snapshots: list[Snapshot]

    def verify(
        self, now: Snapshot, drafts: np.ndarray, depth: np.ndarray, active: np.ndarray | None = None
    ) -> tuple[Snapshot, Verification]:
        """A verify step from a snapshot, which stays as it is."""
        batch = len(self.cases)
        active = np.ones(batch, bool) if active is None else active
        state, sampler, outcome = verify_step(
            self.model,
            Rule.COUPLED,
            self.variables,
            copied(now.state),
            copied(now.sampler),
            jnp.asarray(drafts, jnp.int32),
            None,
            jnp.asarray(depth, jnp.int32),
            jnp.asarray(active),
        )
        rows = jnp.arange(batch, dtype=jnp.int32)
        ring = seed_drafter(
            self.drafter,
            self.drafter_variables,
            copied(now.ring),
            rows,
            outcome.taps,
            outcome.start,
            outcome.consumed,
        )
        return Snapshot(state, ring, sampler), outcome


def begin(model: Model, batch: int, tokens: int, temperature: float) -> Snapshot:
    """Empty requests with room for so many tokens, every one with a seed and a pending token of its own.

    Bound to a device, as what steps return is: what is not would compile every step twice.
    """
    settings = model.settings
    state = create_sequential_state(settings, batch, tokens)
    ring = create_ring(settings, settings.text.num_nextn_predict_layers, batch)
    sampler = create_sampler(batch).replace(
        pending=jnp.asarray(random_tokens(4, batch)),
        seed=jnp.arange(batch, dtype=jnp.uint32),
        temperature=jnp.full((batch,), temperature, jnp.float32),
    )
    return jax.device_put(Snapshot(state, ring, sampler), jax.local_devices()[0])


def decode_on(run: Trajectory, steps: int) -> Trajectory:
    """Appends plain decoding (verification of no drafts) to a trajectory."""
    batch = len(run.cases)
    nothing = np.zeros((batch, DRAFTS), np.int32), np.zeros(batch, np.int32)
    for _ in range(steps):
        run.snapshots.append(run.verify(run.snapshots[-1], *nothing)[0])
    return run


def trajectory(temperature: float, last: int) -> Trajectory:
    """Plain decoding of a small model, so far that whole blocks can be verified up to position ``last``."""
    model, variables = random_model(True, **LAYOUT)
    drafter = Drafter(model.settings)
    drafter_variables = load_drafter(drafter, RandomSource(model.settings.config, 3))
    start = begin(model, BATCH, LAST + 2 * DRAFTS + 2, temperature)
    return decode_on(Trajectory(CASES, model, variables, drafter, drafter_variables, [start]), last + DRAFTS + 1)


@pytest.fixture(scope="module")
def forty_layers() -> Trajectory:
    """The official layout with the official formats, from position 0 to beyond a turn of its ring of 16."""
    config = load_config(GOLDEN / "tiny40" / "fp8")
    model = Model(Settings.default(config, page_tokens=PAGE_TOKENS))
    drafter, reader = Drafter(model.settings), CheckpointReader(GOLDEN / "tiny40" / "fp8")
    variables = checkpoint_variables(model, GOLDEN / "tiny40" / "fp8", None)
    start = begin(model, len(FEW_CASES), 32, 0.0)
    run = Trajectory(FEW_CASES, model, variables, drafter, load_drafter(drafter, reader), [start])
    return decode_on(run, 18 + DRAFTS + 1)


@pytest.fixture(scope="module")
def plain() -> Trajectory:
    return trajectory(0.0, LAST)


@pytest.fixture(scope="module")
def warm() -> Trajectory:
    """The same at a temperature, every request with a seed of its own."""
    return trajectory(0.8, 16)


def everything(now: Snapshot, row: int) -> dict[str, np.ndarray]:
    """All bytes on which the row's future depends: model state, drafter ring, sampler."""
    parts = owned(now.state, row)
    positions = np.asarray(now.ring.positions[row])
    parts["drafter positions"] = positions
    for i, leaf in enumerate(jax.tree.leaves(now.ring.entries)):
        parts[f"drafter ring {i}"] = np.asarray(leaf)[:, row, positions >= 0]
    for name in ("pending", "counter"):
        parts[name] = np.asarray(getattr(now.sampler, name)[row])
    return parts


def on_host(now: Snapshot) -> Snapshot:
    return jax.tree.map(np.asarray, now)


def next_tokens(run: Trajectory, step: int, count: int = DRAFTS) -> np.ndarray:
    """The tokens that plain decoding takes next after a snapshot's pending ones, ``[batch, count]``."""
    return np.stack([np.asarray(run.snapshots[step + 1 + i].sampler.pending) for i in range(count)], axis=1)


def spoilt(truth: np.ndarray, accept: np.ndarray) -> np.ndarray:
    """Drafts ``[batch, drafts]`` that are right up to ``accept`` [batch] and wrong from there on."""
    return np.where(np.arange(DRAFTS) >= accept[:, None], (truth + 1) % 490, truth)


def check_every_accept_length(run: Trajectory, steps: range) -> None:
    """All (k, a) in one batch, after each of some plain steps: equal to the byte."""
    host = {step: on_host(run.snapshots[step]) for step in range(steps.start, steps.stop + DRAFTS + 1)}
    depth, accept = (np.array(column) for column in zip(*run.cases, strict=True))
    for step in steps:
        truth = next_tokens(run, step, DRAFTS + 1)
        drafts = spoilt(truth[:, :DRAFTS], accept)
        after, outcome = run.verify(run.snapshots[step], drafts, depth)
        np.testing.assert_array_equal(outcome.accepted, accept)
        after = on_host(after)
        for row, a in enumerate(accept):
            assert_same_bytes(everything(after, row), everything(host[step + a + 1], row))
            assert outcome.tokens[row].tolist() == [*truth[row, : a + 1], *[-1] * (DRAFTS - a)]


def test_every_accept_length_leaves_the_state_of_plain_decoding(plain: Trajectory):
    """At every position around the ring's wrap and the page ends."""
    check_every_accept_length(plain, range(START, LAST))


@pytest.mark.parametrize("position", [0, 1, 12, 15, 16, 17])
def test_every_accept_length_in_forty_layers(forty_layers: Trajectory, position: int):
    """Four sources, forty rings, three tails, three drafter rings: at the start, and around a turn of the rings."""
    check_every_accept_length(forty_layers, range(position, position + 1))


def test_every_accept_length_at_a_temperature(warm: Trajectory):
    """The coupled rule draws what plain decoding draws, so the state is the same there too."""
    check_every_accept_length(warm, range(15, 17))


def test_the_next_block_after_a_rollback(plain: Trajectory):
    """Rejected rows of one block are gone in the next: two blocks of drafts, partly wrong, and then plain steps."""
    depth, accept = (np.array(column) for column in zip(*CASES, strict=True))
    step = 14
    now, reached = plain.snapshots[step], np.zeros(BATCH, int)
    for length in (accept, np.zeros(BATCH, int)):
        truth = np.stack([next_tokens(plain, step + r)[row] for row, r in enumerate(reached)])
        drafts = spoilt(truth, length)
        now, _ = plain.verify(now, drafts, depth)
        reached += length + 1
    after = on_host(now)
    for row, r in enumerate(reached):
        assert_same_bytes(everything(after, row), everything(on_host(plain.snapshots[step + r]), row))


def test_inactive_requests_do_not_move(plain: Trajectory):
    active = np.arange(BATCH) % 3 != 0
    drafts = next_tokens(plain, 11)
    after, outcome = plain.verify(plain.snapshots[11], drafts, np.full(BATCH, DRAFTS), active)
    before, after = on_host(plain.snapshots[11]), on_host(after)
    for row in np.flatnonzero(~active):
        assert_same_bytes(everything(after, row), everything(before, row))
    np.testing.assert_array_equal(outcome.consumed, np.where(active, DRAFTS + 1, 0))


def test_a_request_does_not_depend_on_the_depth_of_others(plain: Trajectory):
    drafts = next_tokens(plain, 16)
    together, _ = plain.verify(plain.snapshots[16], drafts, np.arange(BATCH) % (DRAFTS + 1))
    alone, _ = plain.verify(plain.snapshots[16], drafts, np.where(np.arange(BATCH) == 8, 8 % (DRAFTS + 1), 0))
    assert_same_bytes(everything(on_host(together), 8), everything(on_host(alone), 8))
