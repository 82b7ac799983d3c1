"""Acceptance of drafts: the rule itself, exactly, and the distribution of what whole decoding loops commit."""

from __future__ import annotations

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dsv41.steps.acceptance import Rule, Verified, acceptance_probability, residual, verify_tokens
from dsv41.steps.sampling import Sampler, create_sampler, draw, probabilities, sample

VOCAB, DRAFTS = 8, 3
RULES = list(Rule)

verify = jax.jit(verify_tokens, static_argnums=0)
rule_parts = jax.jit(lambda p, q: (acceptance_probability(p, q), residual(p, q)))
distribution = jax.jit(probabilities)


def samplers(count: int, temperature=1.0, top_p=1.0, seed=0, counter=0) -> Sampler:
    """Seeds ``seed, seed + 1, …``; the other values for all rows or one a row."""

    def rows(value, dtype) -> jax.Array:
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (count,)))

    return create_sampler(count).replace(
        seed=jnp.arange(count, dtype=jnp.uint32) + jnp.uint32(seed),
        counter=rows(counter, np.uint32),
        temperature=rows(temperature, np.float32),
        top_p=rows(top_p, np.float32),
    )


# The rule


@hypothesis.given(
    hnp.arrays(np.float32, (2, VOCAB), elements=st.floats(-12, 12, width=32)),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([0.2, 0.7, 1.0]),
    st.booleans(),
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_drafting_and_correcting_gives_the_backbones_distribution(logits, temperature, top_p, nearly_equal):
    if nearly_equal:
        logits[1] = logits[0] * np.float32(1 + 2**-23)
    both = distribution(jnp.asarray(logits), jnp.full(2, temperature), jnp.full(2, top_p))
    p, q = (np.asarray(row, np.float64) for row in both)
    accept, rest = (np.asarray(part, np.float64) for part in rule_parts(both[0], both[1]))
    assert np.all((accept >= 0) & (accept <= 1))
    assert rest.sum() == pytest.approx(1, abs=1e-6)
    committed = q * accept + (1 - q @ accept) * rest
    np.testing.assert_allclose(committed, p, rtol=0, atol=1e-6)
    assert q @ accept == pytest.approx(1 - 0.5 * np.abs(p - q).sum(), abs=1e-6)


def test_equal_distributions_leave_a_residual_to_draw_from():
    p = jnp.asarray([0.5, 0.25, 0.25, 0.0])
    accept, rest = rule_parts(p, p)
    np.testing.assert_array_equal(accept, [1, 1, 1, 0])  # what cannot be drawn is never accepted
    np.testing.assert_array_equal(rest, p)


# The distribution of decoding loops: backbone and drafter are two Markov chains of random logits

BACKBONE = jnp.asarray(np.random.default_rng(1).normal(scale=1.2, size=(VOCAB, VOCAB)), jnp.float32)
DRAFTER = BACKBONE + jnp.asarray(np.random.default_rng(2).normal(scale=0.8, size=(VOCAB, VOCAB)), jnp.float32)
REQUESTS, TOKENS = 6000, 3


DEPTHS = {
    "full": lambda round_, drafts: jnp.full((REQUESTS,), DRAFTS),
    "ragged": lambda round_, drafts: (jnp.arange(REQUESTS) + round_) % (DRAFTS + 1),
    # A draft is verified if those before it are even: this looks at earlier tokens alone.
    "earlier drafts": lambda round_, drafts: 1 + leading_even(drafts[:, :-1]),
    # The choice that is not allowed: a draft is verified if it is even itself.
    "the draft itself": lambda round_, drafts: leading_even(drafts),
}


def leading_even(drafts):
    return jnp.sum(jnp.cumprod((drafts % 2 == 0).astype(jnp.int32), axis=1), axis=1)


def commit(rule: Rule, depths: str, sampler: Sampler) -> tuple[np.ndarray, np.ndarray]:
    """Decodes every request from token 0 until ``TOKENS`` are committed.

    Returns:
      those tokens ``[requests, TOKENS]``, and how many drafts each request accepted.
    """
    tokens, accepted = commit_rounds(rule, list(DEPTHS).index(depths), sampler)
    return np.asarray(tokens), np.asarray(accepted)


@functools.partial(jax.jit, static_argnums=0)
def commit_rounds(rule: Rule, depths: int, start: Sampler) -> tuple[jax.Array, jax.Array]:
    active = jnp.ones((REQUESTS,), bool)

    def draft(sampler: Sampler, i: jax.Array):
        ahead = sampler.replace(counter=sampler.counter + i)
        logits = DRAFTER[sampler.pending]
        token = draw(ahead, logits, active)
        q = probabilities(logits, sampler.temperature, sampler.top_p)
        return sampler.replace(pending=token), (token, q)

    def round_of(carry, round_: jax.Array):
        sampler, committed, accepted = carry
        _, (drafts, q) = jax.lax.scan(draft, sampler, jnp.arange(DRAFTS, dtype=jnp.uint32))
        drafts, q = drafts.T, jnp.swapaxes(q, 0, 1)
        fed = jnp.concatenate([sampler.pending[:, None], drafts], axis=1)
        depth = jax.lax.switch(depths, list(DEPTHS.values()), round_, drafts)
        verified = verify_tokens(rule, sampler, BACKBONE[fed], drafts, q, depth, active)
        at = (sampler.counter - start.counter).astype(jnp.int32)[:, None] + jnp.arange(DRAFTS + 1)
        at = jnp.where(verified.tokens >= 0, at, committed.shape[1])
        committed = committed.at[jnp.arange(REQUESTS)[:, None], at].set(verified.tokens, mode="drop")
        return (verified.sampler, committed, accepted + verified.accepted), None

    begin = (start, jnp.full((REQUESTS, TOKENS + DRAFTS), -1), jnp.zeros((REQUESTS,), jnp.int32))
    # Every round commits at least one token, so that so many rounds are enough.
    (_, committed, accepted), _ = jax.lax.scan(round_of, begin, jnp.arange(TOKENS))
    return committed[:, :TOKENS], accepted


def chi_squared_p_value(tokens: np.ndarray, temperature: float, top_p: float) -> float:
    """Of all sequences of ``TOKENS`` tokens against the backbone's chain; impossible ones must not occur."""
    step = np.asarray(
        distribution(BACKBONE, jnp.full(VOCAB, temperature), jnp.full(VOCAB, top_p)),
        np.float64,
    )
    expected = REQUESTS * np.einsum("a,ab,bc->abc", step[0], step, step)
    observed = np.zeros((VOCAB,) * TOKENS)
    np.add.at(observed, tuple(tokens.T), 1)
    assert not observed[expected == 0].any()
    few = expected < 5  # counted together, so that the statistic is χ² distributed
    expected = np.append(expected[~few], expected[few].sum())
    observed = np.append(observed[~few], observed[few].sum())
    expected, observed = expected[expected > 0], observed[expected > 0]
    statistic = np.sum((observed - expected) ** 2 / expected)
    return scipy.stats.chi2.sf(statistic, len(expected) - 1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("depths", ["full", "ragged", "earlier drafts"])
def test_committed_tokens_follow_the_backbones_distribution(rule, depths):
    for index, (temperature, top_p) in enumerate([(1.0, 1.0), (0.6, 1.0), (1.5, 0.8)]):
        tokens, accepted = commit(rule, depths, samplers(REQUESTS, temperature, top_p, seed=REQUESTS * index))
        assert accepted.sum() > 0.3 * REQUESTS  # there was something to accept
        assert chi_squared_p_value(tokens, temperature, top_p) > 1e-4


def test_a_depth_that_looks_at_the_draft_itself_would_be_found_out():
    tokens, _ = commit(Rule.REJECTION, "the draft itself", samplers(REQUESTS))
    assert chi_squared_p_value(tokens, 1.0, 1.0) < 1e-12


def test_rejection_accepts_as_often_as_the_distributions_allow():
    """The share of accepted first drafts is 1 − TV of the two distributions."""
    sampler, active = samplers(REQUESTS), jnp.ones((REQUESTS,), bool)
    logits = jnp.broadcast_to(BACKBONE[:2], (REQUESTS, 2, VOCAB))
    drafts = draw(sampler, jnp.broadcast_to(DRAFTER[0], (REQUESTS, VOCAB)), active)[:, None]
    p, q = distribution(jnp.stack([BACKBONE[0], DRAFTER[0]]), jnp.ones(2), jnp.ones(2))
    draft_probabilities = jnp.broadcast_to(q, (REQUESTS, 1, VOCAB))
    depth = jnp.ones((REQUESTS,), jnp.int32)
    accepted = np.asarray(verify(Rule.REJECTION, sampler, logits, drafts, draft_probabilities, depth, active).accepted)
    rate = 1 - 0.5 * float(jnp.abs(p - q).sum())
    assert 0.2 < rate < 0.9
    assert abs(accepted.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / REQUESTS)


def test_coupled_loops_commit_the_tokens_of_plain_sampling():
    temperature = np.resize([0.0, 0.5, 1.0, 2.0], REQUESTS)
    top_p = np.resize([1.0, 0.7, 0.4], REQUESTS)
    start = samplers(REQUESTS, temperature, top_p)
    plain, step, active = start, jax.jit(sample), jnp.ones((REQUESTS,), bool)
    expected = []
    for _ in range(TOKENS):
        plain = step(plain, BACKBONE[plain.pending], active)
        expected.append(np.asarray(plain.pending))
    for depths in DEPTHS:  # the coupled tokens are the same even where the depth looks at the draft itself
        np.testing.assert_array_equal(commit(Rule.COUPLED, depths, start)[0], np.stack(expected, axis=1))


# One step, row by row

ROWS = 12


def random_step(seed: int = 0) -> tuple[Sampler, jax.Array, jax.Array, jax.Array]:
    """Sampler, logits ``[ROWS, DRAFTS + 1, VOCAB]``, drafts and their probabilities, of several temperatures."""
    rng = np.random.default_rng(seed)
    sampler = samplers(ROWS, np.resize([0.0, 0.7, 1.5], ROWS), np.resize([1.0, 1.0, 0.8, 1.0], ROWS), seed, counter=9)
    logits = rng.normal(size=(ROWS, DRAFTS + 1, VOCAB)).astype(np.float32)
    guesses = logits[:, :-1] + rng.normal(scale=0.5, size=(ROWS, DRAFTS, VOCAB)).astype(np.float32)
    drafts, q = drafts_of(sampler, jnp.asarray(guesses))
    return sampler.replace(pending=jnp.arange(ROWS, dtype=jnp.int32)), jnp.asarray(logits), drafts, q


@jax.jit
def drafts_of(sampler: Sampler, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws from ``[ROWS, DRAFTS, VOCAB]`` as a drafter does."""

    def at(i: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = draw(sampler.replace(counter=sampler.counter + i), logits, jnp.ones((ROWS,), bool))
        return token, probabilities(logits, sampler.temperature, sampler.top_p)

    return jax.vmap(at, in_axes=(0, 1), out_axes=1)(jnp.arange(DRAFTS, dtype=jnp.uint32), logits)


def take(verified: Verified) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return tuple(
        np.asarray(x) for x in (verified.tokens, verified.accepted, verified.sampler.pending, verified.sampler.counter)
    )


@pytest.mark.parametrize("rule", RULES)
def test_a_step_advances_by_its_accepted_drafts_and_one(rule):
    depth = np.resize(np.arange(DRAFTS + 1), ROWS)
    seen = set()
    for seed in range(20):
        sampler, logits, drafts, q = random_step(seed)
        args = (logits, drafts, q, jnp.asarray(depth), jnp.ones((ROWS,), bool))
        tokens, accepted, pending, counter = take(verify(rule, sampler, *args))
        assert np.all((accepted >= 0) & (accepted <= depth))
        np.testing.assert_array_equal(counter, 9 + accepted + 1)
        for row, count in enumerate(accepted):
            np.testing.assert_array_equal(tokens[row, :count], drafts[row, :count])
            assert tokens[row, count] == pending[row]
            assert 0 <= pending[row] < VOCAB
            assert np.all(tokens[row, count + 1 :] == -1)
        seen |= set(zip(depth.tolist(), accepted.tolist(), strict=True))
    assert seen == {(d, a) for d in range(DRAFTS + 1) for a in range(d + 1)}


def test_coupled_steps_without_drafts_are_plain_sampling():
    sampler, logits, drafts, _ = random_step()
    active = jnp.ones((ROWS,), bool)
    plain = jax.jit(sample)(sampler, logits[:, 0], active)
    for width in (1, DRAFTS + 1):  # a step compiled for no drafts, and a wider one that checks none
        depth = jnp.zeros((ROWS,), jnp.int32)
        found = verify(Rule.COUPLED, sampler, logits[:, :width], drafts[:, : width - 1], None, depth, active)
        jax.tree.map(np.testing.assert_array_equal, found.sampler, plain)


def test_rejection_steps_may_be_compiled_without_drafts():
    sampler, logits, drafts, q = random_step()
    depth, active = jnp.zeros((ROWS,), jnp.int32), jnp.ones((ROWS,), bool)
    narrow = verify(Rule.REJECTION, sampler, logits[:, :1], drafts[:, :0], q[:, :0], depth, active)
    wide = verify(Rule.REJECTION, sampler, logits, drafts, q, depth, active)
    jax.tree.map(np.testing.assert_array_equal, narrow.sampler, wide.sampler)


@pytest.mark.parametrize("rule", RULES)
def test_what_lies_beyond_the_depth_and_in_inactive_rows_changes_nothing(rule):
    sampler, logits, drafts, q = random_step()
    depth = np.resize([2, 0, 3, 1, 2], ROWS)
    active = np.arange(ROWS) % 4 != 3
    clean = verify(rule, sampler, logits, drafts, q, jnp.asarray(depth), jnp.asarray(active))
    beyond = ~active[:, None] | (np.arange(DRAFTS) >= depth[:, None])
    rows_beyond = ~active[:, None] | (np.arange(DRAFTS + 1) > depth[:, None])
    poisoned = verify(
        rule,
        sampler,
        jnp.where(rows_beyond[..., None], jnp.nan, logits),
        jnp.where(beyond, -1, drafts),
        jnp.where(beyond[..., None], jnp.nan, q),
        jnp.asarray(depth),
        jnp.asarray(active),
    )
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    tokens, accepted, pending, counter = take(clean)
    assert np.all(tokens[~active] == -1)
    assert not accepted[~active].any()
    np.testing.assert_array_equal(pending[~active], np.arange(ROWS)[~active])
    assert np.all(counter[~active] == 9)


@pytest.mark.parametrize("rule", RULES)
def test_a_request_does_not_depend_on_its_row_or_neighbours(rule):
    sampler, logits, drafts, q = random_step()
    depth, active = jnp.full((ROWS,), DRAFTS), jnp.ones((ROWS,), bool)
    tokens, accepted, pending, _ = take(verify(rule, sampler, logits, drafts, q, depth, active))
    order = np.random.default_rng(3).permutation(ROWS)
    moved = jax.tree.map(lambda leaf: leaf[order], (sampler, logits, drafts, q))
    others = jnp.asarray(order % 2 == 0)  # half of the neighbours are gone
    found = take(verify(rule, *moved, depth, others))
    live = np.asarray(others)
    np.testing.assert_array_equal(found[0][live], tokens[order][live])
    np.testing.assert_array_equal(found[1][live], accepted[order][live])
    np.testing.assert_array_equal(found[2][live], pending[order][live])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("neighbour", [0.0, 1.0])  # a batch without any draw, and one with draws
def test_greedy_requests_commit_the_first_maxima(rule, neighbour):
    logits = np.zeros((2, DRAFTS + 1, VOCAB), np.float32)
    for i, best in enumerate([(4, 6), (1, 2), (0, 7), (3, 5)]):  # ties, won by the lower id
        logits[:, i, best] = 5.0
    sampler = samplers(2, [0.0, neighbour])
    depth, active = jnp.asarray([DRAFTS, DRAFTS]), jnp.ones((2,), bool)
    for drafts, count in (([4, 1, 0], 3), ([4, 2, 0], 1), ([6, 1, 0], 0), ([4, 1, 7], 2)):
        q = np.array(jax.nn.one_hot(jnp.asarray([drafts, drafts]), VOCAB))
        q[0] = np.resize([7.0, -1.0], VOCAB)  # not read at temperature 0
        found = verify(rule, sampler, jnp.asarray(logits), jnp.asarray([drafts] * 2), q, depth, active)
        assert found.accepted[0] == count
        np.testing.assert_array_equal(found.tokens[0], [*[4, 1, 0, 3][: count + 1], *[-1] * (DRAFTS - count)])


def test_rejection_needs_the_draft_probabilities():
    sampler, logits, drafts, _ = random_step()
    with pytest.raises(ValueError, match="draft_probabilities"):
        verify(Rule.REJECTION, sampler, logits, drafts, None, jnp.zeros((ROWS,), jnp.int32), jnp.ones((ROWS,), bool))


@pytest.mark.parametrize("rule", RULES)
def test_greedy_batches_compute_nothing_over_the_vocabulary_but_the_maximum(rule):
    """Softmax, random numbers and sorting lie in a branch that only sampling requests take."""
    sampler, logits, drafts, q = random_step()
    depth, active = jnp.full((ROWS,), DRAFTS), jnp.ones((ROWS,), bool)
    jaxpr = jax.make_jaxpr(functools.partial(verify_tokens, rule))(sampler, logits, drafts, q, depth, active)
    outside = {equation.primitive.name for equation in jaxpr.eqns}
    assert "cond" in outside
    assert not outside & {"exp", "sort", "cumsum", "random_bits", "random_wrap", "log", "div"}
    (branches,) = [equation.params["branches"] for equation in jaxpr.eqns if equation.primitive.name == "cond"]
    texts = sorted((str(branch) for branch in branches), key=len)
    assert "exp" not in texts[0]
    assert "exp" in texts[1]  # the names above are those that the sampling branch uses
