"""The global memory over shards of the context, against the whole of it on one device."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from dsv41.sharding import context
from dsv41.sharding.context import Share
from dsv41.sharding.mesh import parse_preset
from dsv41.sharding.parallel import SINGLE, Parallel
from dsv41.sharding.rules import MeshError
from dsv41.sharding.split import Split
from pallas_kernels.formats import DenseFormat
from pallas_kernels.index_select import BlockSelection
from pallas_kernels.index_select.best import best as best_of_lists
from pallas_kernels.index_select.best import best_blocks
from pallas_kernels.index_select.xla import choose_blocks
from pallas_kernels.paged_memory import append
from pallas_kernels.top_k.xla import top_k

F32 = DenseFormat("float32")
ITEMS = 64  # of the arrays below, whatever the numbers drawn


@jax.jit
def shared(shard: jax.Array, shards: jax.Array, page_items: jax.Array, visible: jax.Array, items: jax.Array):
    """What a shard makes of the numbers of items."""
    share = Share(shard, shards)
    held = share.held(items, page_items)
    return share.visible(visible, page_items), held, share.whole(held, page_items)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 9), st.integers(0, ITEMS))
def test_visible_items_are_the_first_of_each_shard(shards: int, page_items: int, visible: int):
    items = np.where(np.arange(ITEMS) < visible, np.arange(ITEMS), -1).astype(np.int32)
    for shard in range(shards):
        count, held, whole = map(np.asarray, shared(shard, shards, page_items, visible, items))
        ours = (items >= 0) & (items // page_items % shards == shard)
        assert count == ours.sum()
        np.testing.assert_array_equal(held[ours], np.arange(count))
        np.testing.assert_array_equal(held[~ours], -1)
        np.testing.assert_array_equal(whole, np.where(ours, items, -1))


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_shard_reads_every_nth_page(shards: int):
    table = np.arange(24, dtype=np.int32).reshape(2, 12)
    for shard in range(shards):
        np.testing.assert_array_equal(Share(shard, shards).pages(jnp.asarray(table)), table[:, shard::shards])


def test_shards_that_do_not_divide_the_pages_are_refused():
    with pytest.raises(MeshError, match="6 pages a request are not divisible by 4 context shards"):
        Share(0, 4).pages(jnp.zeros((1, 6), jnp.int32))
    with pytest.raises(MeshError, match="candidate_block_size: 3 does not divide a page's 8 entries"):
        context.page_blocks(8, 3)


best = jax.jit(best_of_lists, static_argnums=2)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_best_orders_by_score_and_then_by_item(data):
    """Three lists, of a length that is no power of two."""
    scores = data.draw(st.lists(st.sampled_from([-np.inf, -2.0, -0.0, 0.0, 0.5, 3.0, np.inf]), min_size=9, max_size=9))
    scores = np.array(scores, np.float32)
    items = np.where(np.isneginf(scores), -1, np.array(data.draw(st.permutations(range(9))), np.int32))
    lists = [part[np.lexsort((items[part], -scores[part]))] for part in np.arange(9).reshape(3, 3)]
    order = np.lexsort((items, -scores))[:7]
    chosen, values = best(items[np.array(lists)], scores[np.array(lists)], 7)
    np.testing.assert_array_equal(chosen, items[order])
    np.testing.assert_array_equal(values, scores[order])


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def both(scores: jax.Array, visible: jax.Array, shards: int, page: int, block: int):
    """Entries and blocks chosen among dense scores ``[query, entries]``: of the whole, and joined from shards."""
    wanted, most, capacity = BlockSelection(block, 3), 5, scores.shape[1]
    whole = *top_k(scores, most), *choose_blocks(scores[None], visible[None], wanted)
    parts = []
    for shard in range(shards):
        share = Share(shard, shards)
        own = scores.reshape(-1, capacity // page // shards, shards, page)[:, :, shard].reshape(len(scores), -1)
        values, entries = top_k(own, most)
        entries = share.whole(jnp.where(values == -jnp.inf, -1, entries), page)
        blocks, maxima = choose_blocks(own[None], share.visible(visible, page)[None], wanted)
        parts.append((entries, values, share.whole(blocks[0], page // block), maxima[0]))
    entries, values, blocks, maxima = (jnp.stack(leaves) for leaves in zip(*parts, strict=True))
    newest = jnp.where(visible > 0, (visible - 1) // block, -1)
    joined = best_of_lists(entries, values, most), best_blocks(blocks, maxima, newest, wanted.chosen(capacity))
    return (jnp.where(whole[0] == -jnp.inf, -1, whole[1]), whole[0], whole[2][0], whole[3][0]), (*joined[0], *joined[1])


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([(1, 5, 4, 2), (2, 6, 4, 2), (4, 8, 2, 1)]), st.integers(0, 10**6), st.integers(1, 30))
def test_joined_choices_are_those_of_the_whole(sizes: tuple, seed: int, spread: int):
    shards, pages, page, block = sizes
    rng = np.random.default_rng(seed)
    # From all scores equal to hardly any, some entries without a page; every number of visible entries.
    scores = rng.integers(0, spread, (pages * page + 1, pages * page)).astype(np.float32)
    scores[:, rng.random(pages * page) < 0.1] = -np.inf
    visible = np.arange(len(scores), dtype=np.int32)
    scores[np.arange(pages * page) >= visible[:, None]] = -np.inf
    whole, joined = both(scores, visible, shards, page, block)
    for ours, wanted in zip(joined, whole, strict=True):
        np.testing.assert_array_equal(ours, wanted)


BATCH, QUERIES, PAGES, PAGE, WINDOW, HEADS, WIDTH = 2, 8, 8, 4, 6, 2, 8
BLOCKS, TOP_K = BlockSelection(2, 6), 7


def parallel_of(shards: int) -> Parallel:
    preset = parse_preset("test", {"axes": {"context": shards}})
    return preset.parallel(jax.devices()[:shards]) if shards > 1 else SINGLE


@functools.cache
def outcome(shards: int, columns: bool = False, room: int = 99) -> dict[str, np.ndarray]:
    """Selection, reselection and attention over requests whose pages, and perhaps columns, lie on so many devices.

    Each attends to ``room`` of the entries that it holds at once.

    Index scores are small integers: many tie, and no order of summation matters.
    """
    rng = np.random.default_rng(0)
    integers = lambda *shape: rng.integers(-1, 2, shape).astype(np.float32)  # noqa: E731
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    capacity = PAGES * PAGE
    length = np.array([capacity, 13], np.int32)
    arrays = {
        "queries": normal(BATCH, QUERIES, HEADS, WIDTH),
        "index_queries": integers(BATCH, QUERIES, HEADS, WIDTH),
        "weights": integers(BATCH, QUERIES, HEADS),
        "local": normal(BATCH, WINDOW + QUERIES, WIDTH),
        "local_valid": rng.random((BATCH, WINDOW + QUERIES)) < 0.8,
        "keys": integers(BATCH, capacity, WIDTH),
        "entries": normal(BATCH, capacity, WIDTH),
        "visible": np.array([[0, 3, 17, 31, 99, 32, 2, 8], [0, 1, 5, 12, 13, 13, 4, 7]], np.int32),
        "sink": normal(HEADS),
        # Page 2 of the first request is gone; the second one never had those behind its length.
        "dropped": np.array([[page == 2 for page in range(PAGES)], [page > 3 for page in range(PAGES)]]),
    }
    # What the page tables say: page j on shard j mod shards, elsewhere in any order.
    each = BATCH * PAGES // shards
    table = np.empty((BATCH, PAGES), np.int32)
    for shard in range(shards):
        table[:, shard::shards] = shard * each + rng.permutation(each).reshape(BATCH, -1)
    parallel = parallel_of(shards)
    split = Split.of(parallel, QUERIES, WINDOW) if columns else Split(parallel)

    def step(arrays: dict[str, jax.Array], table: jax.Array) -> dict[str, jax.Array]:
        held, _ = context.page_tables(parallel, table, each)
        keys, entries = (
            append(F32.zeros((each, PAGE), WIDTH), F32, held, jnp.zeros(BATCH, jnp.int32), length, arrays[name])
            for name in ("keys", "entries")
        )
        _, table = context.page_tables(parallel, jnp.where(arrays["dropped"], -1, table), each)
        own = split.own((arrays["index_queries"], arrays["weights"]))
        common = (split, *own, keys, F32, table, arrays["visible"])
        chosen = split.whole(context.select(*common, TOP_K, BLOCKS))
        alone = split.whole(context.select(*common, TOP_K).indices)
        again, scores = split.whole(context.reselect(*common, chosen.blocks, BLOCKS.size, 2 * TOP_K))
        attended = context.attend(
            split,
            split.own(arrays["queries"]),
            F32.encode(arrays["local"]),
            F32,
            arrays["local_valid"],
            entries,
            F32,
            table,
            again,
            arrays["sink"],
            window=WINDOW,
            scale=WIDTH**-0.5,
            probability_dtype=jnp.float32,
        )
        attended = split.whole(attended)
        return {**chosen._asdict(), "alone": alone, "again": again, "again_scores": scores, "out": attended}

    if shards > 1:
        spec = PartitionSpec()
        step = jax.shard_map(step, mesh=parallel.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with mock.patch.object(context, "room", lambda chosen, _: min(room, chosen)):
        return jax.tree.map(np.asarray, jax.jit(step)(arrays, table))


@pytest.mark.parametrize(("shards", "columns", "room"), [(8, False, 99), (2, True, 3)])
def test_shards_choose_and_attend_as_one_device(shards: int, columns: bool, room: int):
    ours, wanted = dict(outcome(shards, columns, room)), dict(outcome(1))
    np.testing.assert_allclose(ours.pop("out"), wanted.pop("out"), rtol=0, atol=1e-6)
    assert ours.keys() == wanted.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)
    assert (ours["indices"] >= 0).any()
    np.testing.assert_array_equal(ours["alone"], ours["indices"])


def test_a_shard_has_room_for_its_share_of_the_choices():
    """Half of 512 on four shards, a quarter on eight; on two there is little to spare, and of few entries nothing."""
    assert [context.room(512, shards) for shards in (2, 4, 8, 32)] == [512, 256, 128, 64]
    assert context.room(48, 8) == 48
    held = np.random.default_rng(0).binomial(512, 1 / 4, 10_000)
    assert (held <= context.room(512, 4)).all()
