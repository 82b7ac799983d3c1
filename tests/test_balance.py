"""The rule of the routers' biases and the balance loss within documents, against plain loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.training.balance import sequence_balance, update_biases

ROWS, LENGTH, EXPERTS, CHOSEN = 3, 12, 5, 2
ALIGNMENT = 2


# Biases

ROUTERS = ("encoder/groups_0/runs_0/ffn/gate", "dspark/stages_0/ffn/gate")


def router_params() -> dict:
    """A router of two layers and one of a single layer."""
    stacked = {"weight": jnp.ones((2, 4, 3)), "bias": jnp.full((2, 4), 0.5), "bias_vl": jnp.full((2, 4), -0.5)}
    single = jax.tree.map(lambda leaf: leaf[0], stacked)
    return {
        "encoder": {"groups_0": {"runs_0": {"ffn": {"gate": stacked}}}},
        "dspark": {"stages_0": {"ffn": {"gate": single}}},
    }


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_biases_move_toward_balance_by_modality(dtype: jnp.dtype):
    text = jnp.array([[9, 1, 5, 5], [0, 0, 0, 0]], dtype)
    image = jnp.array([[0, 0, 0, 0], [1, 0, 0, 0]], dtype)
    params = router_params()
    got = jax.jit(update_biases)(params, {ROUTERS[0]: text}, {ROUTERS[0]: image}, 0.25)
    gate = got["encoder"]["groups_0"]["runs_0"]["ffn"]["gate"]
    np.testing.assert_array_equal(gate["bias"], [[0.25, 0.75, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]])
    np.testing.assert_array_equal(gate["bias_vl"], [[-0.5, -0.5, -0.5, -0.5], [-0.75, -0.25, -0.25, -0.25]])
    np.testing.assert_array_equal(gate["weight"], jnp.ones((2, 4, 3)))
    jax.tree.map(np.testing.assert_array_equal, got["dspark"], params["dspark"])


@pytest.mark.parametrize("experts", [3, 6, 7, 49, 384])
def test_equal_loads_move_nothing(experts: int):
    """Where 1 / experts is no float, a mean would not equal its terms."""
    params = {"gate": {"bias": jnp.zeros(experts), "bias_vl": jnp.zeros(experts)}}
    got = jax.jit(update_biases)(params, {"gate": jnp.full(experts, 3331)}, {})
    assert not np.any(got["gate"]["bias"])
    uneven = jnp.full(experts, 3331).at[1].add(1)
    got = jax.jit(update_biases)(params, {"gate": uneven}, {})["gate"]["bias"]
    np.testing.assert_allclose(got, np.where(np.arange(experts) == 1, -0.001, 0.001), rtol=1e-6)


def test_loads_of_no_router_are_named():
    with pytest.raises(ValueError, match="encoder/ffn/gate: no router of this path has a bias"):
        update_biases(router_params(), {"encoder/ffn/gate": jnp.zeros((2, 4))}, {})
    with pytest.raises(ValueError, match=rf"{ROUTERS[1]}: loads of shape \(2, 4\) for a bias_vl of shape \(4,\)"):
        update_biases(router_params(), {}, {ROUTERS[1]: jnp.zeros((2, 4))})


# Loss


@st.composite
def packings(draw) -> np.ndarray:
    """Documents of any lengths on aligned columns, padding between and behind: int32 [ROWS, LENGTH]."""
    documents = np.full((ROWS, LENGTH), -1, np.int32)
    for row in documents:
        column = 0
        while column < LENGTH:
            length = draw(st.integers(0, LENGTH - column))
            row[column : column + length] = column
            column += max(-(-length // ALIGNMENT), 1) * ALIGNMENT
    return documents


def routing(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores = np.sqrt(np.log1p(np.exp(2 * rng.standard_normal((ROWS, LENGTH, EXPERTS))))).astype(np.float32)
    return scores, np.argsort(rng.random(scores.shape), axis=-1)[..., :CHOSEN].astype(np.int32)


def plain_balance(scores: np.ndarray, chosen: np.ndarray, documents: np.ndarray) -> tuple[float, int, np.ndarray]:
    """Total, tokens, and the total's gradient, one document after the other in float64."""
    total, tokens, gradient = 0.0, 0, np.zeros(scores.shape)
    for r in range(len(documents)):
        for start in sorted(set(documents[r].tolist()) - {-1}):
            at = [t for t in range(documents.shape[1]) if documents[r, t] == start]
            f, p = np.zeros(EXPERTS), np.zeros(EXPERTS)
            for t in at:
                f[chosen[r, t]] += EXPERTS / (CHOSEN * len(at))
                p += scores[r, t].astype(np.float64) / scores[r, t].sum(dtype=np.float64) / len(at)
            for t in at:
                s = scores[r, t].astype(np.float64)
                gradient[r, t] = (f - np.sum(f * s) / s.sum()) / s.sum()
            total, tokens = total + len(at) * np.sum(f * p), tokens + len(at)
    return total, tokens, gradient


