"""The top-k kernels for GPUs, interpreted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.top_k import gpu
from tests.pallas_kernels.base.top_k import TopKTests, stable_top_k


@pytest.fixture(scope="class")
def interpreted():
    with backend.interpret():
        yield


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU in this process")
class TestTopK(TopKTests):
    backend = "gpu"

    @pytest.mark.parametrize("k", [1, 512, 2048, 5000])
    def test_long_rows(self, k: int):
        rng = np.random.default_rng(6)
        self.check(rng.standard_t(1.5, (2, 300_001)).astype(np.float32), k)
        self.check(rng.integers(-2, 3, (2, 300_001)).astype(np.float32), k)


@pytest.mark.usefixtures("interpreted")
class TestTopKInterpreted(TopKTests):
    backend = "gpu"

    def test_tree_of_maxima(self, monkeypatch):
        """Rows larger than a program holds: several levels, the last group of each cut short."""
        monkeypatch.setattr(gpu, "_SELECTED_FROM", 32)
        rng = np.random.default_rng(3)
        self.check(rng.integers(-3, 4, (4, 777)).astype(np.float32), 5)
        self.check(np.where(np.arange(777) < 775, -np.inf, 1.0).astype(np.float32)[None], 3)

    def test_sorted_runs_are_merged(self, monkeypatch):
        monkeypatch.setattr(gpu, "_RUN", 16)
        monkeypatch.setattr(gpu, "_OWN", 8)
        rng = np.random.default_rng(4)
        self.check(rng.integers(-9, 9, (3, 200)).astype(np.float32), 50)

    @pytest.mark.parametrize("given", [False, True])
    def test_rows_of_different_lengths(self, monkeypatch, given: bool):
        """What lies beyond a row's length is not read, in given maxima neither; one element can be pinned."""
        monkeypatch.setattr(gpu, "_SELECTED_FROM", 64)
        rng = np.random.default_rng(5)
        n, k, group = 300, 6, 4
        lengths, pinned = np.array([300, 0, 3, 151], np.int32), np.array([-1, -1, 1, 77], np.int32)
        scores = rng.integers(-4, 5, (4, n)).astype(np.float32)
        inside = np.arange(n) < lengths[:, None]
        maxima = np.where(inside, scores, -np.inf).reshape(4, -1, group).max(-1)
        # Behind a row's end lies what would be chosen first.
        scores = np.where(inside, scores, np.inf)
        maxima = np.where(np.arange(n // group) * group < lengths[:, None], maxima, np.inf)
        best = (jnp.asarray(maxima), group) if given else None
        values, indices = jax.jit(lambda *a: gpu.select_rows(*a[:2], k, best, a[2]))(scores, lengths, pinned)
        for row, length in enumerate(lengths):
            expected = scores[row : row + 1, :length].copy()
            if pinned[row] >= 0:
                expected[0, pinned[row]] = np.inf
            expected_values, expected_indices = stable_top_k(expected, k)
            np.testing.assert_array_equal(np.asarray(indices)[row], expected_indices[0])
            np.testing.assert_array_equal(np.asarray(values)[row], expected_values[0])


def test_arguments_that_are_for_xla():
    scores = jax.ShapeDtypeStruct((4, 100000), jnp.float32)
    assert gpu.unsupported(scores, 4096) is None
    assert "bfloat16" in gpu.unsupported(jax.ShapeDtypeStruct((4, 8), jnp.bfloat16), 4)
    assert "k is 10000" in gpu.unsupported(scores, 10000)
