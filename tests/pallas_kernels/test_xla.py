"""The XLA back end: every operation's promises, and what tiling must and must not change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tiling
from pallas_kernels.block_linear import block_linear
from pallas_kernels.expert_matmul import xla as expert_xla
from pallas_kernels.formats import FP4_E4M3, FP4_E8M0, FP8_E8M0, DenseFormat
from pallas_kernels.index_select import BlockSelection
from pallas_kernels.index_select import xla as index_xla
from pallas_kernels.paged_memory import xla as paged_xla
from pallas_kernels.sparse_attention import xla as attention_xla
from tests.pallas_kernels.base import index_select, sparse_attention
from tests.pallas_kernels.base.block_linear import BlockLinearTests
from tests.pallas_kernels.base.block_linear import case as linear_case
from tests.pallas_kernels.base.expert_matmul import ExpertMatmulTests, case
from tests.pallas_kernels.base.index_select import IndexSelectTests
from tests.pallas_kernels.base.paged_memory import PagedMemoryTests
from tests.pallas_kernels.base.sparse_attention import SparseAttentionTests
from tests.pallas_kernels.base.top_k import TopKTests

F32 = DenseFormat("float32")
# One query and one page at a time, and a few of each.
BUDGETS = [1, 4000]


class TestPagedMemory(PagedMemoryTests):
    backend = "xla"

    @pytest.mark.parametrize(
        "fmt",
        [
            pytest.param(FP4_E4M3, id="fp4_e4m3"),
            pytest.param(FP8_E8M0, id="fp8_e8m0"),
            pytest.param(FP4_E8M0, id="fp4_e8m0"),
            pytest.param(F32, id="f32"),
        ],
    )
    def test_append_to_a_donated_pool_is_in_place(self, fmt):
        pool = fmt.zeros((64, 64), 128)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(pool))
        append = jax.jit(paged_xla.append, static_argnums=1, donate_argnums=0)
        table, one = jnp.zeros((1, 4), jnp.int32), jnp.ones(1, jnp.int32)
        memory = append.lower(pool, fmt, table, one, one, jnp.ones((1, 2, 128))).compile().memory_analysis()
        assert memory.alias_size_in_bytes == size
        assert memory.temp_size_in_bytes < size / 20


class TestTopK(TopKTests):
    backend = "xla"


class TestIndexSelect(IndexSelectTests):
    backend = "xla"

    @pytest.mark.parametrize(
        ("budget", "lengths"), [(BUDGETS[0], (29, 6)), (BUDGETS[1], (29, 6)), (BUDGETS[0], (9, 0))]
    )
    def test_tiles_do_not_show(self, monkeypatch, budget: int, lengths: tuple[int, int]):
        monkeypatch.setattr(tiling, "TEMPORARY_BYTES", budget)
        arrays = index_select.case(F32, lengths, queries=7, page_entries=3, capacity=33, integers=True)
        chosen = self.check(arrays, F32, 8, BlockSelection(size=4, count=3))
        self.check_reselect(arrays, F32, chosen.blocks, 4, 8)
        # Where every query begins late, the first tiles of keys are passed over.
        for first in (arrays["visible"] - 2, jnp.maximum(arrays["visible"] - 9, 7)):
            self.check(arrays | {"first": first}, F32, 8, BlockSelection(size=4, count=3))
            self.check_reselect(arrays | {"first": first}, F32, chosen.blocks, 4, 8)

    def test_one_tile_has_no_loop(self):
        arrays = index_select.case()
        ids = jnp.zeros((2, 5, 3), jnp.int32)

        def both(arrays):
            select = index_xla.index_select(**arrays, fmt=FP4_E8M0, top_k=4, blocks=BlockSelection(4, 3))
            return select, index_xla.index_reselect(**arrays, fmt=FP4_E8M0, block_ids=ids, block_size=4, top_k=4)

        text = str(jax.make_jaxpr(both)(arrays))
        assert "while" not in text
        assert "scan" not in text

    def test_temporary_memory_is_bounded(self, monkeypatch):
        budget = 2**18
        monkeypatch.setattr(tiling, "TEMPORARY_BYTES", budget)
        queries, heads, capacity = 128, 8, 2048
        pool = FP4_E8M0.zeros((capacity // 64, 64), 32)
        table = jnp.arange(capacity // 64, dtype=jnp.int32)[None]
        arrays = (jnp.ones((1, queries, heads, 32)), jnp.ones((1, queries, heads)), pool)
        visible = jnp.full((1, queries), capacity, jnp.int32)
        ids = jnp.tile(jnp.arange(64, dtype=jnp.int32), (1, queries, 1))

        def select(queries, weights, pool):
            return index_xla.index_select(queries, weights, pool, FP4_E8M0, table, visible, 16, BlockSelection(8, 64))

        def reselect(queries, weights, pool):
            return index_xla.index_reselect(queries, weights, pool, FP4_E8M0, table, visible, ids, 8, 16)

        for function in (select, reselect):
            memory = jax.jit(function).lower(*arrays).compile().memory_analysis()
            # All heads' scores would be 8 MiB; a tile has a handful of buffers within the budget.
            assert memory.temp_size_in_bytes < 8 * budget


class TestSparseAttention(SparseAttentionTests):
    backend = "xla"

    @pytest.mark.parametrize("budget", BUDGETS)
    def test_tiles_do_not_show(self, monkeypatch, budget: int):
        monkeypatch.setattr(tiling, "TEMPORARY_BYTES", budget)
        self.check(sparse_attention.case(FP8_E8M0, FP4_E4M3), FP8_E8M0, FP4_E4M3)
        self.check(sparse_attention.case() | {"pool": None, "page_table": None, "indices": None})
        self.test_every_query_has_its_reach(False)
        self.test_the_same_reach_for_all_is_a_smaller_window()

    def test_tiled_gradients(self, monkeypatch):
        monkeypatch.setattr(tiling, "TEMPORARY_BYTES", 4000)
        self.test_gradients_are_the_references_and_finite_beside_poison()
        self.test_gradients_stay_in_reach()

    def test_one_tile_has_no_loop(self):
        static = {"local_fmt": F32, "pool_fmt": F32, "window": sparse_attention.WINDOW, "scale": 1.0}
        arrays = sparse_attention.case()
        run = lambda a: attention_xla.sparse_attention(**a, **static, probability_dtype=jnp.float32)  # noqa: E731
        text = str(jax.make_jaxpr(run)(arrays))
        assert "while" not in text
        assert "scan" not in text

    def test_temporary_memory_is_bounded_forward_and_backward(self, monkeypatch):
        budget = 2**18
        monkeypatch.setattr(tiling, "TEMPORARY_BYTES", budget)
        queries, chosen, width = 256, 32, 64
        static = {"local_fmt": F32, "pool_fmt": F32, "window": 8, "scale": 1.0, "probability_dtype": jnp.float32}
        pool, table = F32.zeros((4, 16), width), jnp.arange(4, dtype=jnp.int32)[None]
        local, valid = F32.zeros((1, 8 + queries), width), jnp.ones((1, 8 + queries), bool)
        indices = jnp.zeros((1, queries, chosen), jnp.int32)

        def loss(q, local, pool):
            sink = jnp.zeros(2)
            out = attention_xla.sparse_attention(
                q, local, pool=pool, page_table=table, indices=indices, local_valid=valid, sink=sink, **static
            )
            return jnp.sum(out**2)

        q = jnp.ones((1, queries, 2, width))
        for function in (loss, jax.grad(loss, argnums=(0, 1, 2))):
            memory = jax.jit(function).lower(q, local, pool).compile().memory_analysis()
            # The gathered entries of all queries would be 2 MiB, and the backward pass would keep them.
            assert memory.temp_size_in_bytes < 6 * budget


class TestExpertMatmul(ExpertMatmulTests):
    backend = "xla"

    @pytest.mark.parametrize("rows", [1, 40, 200])
    def test_blocked_equals_dense(self, monkeypatch, rows: int):
        arrays = case(5, rows=max(rows, 5))
        arrays |= {name: arrays[name][:rows] for name in ("x", "expert_ids", "expert_weights")}
        arrays["x"] = jnp.nan_to_num(arrays["x"])
        dense = self.run("expert_matmul", arrays, limit=1.5, activation_fmt=F32)
        monkeypatch.setattr(tiling, "TEMPORARY_BYTES", 0)
        blocked = self.run("expert_matmul", arrays, limit=1.5, activation_fmt=F32)
        np.testing.assert_allclose(np.asarray(blocked), np.asarray(dense), rtol=1e-5, atol=1e-5)

    def test_experts_are_never_decoded_together(self):
        experts, hidden, inner = 64, 128, 128
        arrays = case(experts, rows=64, k=2, hidden=hidden, inner=inner, packed=True)
        run = jax.jit(expert_xla.expert_matmul, static_argnames=("limit", "activation_fmt"))
        memory = run.lower(**arrays, limit=1.5, activation_fmt=FP8_E8M0).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 8 * hidden * inner * 4


class TestBlockLinear(BlockLinearTests):
    backend = "xla"

    def test_an_input_that_does_not_fit_is_refused(self):
        with pytest.raises(ValueError, match=r"x \(2, 3, 96\) in 2 groups does not fit a weight \(64, 96\)"):
            block_linear(**linear_case(), activation_fmt=FP8_E8M0, groups=2)
