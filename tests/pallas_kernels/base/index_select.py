"""What the index selection promises."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import FP4_E8M0, DenseFormat
from pallas_kernels.index_select import BlockSelection, reference
from tests.pallas_kernels.base.common import OperationTests, compiled, golden, paged

F32 = DenseFormat("float32")


def case(
    fmt=FP4_E8M0, lengths=(29, 6), queries=5, heads=3, width=32, page_entries=4, capacity=32, integers=False, seed=0
) -> dict:
    """Arrays of a selection over poisoned pools; every query sees a different number of entries, some none.

    With ``integers`` scores are small integers, so that many tie and no order of summation matters.
    """
    rng = np.random.default_rng(seed)
    batch = len(lengths)

    def draw(*shape: int) -> np.ndarray:
        return rng.integers(-1, 2, shape).astype(np.float32) if integers else rng.standard_t(3, shape)

    pool, table = paged(rng, fmt, draw(batch, capacity, width).astype(np.float32), list(lengths), page_entries)
    visible = np.stack([np.sort(rng.integers(0, length + 1, queries)) for length in lengths]).astype(np.int32)
    visible[:, -1] = lengths
    return {
        "queries": jnp.asarray(draw(batch, queries, heads, width).astype(np.float32)),
        "weights": jnp.asarray(draw(batch, queries, heads).astype(np.float32)),
        "pool": pool,
        "page_table": table,
        "visible": jnp.asarray(visible),
    }


def expected(arrays: dict, fmt, top_k: int, blocks: BlockSelection | None = None):
    return compiled(reference.index_select, arrays, fmt=fmt, top_k=top_k, blocks=blocks)


class IndexSelectTests(OperationTests):
    """Attributes are for back ends that do not run everything.

    Attributes:
      sizes: sizes of the arrays where a back end has its own, as arguments of :func:`case`.
      query_dtype: dtype of the queries.
      plain: the pool's format where none is asked for; integers from -1 to 1 must be exact in it.
      block_size: of blocks that do not divide a page.
    """

    sizes: ClassVar[dict[str, int]] = {}
    query_dtype = jnp.float32
    plain = F32
    block_size = 3

    def case(self, fmt=FP4_E8M0, *args, **sizes) -> dict:
        arrays = case(fmt, *args, **{**self.sizes, **sizes})
        return arrays | {"queries": arrays["queries"].astype(self.query_dtype)}

    def check(self, arrays: dict, fmt, top_k: int, blocks: BlockSelection | None = None):
        chosen = self.run("index_select", arrays, fmt=fmt, top_k=top_k, blocks=blocks)
        wanted = expected(arrays, fmt, top_k, blocks)
        np.testing.assert_array_equal(np.asarray(chosen.indices), np.asarray(wanted.indices))
        assert chosen.indices.dtype == jnp.int32
        self.same_scores(chosen.scores, wanted.scores)
        if blocks is None:
            assert chosen.blocks is chosen.block_scores is None
        else:
            np.testing.assert_array_equal(np.asarray(chosen.blocks), np.asarray(wanted.blocks))
            self.same_scores(chosen.block_scores, wanted.block_scores)
        return chosen

    def same_scores(self, ours: jax.Array, wanted: jax.Array):
        """To the rounding of float32 sums over channels and heads."""
        ours, wanted = np.asarray(ours), np.asarray(wanted)
        assert ours.dtype == np.float32
        largest = np.abs(wanted, where=np.isfinite(wanted), out=np.zeros_like(wanted)).max()
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5 * largest)

    def check_reselect(self, arrays: dict, fmt, block_ids, block_size: int, top_k: int) -> np.ndarray:
        arrays = {**arrays, "block_ids": jnp.asarray(np.asarray(block_ids).astype(np.int32))}
        static = {"fmt": fmt, "block_size": block_size, "top_k": top_k}
        chosen, scores = self.run("index_reselect", arrays, **static)
        wanted = compiled(reference.index_reselect, arrays, **static)
        np.testing.assert_array_equal(np.asarray(chosen), np.asarray(wanted[0]))
        self.same_scores(scores, wanted[1])
        return np.asarray(chosen)

    @pytest.mark.parametrize("fmt", [FP4_E8M0, F32], ids=["fp4", "f32"])
    @pytest.mark.parametrize("top_k", [4, 40])
    def test_random(self, fmt, top_k: int):
        chosen = self.check(self.case(fmt), fmt, top_k, BlockSelection(size=4, count=3))
        visible = np.asarray(self.case(fmt)["visible"])
        np.testing.assert_array_equal((np.asarray(chosen.indices) >= 0).sum(-1), np.minimum(visible, top_k))

    @pytest.mark.parametrize("block_size", [1, 3, 8])
    def test_ties_go_to_the_lower_index(self, block_size: int):
        arrays = self.case(self.plain, integers=True, **self.sizes or {"heads": 2, "width": 3})
        self.check(arrays, self.plain, 6, BlockSelection(size=block_size, count=4))
        ids = np.random.default_rng(2).permuted(np.tile(np.arange(-2, 32 // block_size), (2, 5, 1)), axis=-1)[..., :4]
        self.check_reselect(arrays, self.plain, np.maximum(ids, -1), block_size, 6)

    def test_equal_scores_give_the_first_entries(self):
        arrays = self.case(self.plain, integers=True)
        arrays["weights"] = jnp.zeros_like(arrays["weights"]).at[:, 0].set(-0.0)
        chosen = np.asarray(self.check(arrays, self.plain, 8).indices)
        first = np.arange(8)
        np.testing.assert_array_equal(chosen, np.where(first < np.asarray(arrays["visible"])[..., None], first, -1))

    def test_bfloat16_queries_are_scored_in_float32(self):
        arrays = self.case()
        arrays["queries"] = arrays["queries"].astype(jnp.bfloat16)
        chosen = self.check(arrays, FP4_E8M0, 8, BlockSelection(4, 3))
        self.check_reselect(arrays, FP4_E8M0, chosen.blocks, 4, 8)

    def test_more_blocks_and_entries_asked_for_than_there_are(self):
        arrays = self.case(lengths=(3, 1), capacity=4)
        chosen = self.check(arrays, FP4_E8M0, 100, BlockSelection(size=self.block_size, count=50))
        entries = arrays["page_table"].shape[1] * arrays["pool"].payload.shape[1]
        assert chosen.blocks.shape == (2, 5, min(50, -(-entries // self.block_size)))
        self.check_reselect(arrays, FP4_E8M0, chosen.blocks, self.block_size, 100)

    def test_nothing_visible_chooses_nothing(self):
        arrays = self.case(lengths=(0, 0))
        arrays["queries"] = jnp.full_like(arrays["queries"], jnp.nan)
        chosen = self.check(arrays, FP4_E8M0, 4, BlockSelection(4, 3))
        np.testing.assert_array_equal(np.asarray(chosen.indices), -1)
        np.testing.assert_array_equal(np.asarray(chosen.blocks), -1)

    def test_more_visible_than_the_table_holds(self):
        entries = max(32, self.sizes.get("page_entries", 0))
        arrays = self.case(self.plain, lengths=(entries, entries), capacity=entries)
        arrays["visible"] = arrays["visible"] + 1000
        self.check(arrays, self.plain, 40, BlockSelection(4, 3))

    def test_nan_in_one_query_leaves_the_others(self):
        arrays = self.case()
        before = self.check(arrays, FP4_E8M0, 4, BlockSelection(4, 3))
        arrays["queries"] = arrays["queries"].at[0, 2].set(jnp.nan)
        arrays["weights"] = arrays["weights"].at[1, 1].set(jnp.nan)
        after = self.run("index_select", arrays, fmt=FP4_E8M0, top_k=4, blocks=BlockSelection(4, 3))
        keep = np.ones((2, 5), bool)
        keep[0, 2] = keep[1, 1] = False
        for left, right in zip(before, after, strict=True):
            np.testing.assert_array_equal(np.asarray(left)[keep], np.asarray(right)[keep])

    def test_reselect_ignores_absent_and_invisible_blocks(self):
        arrays = self.case()
        rng = np.random.default_rng(4)
        ids = np.stack([rng.permutation(12)[:5] for _ in range(10)]).reshape(2, 5, 5)
        ids[:, 1::2, 2] = -1
        ids[0, 0] = -1
        chosen = self.check_reselect(arrays, FP4_E8M0, ids, 4, 12)
        np.testing.assert_array_equal(chosen[0, 0], -1)

    def firsts(self, arrays: dict) -> jax.Array:
        """Where the visible entries of each query begin: at 0, at the newest, behind it, and between."""
        visible = np.asarray(arrays["visible"])
        first = np.random.default_rng(6).integers(0, visible + 1)
        first[0, -3:] = 0, visible[0, -2] - 1, visible[0, -1] - 1
        first[-1, -2:] = visible[-1, -2] + 3, -1
        return jnp.asarray(first.astype(np.int32))

    def test_entries_before_the_first_are_not_chosen(self):
        arrays = self.case()
        first = arrays["first"] = self.firsts(arrays)
        size = 4
        chosen = self.check(arrays, FP4_E8M0, 4, BlockSelection(size, 3))
        begin, end = np.maximum(first, 0)[..., None], np.asarray(arrays["visible"])[..., None]
        entries, blocks = np.asarray(chosen.indices), np.asarray(chosen.blocks)
        assert ((entries < 0) | ((entries >= begin) & (entries < end))).all()
        np.testing.assert_array_equal((entries >= 0).sum(-1), np.clip(end - begin, 0, 4)[..., 0])
        # Whole blocks before the first are as absent as those behind the last; the newest one leads.
        assert ((blocks < 0) | ((blocks >= begin // size) & (blocks * size < end))).all()
        np.testing.assert_array_equal(blocks[..., 0], np.where(begin < end, (end - 1) // size, -1)[..., 0])
        # Blocks may be given that lie before it.
        ids = np.tile(np.arange(8, dtype=np.int32), (2, 5, 1))
        again = self.check_reselect(arrays, FP4_E8M0, ids, size, 32)
        np.testing.assert_array_equal(np.sort(again, axis=-1)[..., -1:], np.where(begin < end, end - 1, -1))
        np.testing.assert_array_equal((again >= 0).sum(-1), np.maximum(end - begin, 0)[..., 0])

    def test_a_first_page_cut_off_is_a_pool_without_it(self):
        page = self.sizes.get("page_entries", 4)
        # In the shapes of other tests, whose programs are used again.
        arrays = self.case(lengths=(3 * page + 1, page + 2), capacity=max(32, 4 * page))
        visible, table = (np.asarray(arrays[name]) for name in ("visible", "page_table"))
        visible = np.maximum(visible, page)
        arrays["visible"] = jnp.asarray(visible)
        whole = self.check(arrays | {"first": jnp.full_like(visible, page)}, FP4_E8M0, 4, BlockSelection(4, 3))
        shifted = np.pad(table[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        arrays |= {"page_table": jnp.asarray(shifted), "visible": jnp.asarray(visible - page)}
        rest = self.check(arrays, FP4_E8M0, 4, BlockSelection(4, 3))
        for left, right, shift in ((whole.indices, rest.indices, page), (whole.blocks, rest.blocks, page // 4)):
            left, right = np.asarray(left), np.asarray(right)
            np.testing.assert_array_equal(left, np.where(right < 0, -1, right + shift))
        assert (np.asarray(whole.indices) >= page).any()

    def test_candidates_of_every_context(self):
        """Each visible entry of a chosen block is a candidate, the newest block is chosen, nothing lies beyond."""
        size, count, contexts = 8, 3, np.arange(1, 41)
        arrays = self.case(self.plain, lengths=(40,), queries=40, capacity=40)
        arrays["visible"] = jnp.asarray(contexts[None], jnp.int32)
        chosen = self.check(arrays, self.plain, 4, BlockSelection(size, count))
        candidates = self.check_reselect(arrays, self.plain, chosen.blocks, size, size * count)
        for context, blocks, entries in zip(contexts, np.asarray(chosen.blocks)[0], candidates[0], strict=True):
            real = blocks[blocks >= 0]
            assert len(set(real)) == len(real) == min(count, -(-context // size))
            assert (context - 1) // size in real
            wanted = {e for b in real for e in range(b * size, (b + 1) * size) if e < context}
            assert set(entries[entries >= 0]) == wanted
            assert np.count_nonzero(entries >= 0) == len(wanted)

    @pytest.mark.parametrize(("name", "size", "count"), [("mask_b4_k3", 4, 3), ("mask_b8_k2", 8, 2)])
    def test_blocks_are_the_references(self, name: str, size: int, count: int):
        ops = golden()
        logits = ops["candidates.logits"]
        batch, queries, entries = logits.shape
        # With unit vectors as keys a query is its own row of scores; the shift keeps them above the relu.
        rows = np.where(np.isfinite(logits), logits + 4, 0)
        keys = np.tile(np.eye(entries, dtype=np.float32), (batch, 1, 1))
        pool, table = paged(np.random.default_rng(0), F32, keys, [entries] * batch, entries)
        arrays = {
            "queries": jnp.asarray(rows[:, :, None]),
            "weights": np.ones((batch, queries, 1), np.float32),
            "pool": pool,
            "page_table": table,
            "visible": jnp.asarray(np.tile(ops["candidates.lens"], (batch, 1)), jnp.int32),
        }
        blocks = self.run("index_select", arrays, fmt=F32, top_k=1, blocks=BlockSelection(size, count)).blocks
        chosen = (np.asarray(blocks)[..., None] == np.arange(entries) // size).any(axis=2)
        np.testing.assert_array_equal(chosen & np.isfinite(logits), ops["candidates." + name] & np.isfinite(logits))
