"""Bytes: what a state takes by part (on shapes, nothing is allocated), and what steps take besides."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from dsv41.config import load_config
from dsv41.declared import abstract_variables
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.state.memory import bytes_per_token, entry_bytes
from dsv41.state.request import create_state
from dsv41.state.sizes import prefill_bytes, request_bytes, state_bytes, tree_bytes
from dsv41.steps.decode import decode_step
from pallas_kernels import tiling
from pallas_kernels.formats import FP4_E8M0, Packed
from pallas_kernels.index_select import BlockSelection, index_select
from tests.conftest import GOLDEN, PAGE_TOKENS
from tests.helpers import SLOTS, SMALL_LAYOUT, mini8_config, with_text

OFFICIAL = Settings.default(load_config(GOLDEN.parents[2] / "configs" / "deepseek-v4.1-flash"))
TEXT = OFFICIAL.text

LOOP = SMALL_LAYOUT | {
    "num_hidden_layers": 3,
    "compress_ratios": (2, 2, 1),
    "index_source_layer_ids": (0, 1, 2),
}
"""As encoder a loop of two Full layers, as decoder one with a candidate pool."""


@pytest.mark.parametrize("pages", [1, 1000])
def test_the_official_pool_takes_890_bytes_a_token(pages: int):
    state = jax.eval_shape(functools.partial(create_state, OFFICIAL, 3, pages, 7))
    capacity = pages * OFFICIAL.page_tokens
    assert tree_bytes(state.memory) == 890 * capacity
    assert bytes_per_token(OFFICIAL) == 890
    assert state_bytes(OFFICIAL, 3, pages, 7)["global memory"] == 890 * capacity


def test_the_official_entry_by_part():
    pool = jax.eval_shape(functools.partial(create_state, OFFICIAL, 1, 1, 1)).memory
    for ratio in (1, 2):
        main, index = pool[ratio].main, pool[ratio].index
        assert [leaf.shape[-1] for leaf in (main.payload, main.scales, index.payload, index.scales)] == [256, 32, 64, 4]
        assert {leaf.dtype for leaf in jax.tree.leaves(pool[ratio])} == {jnp.dtype(jnp.uint8)}
        assert main.payload.shape[2] == OFFICIAL.page_tokens // ratio
    assert entry_bytes(OFFICIAL) == {"main KV": 256 + 32, "index key": 64 + 4}


def test_the_official_request_by_part():
    slots, layers, sources = TEXT.sliding_window, TEXT.num_hidden_layers, 3
    parts = request_bytes(OFFICIAL)
    positions = 4 * slots  # shared by a stack's layers
    assert parts["encoder rings"] == 20 * slots * 528 + positions
    assert parts["decoder rings"] == (layers - 20) * slots * 528 + positions
    assert parts["compressor tails"] == sources * 4096  # one token of an open group of two
    assert parts["n-gram tail"] == 12
    assert parts["length"] == 4
    # The encoder tail: C bfloat16 streams and a float32 mix, image flag and look-back of each position; where it is.
    per_position = TEXT.hc_mult * (TEXT.hidden_size * 2 + 4) + 1 + 4 * TEXT.engram_max_ngram_size
    assert prefill_bytes(OFFICIAL) == slots * per_position + 8


def test_no_cache_rounding_is_counted_as_stored():
    dense = Settings.default(OFFICIAL.config, cache_rounding=False)
    assert bytes_per_token(dense) == 2.5 * 2 * (512 + 128)
    memory = jax.eval_shape(functools.partial(create_state, dense, 1, 3, 1)).memory
    assert tree_bytes(memory) == bytes_per_token(dense) * 3 * dense.page_tokens


def test_a_decode_step_updates_the_pool_in_place():
    """A pool of a million pages goes in and comes out in one place, and no part of it is copied on the way."""
    # Index keys as wide as the official ones: XLA on CPU lays out mini8's one scale a key differently inside a loop,
    # and copies that leaf.
    config = with_text(mini8_config(), **LOOP, index_head_dim=TEXT.index_head_dim)
    model = Model(Settings.default(config, page_tokens=PAGE_TOKENS))
    token_map = jax.ShapeDtypeStruct((model.settings.text.vocab_size,), jnp.int32)
    variables = {"params": abstract_variables(model), "constants": {"token_map": token_map}}
    state = jax.eval_shape(functools.partial(create_state, model.settings, SLOTS, 10**6, 32))
    ids, active = (jax.ShapeDtypeStruct((SLOTS,), dtype) for dtype in (jnp.int32, jnp.bool_))
    compiled = decode_step.lower(model, variables, state, ids, active).compile()
    memory = compiled.memory_analysis()
    smallest = min(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.memory))
    assert memory.alias_size_in_bytes >= tree_bytes(state.memory)
    assert memory.temp_size_in_bytes < smallest / 2


def index_select_temporaries(history: int) -> int:
    """Temporary bytes of the index selection alone at official sizes, 64 queries over so many entries."""
    queries, page_entries = 64, OFFICIAL.page_entries(1)
    pages = history // page_entries
    fmt = FP4_E8M0
    pool = jax.eval_shape(lambda: fmt.zeros((pages, page_entries), TEXT.index_head_dim))
    blocks = BlockSelection(TEXT.candidate_block_size, TEXT.candidate_topk_blocks)

    @jax.jit
    def select(queries: jax.Array, weights: jax.Array, pool: Packed, table: jax.Array, visible: jax.Array):
        return index_select(queries, weights, pool, fmt, table, visible, TEXT.index_topk, blocks)

    heads = TEXT.index_n_heads
    lowered = select.lower(
        jax.ShapeDtypeStruct((1, queries, heads, TEXT.index_head_dim), jnp.float32),
        jax.ShapeDtypeStruct((1, queries, heads), jnp.float32),
        pool,
        jax.ShapeDtypeStruct((1, pages), jnp.int32),
        jax.ShapeDtypeStruct((1, queries), jnp.int32),
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("history", [2**18, 2**20])
def test_index_scores_of_a_prefill_chunk_are_bounded(history: int):
    """Far below heads × history, and below a fixed number of the budget's temporaries whatever the history."""
    taken = index_select_temporaries(history)
    assert taken < TEXT.index_n_heads * 64 * history * 4 / 4
    assert taken <= 3 * tiling.TEMPORARY_BYTES
    print(f"{history} entries: {taken / 2**20:.0f} MiB")
