"""What the exact top-k promises."""

from __future__ import annotations

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from tests.pallas_kernels.base.common import OperationTests


def stable_top_k(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """By Python's sort of (−score, index)."""
    values = np.full((*scores.shape[:-1], k), -np.inf, np.float32)
    indices = np.full((*scores.shape[:-1], k), -1, np.int32)
    for row in np.ndindex(scores.shape[:-1]):
        order = sorted(range(scores.shape[-1]), key=lambda i: (-float(scores[row][i]), i))[:k]
        values[(*row, slice(len(order)))] = scores[row][order]
        indices[(*row, slice(len(order)))] = order
    return values, indices


class TopKTests(OperationTests):
    def check(self, scores: np.ndarray, k: int):
        top_k = jax.jit(backend.implementation("top_k", self.backend), static_argnums=1)
        values, indices = top_k(jnp.asarray(scores), k)
        expected_values, expected_indices = stable_top_k(scores, k)
        np.testing.assert_array_equal(np.asarray(indices), expected_indices)
        np.testing.assert_array_equal(np.asarray(values), expected_values)
        assert indices.dtype == jnp.int32

    @pytest.mark.parametrize("k", [1, 7, 33])
    @hypothesis.given(
        hnp.arrays(np.float32, (3, 20), elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, -np.inf, np.inf, 3e38, 1e-30]))
    )
    @hypothesis.settings(
        max_examples=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.differing_executors]
    )
    def test_ties_go_to_the_lower_index(self, k: int, scores: np.ndarray):
        self.check(scores, k)

    @pytest.mark.parametrize("shape", [(1, 1), (2, 5000), (2, 3, 257), (130,)])
    def test_random_and_equal_rows(self, shape: tuple[int, ...]):
        rng = np.random.default_rng(1)
        self.check(rng.standard_t(1.5, shape).astype(np.float32), 64)
        self.check(np.full(shape, 2.5, np.float32), 64)
        self.check(rng.integers(-2, 3, shape).astype(np.float32), 64)
