"""The index selection's kernels for GPUs: a few promises interpreted anywhere, all of them on a GPU."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import backend, tiling
from pallas_kernels.formats import FP4_E8M0, DenseFormat
from pallas_kernels.index_select import BlockSelection, gpu
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
        monkeypatch.setattr(gpu, "_KEYS", 16)
        monkeypatch.setattr(gpu, "_TILES", 2)
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
