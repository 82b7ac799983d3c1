"""The index selection's kernels for GPUs: a few promises interpreted anywhere, all of them on a GPU."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend, tiling
from pallas_kernels.formats import FP4_E8M0, DenseFormat
from pallas_kernels.index_select import BlockSelection, gpu, gpu_lanes, gpu_mosaic, gpu_triton
from pallas_kernels.top_k import gpu as top_k_gpu
from tests.pallas_kernels.base.index_select import IndexSelectTests, case


@pytest.fixture(scope="class")
def interpreted():
    with backend.interpret():
        yield


class _Tests(IndexSelectTests):
    backend = "gpu"
    sizes: ClassVar[dict[str, int]] = {"heads": 16}
    query_dtype = jnp.bfloat16
    plain = FP4_E8M0
    block_size = 2
    # Needs float32 queries, which are for XLA; the other tests compare blocks with the same reference.
    test_blocks_are_the_references = None
    # All of these queries are bfloat16.
    test_bfloat16_queries_are_scored_in_float32 = None

    @pytest.mark.parametrize("top_k", [4, 40])
    def test_random(self, top_k: int):
        super().test_random(FP4_E8M0, top_k)

    @pytest.mark.parametrize("block_size", [1, 8])
    def test_ties_go_to_the_lower_index(self, block_size: int):
        super().test_ties_go_to_the_lower_index(block_size)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU in this process")
class TestIndexSelect(_Tests):
    """On a GPU; compiling all of this for the interpreter takes a minute."""


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU in this process")
class TestOfficialWidths(_Tests):
    """The Mosaic kernel, which has no interpreter."""

    sizes: ClassVar[dict[str, int]] = {"heads": 32, "width": 128, "page_entries": 64}

    @pytest.mark.parametrize("heads", [32, 64])
    @pytest.mark.parametrize("queries", [1, 2, 3, 5, 23])
    def test_tiles_do_not_show(self, queries: int, heads: int):
        """Several tiles of keys, products of several queries, blocks of queries; pages that are not there."""
        sizes = {"lengths": (1500, 70, 0), "queries": queries, "capacity": 1536, "page_entries": 128, "heads": heads}
        arrays = self.case(FP4_E8M0, integers=True, **sizes)
        arrays["page_table"] = arrays["page_table"].at[0, 3].set(-1)
        chosen = self.check(arrays, FP4_E8M0, 300, BlockSelection(8, 60))
        self.check_reselect(arrays, FP4_E8M0, chosen.blocks, 8, 300)
        ids = np.random.default_rng(1).permuted(np.tile(np.arange(-3, 96), (3, queries, 1)), axis=-1)[..., :35]
        self.check_reselect(arrays, FP4_E8M0, np.maximum(ids, -1), 16, 300)


@pytest.mark.usefixtures("interpreted")
class TestIndexSelectInterpreted(_Tests):
    # Left to the GPU: each of these is a compilation, and what remains takes the same paths.
    test_random = None
    test_candidates_of_every_context = None
    test_more_visible_than_the_table_holds = None
    test_equal_scores_give_the_first_entries = None
    test_more_blocks_and_entries_asked_for_than_there_are = None
    test_nothing_visible_chooses_nothing = None

    @pytest.mark.parametrize("block_size", [8])
    def test_ties_go_to_the_lower_index(self, block_size: int):
        super().test_ties_go_to_the_lower_index(block_size)

    def test_tiles_do_not_show(self, monkeypatch):
        """Several tiles of queries, of keys and of a level of maxima."""
        monkeypatch.setattr(tiling, "TEMPORARY_BYTES", 4000)
        monkeypatch.setattr(gpu_triton, "KEYS", 16)
        monkeypatch.setattr(gpu_triton, "_TILES", 2)
        monkeypatch.setattr(top_k_gpu, "_SELECTED_FROM", 32)
        arrays = self.case(lengths=(150, 7), queries=8, page_entries=3, capacity=159, integers=True)
        self.check(arrays, FP4_E8M0, 4, BlockSelection(size=8, count=3))


def test_arguments_that_are_for_xla():
    arrays = case(heads=16)
    blocks = BlockSelection(8, 4)

    def reason(fmt=FP4_E8M0, blocks=blocks, dtype=jnp.bfloat16, heads=16) -> str | None:
        changed = arrays | {"queries": jnp.zeros((2, 5, heads, 32), dtype)}
        return gpu.index_select_unsupported(**changed, fmt=fmt, top_k=8, blocks=blocks)

    assert reason() is None
    assert "float32" in reason(dtype=jnp.float32)
    assert "DenseFormat" in reason(fmt=DenseFormat("bfloat16"))
    assert "block size 3" in reason(blocks=BlockSelection(3, 4))
    assert "3 heads" in reason(heads=3)
    ids = jnp.zeros((2, 5, 3), jnp.int32)
    changed = arrays | {"queries": arrays["queries"].astype(jnp.bfloat16), "block_ids": ids, "fmt": FP4_E8M0}
    assert gpu.index_reselect_unsupported(**changed, block_size=8, top_k=8) is None
    assert "block size 6" in gpu.index_reselect_unsupported(**changed, block_size=6, top_k=8)


def test_contraction_order_is_that_of_the_unpacked_codes():
    """Thread c of four holds values 32c …; word i of them is unpacked into pairs (j, j + 4), 8 columns apart."""
    thread, word, pair, half = np.meshgrid(np.arange(4), np.arange(4), np.arange(4), np.arange(2), indexing="ij")
    order = np.asarray(gpu_lanes.permute(jnp.arange(128)))
    column = 8 * (4 * word + pair) + 2 * thread + half
    np.testing.assert_array_equal(order[column], 32 * thread + 8 * word + pair + 4 * half)


@pytest.mark.parametrize("tiles", [[5, 0, 17, 1, 0], [0, 0], [0, 3], [3], [1] * 40, [1000, 0, 1]])
def test_shares_cover_all_tiles_once(tiles: list[int]):
    ends, programs = np.cumsum(tiles).astype(np.int32), 7
    visits = np.zeros(ends[-1], int)
    for program in range(programs):
        begin, end = map(int, gpu_mosaic._share(jnp.int32(ends[-1]), jnp.int32(program), programs))
        first, last = (int(gpu_mosaic._ended(ends, ends.size, tile)) for tile in (begin, end - 1))
        for unit in range(first, last + 1):
            start = ends[unit] - tiles[unit]
            visits[max(begin, start) : max(min(end, ends[unit]), begin)] += 1
    assert (visits == 1).all()


@pytest.mark.parametrize(("total", "heads"), [(1, 32), (6, 32), (48, 32), (23, 32), (5, 64), (3, 128), (9, 16)])
def test_queries_are_cut_into_equal_products(total: int, heads: int):
    plan = gpu_mosaic._plan(total, heads)
    assert plan.together * heads <= 128
    assert plan.products <= 4
    assert total <= plan.padded < total + plan.together * plan.blocks
    assert (plan.blocks - 1) * plan.products < plan.groups <= plan.blocks * plan.products


@pytest.mark.parametrize("size", [8, 32])
def test_runs_are_the_rows_of_pages_and_blocks(size: int):
    pages, page_entries = 5, 128
    table = jnp.array([[3, -1, 4], [9, 0, 2]], jnp.int32)
    entries = np.arange(3 * page_entries)
    page = np.asarray(table)[:, entries // page_entries]
    rows = np.where((page >= 0) & (page < pages), page * page_entries + entries % page_entries, -1)
    np.testing.assert_array_equal(gpu_mosaic.page_runs(table, pages, page_entries), rows[:, ::64])

    ids = np.sort(np.random.default_rng(0).permuted(np.tile(np.arange(384 // size), (2, 3, 1)), axis=-1)[..., :9])
    ids[:, 1, 7:] = -1
    ids[:, 2, 8] = 2**31 - 1
    visible = np.array([[384, 250, 0], [131, 5, 384]], np.int32)
    runs, limits = gpu_mosaic.block_runs(table, pages, page_entries, jnp.asarray(ids), size, jnp.asarray(visible))
    assert runs.shape[-1] % 8 == 0
    for b, s in np.ndindex(2, 3):
        seen = [e for i in ids[b, s] if 0 <= i < 384 // size for e in range(i * size, (i + 1) * size)]
        listed = np.repeat(np.asarray(runs)[b, s], 8) + np.tile(np.arange(8), runs.shape[-1])
        there = rows[b, seen] >= 0
        np.testing.assert_array_equal(listed[: len(seen)][there], rows[b, seen][there])
        assert (np.asarray(runs)[b, s].repeat(8)[: len(seen)][~there] == -1).all()
        assert limits[b, s] == sum(e < visible[b, s] for e in seen)
