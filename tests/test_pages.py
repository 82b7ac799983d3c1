"""The page allocator: who holds which page, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41.inference.pages import OutOfPages, PageAllocator


def held(pages: PageAllocator, row: int) -> list[int]:
    return [int(page) for page in pages.table[row] if page != pages.pages]


def test_a_request_holds_whole_pages_in_order():
    pages = PageAllocator(batch=2, pages=8, table_pages=4, page_tokens=64)
    assert [pages.pages_for(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]
    pages.reserve(1, 65)
    assert len(held(pages, 1)) == 2
    assert (pages.table[1, 2:] == 8).all()
    assert (pages.table[0] == 8).all()
    assert pages.free == 6


def test_growing_keeps_the_pages_that_are_held():
    pages = PageAllocator(batch=1, pages=8, table_pages=4, page_tokens=64)
    pages.reserve(0, 100)
    before = held(pages, 0)
    pages.reserve(0, 200)
    assert held(pages, 0)[:2] == before
    assert len(held(pages, 0)) == 4
    pages.reserve(0, 10)  # a shorter length gives nothing back
    assert len(held(pages, 0)) == 4


def test_too_few_pages_take_nothing():
    pages = PageAllocator(batch=2, pages=3, table_pages=4, page_tokens=64)
    pages.reserve(0, 128)
    with pytest.raises(OutOfPages, match="128 tokens need 2 more pages; 1 are free"):
        pages.reserve(1, 128)
    assert pages.free == 1
    assert held(pages, 1) == []
    pages.release(0)
    pages.reserve(1, 192)
    assert pages.free == 0


def test_a_request_longer_than_the_table_is_refused():
    pages = PageAllocator(batch=1, pages=100, table_pages=4, page_tokens=64)
    with pytest.raises(ValueError, match="257 tokens need 5 pages; the page table holds 4"):
        pages.reserve(0, 257)
    assert pages.free == 100


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 260)), max_size=40))
def test_no_page_has_two_owners_and_none_is_lost(actions):
    pages = PageAllocator(batch=4, pages=11, table_pages=4, page_tokens=64)
    for row, tokens in actions:
        if tokens == 0:
            pages.release(row)
            continue
        try:
            pages.reserve(row, tokens)
        except ValueError:
            assert pages.pages_for(tokens) > 4
        except OutOfPages:
            assert pages.pages_for(tokens) - len(held(pages, row)) > pages.free
    owned = np.concatenate([held(pages, row) for row in range(4)]).astype(int).tolist()
    assert len(set(owned)) == len(owned)
    assert len(owned) + pages.free == 11


def test_pages_of_a_request_go_over_the_shards_in_turn():
    pages = PageAllocator(batch=2, pages=12, table_pages=6, page_tokens=64, shards=3)
    pages.reserve(0, 5 * 64)
    np.testing.assert_array_equal(pages.table[0, :5] // 4, [0, 1, 2, 0, 1])
    assert pages.free == 7
    # Of shard 0 and 1 two pages each are left, of shard 2 three.
    assert pages.fits(6 * 64)
    pages.reserve(1, 4 * 64)
    assert not pages.fits(4 * 64)
    with pytest.raises(OutOfPages, match="need 2 more pages on one shard; 1 are free"):
        PageAllocator(batch=1, pages=3, table_pages=6, page_tokens=64, shards=3).reserve(0, 4 * 64)
    pages.reserve(0, 6 * 64)
    assert pages.table[0, 5] // 4 == 2
    pages.release(0)
    pages.release(1)
    assert pages.free == 12
    pages.reserve(1, 6 * 64)
    np.testing.assert_array_equal(pages.table[1] // 4, [0, 1, 2, 0, 1, 2])