@jax.jit
def balance(scores: jax.Array, chosen: jax.Array, documents: jax.Array):
    def total(scores: jax.Array):
        result = sequence_balance(scores, chosen, documents)
        return result.total, result.tokens

    return jax.value_and_grad(total, has_aux=True)(scores)


@given(packings(), st.integers(0, 2**16))
@settings(max_examples=50, deadline=None)
def test_balance_of_packed_documents(documents: np.ndarray, seed: int):
    scores, chosen = routing(seed)
    want, want_tokens, want_gradient = plain_balance(scores, chosen, documents)
    padding = documents < 0
    scores[padding] = np.nan
    chosen[padding] = np.random.default_rng(seed).choice([-1, EXPERTS, 2**31 - 1, 0], chosen[padding].shape)
    (total, tokens), gradient = balance(scores, chosen, documents)
    np.testing.assert_allclose(total, want, rtol=1e-5)
    assert tokens == want_tokens
    np.testing.assert_allclose(gradient, want_gradient, rtol=1e-4, atol=1e-6)
    assert not np.any(np.asarray(gradient)[padding])


@given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=ROWS), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_balance_does_not_depend_on_packing(lengths: list[int], random):
    """Documents in rows of their own, and in other rows, at other columns, over two micro-batches."""
    scores, chosen = routing(random.randint(0, 2**16))

    def packed(places: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        s, c, d = np.full_like(scores, np.nan), np.zeros_like(chosen), np.full((ROWS, LENGTH), -1, np.int32)
        for source, (row, column) in enumerate(places):
            if row < 0:
                continue
            inside = slice(column, column + lengths[source])
            s[row, inside], c[row, inside] = scores[source, : lengths[source]], chosen[source, : lengths[source]]
            d[row, inside] = column
        return s, c, d

    (together, tokens), _ = balance(*packed([(i, 0) for i in range(len(lengths))]))
    rows = random.sample(range(ROWS), len(lengths))
    elsewhere = [(row, random.randint(0, LENGTH - n)) for row, n in zip(rows, lengths, strict=True)]
    first = [place if i % 2 else (-1, 0) for i, place in enumerate(elsewhere)]
    second = [(-1, 0) if i % 2 else place for i, place in enumerate(elsewhere)]
    parts = [balance(*packed(places))[0] for places in (first, second)]
    np.testing.assert_allclose(sum(total for total, _ in parts), together, rtol=1e-5)
    assert sum(count for _, count in parts) == tokens == sum(lengths)


def test_even_use_of_the_experts_has_loss_one():
    tokens = jnp.arange(EXPERTS)
    chosen = jnp.stack([tokens, (tokens + 1) % EXPERTS], axis=-1)[None]
    even = sequence_balance(jnp.ones((1, EXPERTS, EXPERTS)), chosen, jnp.zeros((1, EXPERTS), jnp.int32))
    np.testing.assert_allclose(even.total / even.tokens, 1.0, rtol=1e-6)
    one = jnp.zeros((1, EXPERTS, EXPERTS)).at[..., 3].set(1.0)
    worst = sequence_balance(one, jnp.full((1, EXPERTS, 1), 3), jnp.zeros((1, EXPERTS), jnp.int32))
    np.testing.assert_allclose(worst.total / worst.tokens, EXPERTS, rtol=1e-6)
