"""The sparse attention's TPU kernel in interpret mode."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pallas_kernels import backend
from pallas_kernels.formats import FP4_E4M3, FP8_E8M0
from pallas_kernels.sparse_attention import tpu
from pallas_kernels.tpu import pool
from tests.pallas_kernels.base.sparse_attention import SparseAttentionTests


@pytest.fixture(autouse=True, scope="module")
def _interpreted():
    # Unrolled loops only take longer to compile here.
    with pytest.MonkeyPatch.context() as patch, backend.interpret():
        patch.setattr(pool, "_UNROLL", 1)
        yield


class TestSparseAttention(SparseAttentionTests):
    backend = "tpu"
    # A packed entry has at least one word of scales, and a page is whole words.
    width = 64
    page_entries = 8

    @pytest.mark.parametrize("rotated", [False, True])
    def test_tiles_of_queries_do_not_show(self, monkeypatch, rotated: bool):
        """Two programs for each request, the second with a query that pads it."""
        monkeypatch.setattr(tpu, "_QUERIES", 4)
        arrays = self.case(FP8_E8M0, FP4_E4M3, queries=7)
        if rotated:
            arrays["rotation"] = jnp.zeros(2, jnp.int32)
        self.check(arrays, FP8_E8M0, FP4_E4M3)
