"""A history whose scores are too many to be there at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend, tiling
from pallas_kernels.formats import FP4_E8M0, DenseFormat
from pallas_kernels.index_select import BlockSelection, Selection, index_select
from tests.pallas_kernels.base.index_select import case, expected

F32 = DenseFormat("float32")
# Of two requests of 32 entries in pages of 4, five queries: parts of four pages, one page, or two of six (blocks of 3).
BUDGETS = {"two parts": 4 * 4 * 2 * 5 * 4, "a part a page": 4 * 2 * 5 * 4, "less than a page": 1}


def select(arrays: dict, fmt, top_k: int, blocks: BlockSelection | None) -> Selection:
    """Traced anew: the budget is no argument."""
    return jax.jit(functools.partial(index_select, fmt=fmt, top_k=top_k, blocks=blocks))(**arrays)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("blocks", [None, BlockSelection(4, 3), BlockSelection(3, 4)], ids=["entries", "4", "3"])
def test_parts_choose_what_the_whole_does(monkeypatch, budget: str, blocks: BlockSelection | None):
    """Ties included, which lie in every part: scores are small integers."""
    arrays = case(F32, integers=True, heads=2, width=3)
    rng = np.random.default_rng(1)
    arrays["first"] = jnp.asarray(rng.integers(-1, np.asarray(arrays["visible"]) + 2), jnp.int32)
    monkeypatch.setattr(tiling, "TEMPORARY_BYTES", BUDGETS[budget])
    for top_k in (3, 40):
        chosen, wanted = select(arrays, F32, top_k, blocks), expected(arrays, F32, top_k, blocks)
        for ours, reference in zip(chosen, wanted, strict=True):
            np.testing.assert_array_equal(ours, reference)


def test_more_visible_than_pages_and_nothing(monkeypatch):
    arrays = case(lengths=(32, 0), capacity=32)
    arrays["visible"] = arrays["visible"].at[0, -1].set(1000)
    monkeypatch.setattr(tiling, "TEMPORARY_BYTES", BUDGETS["two parts"])
    blocks = BlockSelection(4, 3)
    chosen, wanted = select(arrays, FP4_E8M0, 6, blocks), expected(arrays, FP4_E8M0, 6, blocks)
    np.testing.assert_array_equal(chosen.indices, wanted.indices)
    np.testing.assert_array_equal(chosen.blocks, wanted.blocks)
    np.testing.assert_array_equal(chosen.blocks[1], -1)


def made_by(jaxpr) -> Iterator[jax.core.ShapedArray]:
    """What the equations of a program make, those of its loops included."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                yield from made_by(value)


@pytest.mark.parametrize("queries", [1, 4, 64])
def test_no_temporary_is_larger_than_the_budget(monkeypatch, queries: int):
    """However long the history is: 1024 float32 scores of one query are twice the budget."""
    monkeypatch.setattr(tiling, "TEMPORARY_BYTES", 2048)
    arrays = case(lengths=(1024,), queries=queries, heads=2, page_entries=8, capacity=1024)
    select = functools.partial(index_select, fmt=FP4_E8M0, top_k=4, blocks=BlockSelection(4, 3))
    with backend.use("xla"):
        program = jax.make_jaxpr(select)(**arrays)
    made = [a.size * 4 for a in made_by(program) if a.dtype == jnp.float32]
    assert made
    # Queries themselves are cut into tiles, which copies them.
    assert max(made) <= max(2048, arrays["queries"].nbytes)
