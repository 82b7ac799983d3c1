"""Sampling: the distribution, its cuts, and random numbers that belong to the request and not to its slot."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.steps.sampling import Sampler, create_sampler, probabilities
from dsv41.steps.sampling import sample as sample_eagerly

sample = jax.jit(sample_eagerly)  # one compilation a batch size


def distribution(logits, temperature: float, top_p: float) -> np.ndarray:
    row = jnp.asarray([logits], jnp.float32)
    return np.asarray(probabilities(row, jnp.asarray([temperature]), jnp.asarray([top_p])))[0]


def samplers(seeds, temperature: float = 1.0, top_p: float = 1.0, counter: int = 0) -> Sampler:
    count = len(seeds)
    return create_sampler(count).replace(
        seed=jnp.asarray(seeds, jnp.uint32),
        counter=jnp.full((count,), counter, jnp.uint32),
        temperature=jnp.full((count,), temperature, jnp.float32),
        top_p=jnp.full((count,), top_p, jnp.float32),
    )


def draw(sampler: Sampler, logits) -> np.ndarray:
    batch = sampler.seed.shape[0]
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (batch, len(logits)))
    return np.asarray(sample(sampler, rows, jnp.ones((batch,), bool)).pending)


def test_temperature_scales_logits():
    logits = np.array([0.3, -1.2, 2.0, 0.0])
    expected = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    np.testing.assert_allclose(distribution(logits, 0.7, 1.0), expected, rtol=1e-5)


def test_zero_temperature_is_one_hot_on_the_first_maximum():
    np.testing.assert_array_equal(distribution([1.0, 3.0, 3.0, -2.0], 0.0, 0.5), [0, 1, 0, 0])


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1.0, [0, 1, 2, 3]),
        (0.95, [0, 1, 2, 3]),  # 0.5 + 0.25 + 0.15 = 0.9 does not reach it
        (0.8, [0, 1, 2]),  # the token that crosses the mass belongs to the set
        (0.7, [0, 1]),
        (0.3, [0]),
        (1e-6, [0]),  # never empty
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p, kept):
    p = np.array([0.5, 0.25, 0.15, 0.1])
    order = [2, 0, 3, 1]  # the set follows probabilities, not ids
    found = distribution(np.log(p[order]), 1.0, top_p)
    expected = np.array([p[i] if i in kept else 0.0 for i in order])
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-5)


def test_top_p_ties_go_to_the_lower_id():
    np.testing.assert_allclose(distribution([0.0, 0.0, 0.0, 0.0], 1.0, 0.4), [0.5, 0.5, 0, 0])


@pytest.mark.parametrize("top_p", [1.0, 0.85])
def test_draws_follow_the_distribution(top_p):
    logits, count = np.array([1.0, 0.2, -0.5, -3.0, 0.7]), 5_000
    p = distribution(logits, 1.3, top_p)
    observed = np.bincount(draw(samplers(np.arange(count), 1.3, top_p), logits), minlength=len(logits))
    assert not observed[p == 0].any()
    live = p > 0
    chi_squared = np.sum((observed[live] - count * p[live]) ** 2 / (count * p[live]))
    assert chi_squared < 23.5  # exceeded with probability 1e-4 at 4 degrees of freedom, less at fewer


def test_successive_draws_of_one_seed_follow_the_distribution():
    logits, count = np.array([0.5, -0.5, 0.0]), 5_000
    sampler = samplers(np.full(count, 7)).replace(counter=jnp.arange(count, dtype=jnp.uint32))
    observed, p = np.bincount(draw(sampler, logits), minlength=3), distribution(logits, 1.0, 1.0)
    assert np.sum((observed - count * p) ** 2 / (count * p)) < 18.5  # 1e-4 at 2 degrees of freedom


def test_a_draw_depends_on_seed_and_counter_not_on_the_slot():
    logits = np.random.default_rng(0).normal(size=50)
    seeds = np.array([5, 9, 5, 123456789])
    together = draw(samplers(seeds, counter=3), logits)
    assert together[0] == together[2]
    for row, seed in enumerate(seeds):
        assert draw(samplers([seed], counter=3), logits)[0] == together[row]
    many = draw(samplers(np.arange(64)), logits)
    assert len(set(many.tolist())) > 5
    assert (many != draw(samplers(np.arange(64), counter=1), logits)).any()


def test_greedy_and_sampled_requests_share_a_batch():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 30)), jnp.float32)
    mixed = samplers([1, 2, 3, 4]).replace(temperature=jnp.asarray([0.0, 1.0, 0.0, 2.0]))
    found = np.asarray(sample(mixed, logits, jnp.ones((4,), bool)).pending)
    np.testing.assert_array_equal(found[[0, 2]], np.argmax(np.asarray(logits), axis=1)[[0, 2]])
    alone = samplers([2]).replace(temperature=jnp.asarray([1.0]))
    assert np.asarray(sample(alone, logits[1:2], jnp.ones((1,), bool)).pending)[0] == found[1]


def test_inactive_requests_do_not_move():
    sampler = samplers([1, 2]).replace(pending=jnp.asarray([17, 18], jnp.int32))
    moved = sample(sampler, jnp.zeros((2, 9)), jnp.asarray([True, False]))
    assert np.asarray(moved.pending)[1] == 18
    np.testing.assert_array_equal(moved.counter, [1, 0])
