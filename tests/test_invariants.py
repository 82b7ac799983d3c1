"""What a request's state promises, whatever the chunks, the neighbours, the pages and the padding.

Equality has two grades. In the same compiled step and shapes it is bit for bit (tested with packed memory, as in
use). Between different shapes it is 1e-4 with the cache rounding off; with it on, a value that falls to the other
side of a rounding step changes what follows, so such entries are counted.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.config import load_config
from dsv41.inference.prefill import PrefillOptions, chunk_batches, encode_prompts, prefill, usable_hit
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.state.memory import bytes_per_token, entry_bytes
from dsv41.state.request import ModelState
from dsv41.steps.prefill import encode_chunk, exact_chunk, replay_decoder
from tests.conftest import GOLDEN
from tests.helpers import (
    ALL_SLOTS,
    CAPACITY,
    SLOTS,
    SMALL_LAYOUT,
    STRAY,
    WIDTH,
    assert_close,
    assert_same_bytes,
    changed_entries,
    copied,
    decode,
    entries_of,
    exact,
    forward,
    fresh_state,
    lost_rings,
    mini8_config,
    owned,
    poison_contents,
    random_model,
    random_tokens,
    rounding_alike,
    with_text,
)

PROMPT = random_tokens(0, 61)
CHUNK_SIZES = (2, 3, 5, 7, 16, 17, 60, 61)  # the last chunk of 60 has one token, as decode steps have
ONE_CHUNK = PrefillOptions(chunk_sizes=(WIDTH,))

ModelAndVariables = tuple[Model, dict]


@pytest.fixture(scope="module")
def rounded() -> ModelAndVariables:
    """The small layout, with cache rounding."""
    return random_model(True, **SMALL_LAYOUT)


@pytest.fixture(scope="module", autouse=True)
def _steps_with_cache_rounding_round_alike(rounded: ModelAndVariables):
    """So that replay's memory is exact prefill's to the bit; all tests of that model use the same programs."""

    def chosen(step):
        return lambda model, *rest: (rounding_alike(step) if model == rounded[0] else step)(model, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsv41.inference.prefill.encode_chunk", chosen(encode_chunk))
        patch.setattr("tests.helpers.exact_chunk", chosen(exact_chunk))
        yield


def exact_in_chunks(model, variables, state, prompts: dict[int, np.ndarray], sizes: dict[int, int]):
    """Exact prefill, each slot in chunks of its own size; logits ``[vocab]`` of each slot's last token."""
    done, last = dict.fromkeys(prompts, 0), {}
    while any(done[slot] < len(prompts[slot]) for slot in prompts):
        part = {slot: prompts[slot][done[slot] : done[slot] + sizes[slot]] for slot in prompts}
        part = {slot: tokens for slot, tokens in part.items() if len(tokens)}
        state, logits = exact(model, variables, state, part)
        for slot, tokens in part.items():
            done[slot] += len(tokens)
            last[slot] = logits[slot]
    return state, last


@pytest.fixture(scope="module")
def one_chunk(smooth_mini8: ModelAndVariables) -> tuple[ModelState, np.ndarray]:
    """The prompt in one chunk, in slot 0, cache rounding off: state, and logits ``[61, vocab]``."""
    model, variables = smooth_mini8
    state, logits, _ = forward(model, variables, fresh_state(model.settings, 1), {0: PROMPT})
    return state, logits[0, : len(PROMPT)]


# 1, 2: one position appends once, and entries beyond a query do not exist for it


def test_the_decoders_replay_appends_nothing(rounded: ModelAndVariables):
    model, variables = rounded
    prompts = [PROMPT[:n] for n in (61, 40, 16, 5)]
    state, tail = encode_prompts(
        model, variables, poison_contents(fresh_state(model.settings)), ALL_SLOTS, prompts, ONE_CHUNK
    )
    before = copied(state)
    state, _, _ = replay_decoder(model, variables, state, jnp.arange(SLOTS, dtype=jnp.int32), tail)
    for name in ("memory", "page_table", "encoder_ring", "tails", "ngram_tail", "length"):
        assert _all_bytes(getattr(state, name)) == _all_bytes(getattr(before, name)), name


def _all_bytes(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("later", [False, True], ids=["nothing later", "later entries of another text"])
def test_a_hit_with_lost_rings_writes_only_what_is_new(rounded: ModelAndVariables, later: bool):
    """The worked example of a prefix hit, scaled to a window of 16: c = 40, n = 44."""
    model, variables = rounded
    cached, total, window = 40, 44, model.settings.text.sliding_window
    other = np.concatenate([PROMPT[:cached], random_tokens(9, 20)])
    state = poison_contents(fresh_state(model.settings))
    state, _ = exact(model, variables, state, dict.fromkeys(ALL_SLOTS, other if later else PROMPT[:cached]))
    before = lost_rings(copied(state))
    positions = []
    state, tail = encode_prompts(
        model,
        variables,
        copied(before),
        ALL_SLOTS,
        [PROMPT[:total].tolist()] * SLOTS,
        ONE_CHUNK,
        cached,
        lambda counts: positions.append(int(counts.sum())),
    )
    # Encoder [24, 44), decoder [28, 44): 16 positions, 12 of them before the hit's end.
    assert positions == [(total - (cached - window)) * SLOTS] == [20 * SLOTS]
    np.testing.assert_array_equal(tail.start, [28] * SLOTS)
    np.testing.assert_array_equal(tail.count, [16] * SLOTS)
    for slot in ALL_SLOTS:
        for ratio in state.memory:
            changed = changed_entries(before, state, ratio, slot)
            np.testing.assert_array_equal(np.flatnonzero(changed.any(0)), np.arange(cached // ratio, total // ratio))
            assert changed[:, cached // ratio : total // ratio].all()
    new = sum(
        int(changed_entries(before, state, ratio, 0).sum()) * sum(entry_bytes(model.settings).values())
        for ratio in state.memory
    )
    assert new == (total - cached) * bytes_per_token(model.settings)

    # What lies beyond the query in its pages is invisible: the same bytes come out as without it.
    state, logits, _ = replay_decoder(model, variables, state, jnp.arange(SLOTS, dtype=jnp.int32), tail)
    assert np.isfinite(logits).all()
    clean, _ = exact(
        model, variables, poison_contents(fresh_state(model.settings)), dict.fromkeys(ALL_SLOTS, PROMPT[:cached])
    )
    clean, clean_logits = prefill(
        model, variables, lost_rings(clean), ALL_SLOTS, [PROMPT[:total].tolist()] * SLOTS, ONE_CHUNK, cached
    )
    assert np.asarray(logits).tobytes() == np.asarray(clean_logits).tobytes()
    for slot in ALL_SLOTS:
        assert_same_bytes(owned(state, slot), owned(clean, slot))


def test_the_official_worked_example():
    """c = 4096, n = 4100, snapshot missing: 3560 new bytes, 5200 token-layers."""
    settings = Settings.default(load_config(GOLDEN.parents[2] / "configs" / "deepseek-v4.1-flash"))
    window, table = settings.text.sliding_window, settings.table
    prompt, cached = np.zeros(4100, np.int32), 4096
    assert usable_hit(settings, cached) == cached
    batches = list(chunk_batches([prompt], PrefillOptions(), cached - window))
    encoder = sum(int(batch.count.sum()) for batch in batches)
    assert encoder == 132
    assert (len(prompt) - cached) * bytes_per_token(settings) == 3560
    assert encoder * len(table.encoder) + min(len(prompt), window) * len(table.decoder) == 5200


def test_hits_are_cut_back_to_whole_groups(smooth_mini8: ModelAndVariables):
    model, variables = smooth_mini8
    assert [usable_hit(model.settings, n) for n in (0, 1, 2, 39, 40, 41)] == [0, 0, 2, 38, 40, 40]
    three = with_text(mini8_config(), **SMALL_LAYOUT | {"compress_ratios": (3, 2, 1, 1)})
    three = Settings.default(three, page_tokens=12)
    assert [usable_hit(three, n) for n in (5, 6, 11, 12, 17)] == [0, 6, 6, 12, 12]
    state = fresh_state(model.settings)
    with pytest.raises(ValueError, match="41"):
        encode_prompts(model, variables, state, [0], [PROMPT], ONE_CHUNK, cached=41)
    with pytest.raises(ValueError, match="61"):
        encode_prompts(model, variables, state, [0], [PROMPT], ONE_CHUNK, cached=62)


# 3: what n tokens leave


@pytest.mark.parametrize("lengths", [(1, 2, 3, 5), (31, 127, 128, 129)])
def test_n_tokens_make_n_over_r_entries_and_leave_the_rest_in_the_tail(
    rounded: ModelAndVariables, lengths: tuple[int, ...]
):
    """One unequal batch; all else in the pool stays as it was."""
    model, variables = rounded
    before = poison_contents(fresh_state(model.settings))
    prompts = {slot: random_tokens(slot, n) for slot, n in enumerate(lengths)}
    state, _ = exact_in_chunks(model, variables, copied(before), prompts, dict.fromkeys(prompts, WIDTH))
    window = model.settings.text.sliding_window
    written = 0
    for slot, n in enumerate(lengths):
        assert int(state.length[slot]) == n
        for ratio in state.memory:
            changed = changed_entries(before, state, ratio, slot)
            expected = np.broadcast_to(np.arange(CAPACITY // ratio) < n // ratio, changed.shape)
            np.testing.assert_array_equal(changed, expected)
            written += int(expected.sum())
        for ratio, tail in state.tails.items():
            for leaf in jax.tree.leaves(tail):
                slots_in_use = (np.asarray(leaf)[:, slot] != 0).all(-1)
                np.testing.assert_array_equal(
                    slots_in_use, np.broadcast_to(np.arange(ratio - 1) < n % ratio, slots_in_use.shape)
                )
        for ring in (state.encoder_ring, state.decoder_ring):
            held = np.sort(np.asarray(ring.positions[slot]))
            np.testing.assert_array_equal(held[held >= 0], np.arange(max(0, n - window), n))
    # The spare pages belong to nobody.
    total = sum(
        int((_all_entries(before, ratio) != _all_entries(state, ratio)).any(-1).sum()) for ratio in state.memory
    )
    assert total == written


def _all_entries(state: ModelState, ratio: int) -> np.ndarray:
    pages = jax.tree.leaves(state.memory[ratio])[0].shape[1]
    everything = state.replace(page_table=jnp.arange(pages, dtype=jnp.int32)[None])
    return entries_of(everything, ratio, 0)


# 4: any chunking


@pytest.mark.parametrize("sizes", [CHUNK_SIZES[:4], CHUNK_SIZES[4:]], ids=str)
def test_any_chunking_is_one_chunk(smooth_mini8: ModelAndVariables, one_chunk, sizes: tuple[int, ...]):
    model, variables = smooth_mini8
    state, done = fresh_state(model.settings, 2), np.zeros(SLOTS, int)
    wanted_state, wanted = one_chunk
    while (done < len(PROMPT)).any():
        part = {
            slot: PROMPT[done[slot] : done[slot] + size] for slot, size in enumerate(sizes) if done[slot] < len(PROMPT)
        }
        state, logits, _ = forward(model, variables, state, part)
        for slot, tokens in part.items():
            here = wanted[done[slot] : done[slot] + len(tokens)]
            np.testing.assert_allclose(logits[slot, : len(tokens)], here, rtol=0, atol=1e-4)
            np.testing.assert_array_equal(logits[slot, : len(tokens)].argmax(-1), here.argmax(-1))
            done[slot] += len(tokens)
    for slot in ALL_SLOTS:
        assert_close(owned(state, slot), owned(wanted_state, 0))


def test_token_by_token_is_one_chunk(smooth_mini8: ModelAndVariables, one_chunk):
    """Through the decode step; on the way, at every length: where the ring puts what, and that memory only grows."""
    model, variables = smooth_mini8
    window = model.settings.text.sliding_window
    state = fresh_state(model.settings, 3)
    wanted_state, wanted = one_chunk
    slots = np.arange(window)
    for position, token in enumerate(PROMPT):
        before = copied(state)
        state, logits = decode(model, variables, state, {1: token})
        np.testing.assert_allclose(logits[1], wanted[position], rtol=0, atol=1e-4)
        assert logits[1].argmax() == wanted[position].argmax()
        newest = position - (position - slots) % window  # the last position p ≤ position with p mod W = slot
        for ring in (state.encoder_ring, state.decoder_ring):
            np.testing.assert_array_equal(ring.positions[1], np.where(newest < 0, -1, newest))
        for ratio in state.memory:
            changed = np.flatnonzero(changed_entries(before, state, ratio, 1).any(0))
            closes = (position + 1) % ratio == 0
            np.testing.assert_array_equal(changed, [position // ratio] if closes else [])
    assert_close(owned(state, 1), owned(wanted_state, 0))


def test_chunkings_with_rounding_differ_by_few_flips(rounded: ModelAndVariables):
    model, variables = rounded
    state, last = exact(model, variables, fresh_state(model.settings, 1), {0: PROMPT})
    wanted, flips = owned(state, 0), {}
    by_token = fresh_state(model.settings, 4)
    for token in PROMPT:
        by_token, logits = decode(model, variables, by_token, {0: token})
    finals = {"decode": (owned(by_token, 0), logits[0])}
    for sizes in (CHUNK_SIZES[:4], CHUNK_SIZES[4:]):
        state, ends = exact_in_chunks(
            model, variables, fresh_state(model.settings, 5), dict.fromkeys(ALL_SLOTS, PROMPT), dict(enumerate(sizes))
        )
        finals |= {size: (owned(state, slot), ends[slot]) for slot, size in enumerate(sizes)}
    pools = [name for name in wanted if name.startswith("memory")]
    total = sum(wanted[name].shape[0] * wanted[name].shape[1] for name in pools)
    for run, (parts, logits) in finals.items():
        flips[run] = sum(int((parts[name] != wanted[name]).any(-1).sum()) for name in pools)
        assert logits.argmax() == last[0].argmax()
    print(f"entries of {total} that differ from one chunk's, by chunk size: {flips}")
    # The noise of another shape (1e-7) lies far below a rounding step: one or two entries, here usually none.
    assert max(flips.values()) <= 0.02 * total


# 5: neighbours, page numbers, padding


def _run_request(model, variables, state: ModelState, slot: int, others: dict[int, np.ndarray], padding) -> tuple:
    """Two chunks and three decode steps of one request; the others go along. Its logits and its state."""
    cuts, logits = (0, 37, 61), []
    for begin, end in itertools.pairwise(cuts):
        part = {slot: PROMPT[begin:end]} | {other: tokens[begin:end] for other, tokens in others.items()}
        state, out = exact(model, variables, state, {s: t for s, t in part.items() if len(t)}, padding=padding)
        logits.append(out[slot])
    for step in range(3):
        tokens = {slot: 100 + step} | {other: 200 + step for other, t in others.items() if len(t) > 40}
        state, out = decode(model, variables, state, tokens)
        logits.append(out[slot])
    return np.stack(logits), owned(state, slot)


@pytest.fixture(scope="module")
def alone(rounded: ModelAndVariables) -> tuple:
    """The request alone in slot 0, everything else zero."""
    model, variables = rounded
    return _run_request(model, variables, fresh_state(model.settings, 6), 0, {}, (0,))


NEIGHBOURS = {slot: random_tokens(20 + slot, n) for slot, n in ((0, 61), (1, 3), (2, 50), (3, 37))}


@pytest.mark.parametrize("slot", ALL_SLOTS)
def test_a_request_does_not_see_its_neighbours(rounded: ModelAndVariables, alone, slot: int):
    """Other requests, another slot, other page numbers: the same bytes."""
    model, variables = rounded
    others = {other: tokens for other, tokens in NEIGHBOURS.items() if other != slot}
    logits, parts = _run_request(model, variables, fresh_state(model.settings, 7 + slot), slot, others, (0,))
    assert logits.tobytes() == alone[0].tobytes()
    assert_same_bytes(parts, alone[1])


@pytest.mark.parametrize("others", [{}, {0: NEIGHBOURS[0], 2: NEIGHBOURS[2]}], ids=["alone", "with others"])
def test_a_request_does_not_see_padding(rounded: ModelAndVariables, alone, others: dict):
    """NaN in every unused page, ring slot and inactive request, stray page numbers and stray padded tokens."""
    model, variables = rounded
    state = poison_contents(fresh_state(model.settings, 8))
    table = np.array(state.page_table)
    table[:, WIDTH // model.settings.page_tokens + 1 :] = np.resize(np.array(STRAY, np.int32), 23)
    state = state.replace(page_table=jax.device_put(table, jax.local_devices()[0]))
    logits, parts = _run_request(model, variables, state, 1, others, STRAY)
    assert logits.tobytes() == alone[0].tobytes()
    assert_same_bytes(parts, alone[1])


def test_inactive_slots_do_not_move(rounded: ModelAndVariables):
    model, variables = rounded
    state, _ = exact(model, variables, poison_contents(fresh_state(model.settings)), {0: PROMPT[:33], 2: PROMPT[:40]})
    before = owned(state, 0)
    state, _ = exact(model, variables, state, {2: PROMPT[:20], 3: PROMPT[:9]}, padding=STRAY)
    state, _ = decode(model, variables, state, {3: 7})
    assert_same_bytes(owned(state, 0), before)


# 6: sampled is not consumed


def test_the_pending_token_enters_with_the_next_step(smooth_mini8: ModelAndVariables, one_chunk):
    model, variables = smooth_mini8
    n = 40
    state, logits, _ = forward(model, variables, fresh_state(model.settings), {0: PROMPT[:n], 1: PROMPT[:n]})
    assert state.length.tolist() == [n, n, 0, 0]
    pending = int(PROMPT[n])  # what was sampled, whatever the logits say
    state, logits = decode(model, variables, state, {0: pending})
    assert state.length.tolist() == [n + 1, n, 0, 0]
    np.testing.assert_allclose(logits[0], one_chunk[1][n], rtol=0, atol=1e-4)
    token_map = np.asarray(variables["constants"]["token_map"])
    np.testing.assert_array_equal(state.ngram_tail[0], token_map[PROMPT[n - 2 : n + 1]])
    np.testing.assert_array_equal(state.ngram_tail[1], token_map[PROMPT[n - 3 : n]])


# 7: snapshots


def test_a_snapshot_goes_on_to_the_same_bytes(rounded: ModelAndVariables):
    model, variables = rounded
    state, _ = exact(model, variables, fresh_state(model.settings), {0: PROMPT[:33], 1: PROMPT[:20]})
    snapshot = copied(state)

    def go_on(state: ModelState):
        outputs = []
        for part in ({0: PROMPT[33:50], 1: PROMPT[20:25]}, {0: PROMPT[50:]}):
            state, logits = exact(model, variables, state, part)
            outputs.append(logits[0])
        state, logits = decode(model, variables, state, {0: 5, 1: 6})
        return _all_bytes(state), np.stack([*outputs, logits[0]])

    first, first_logits = go_on(state)
    second, second_logits = go_on(snapshot)
    assert first_logits.tobytes() == second_logits.tobytes()
    assert first == second


# Replay against exact


def test_replay_and_exact_leave_the_same_global_memory(rounded: ModelAndVariables):
    """To the bit, for prompts beyond the window too; so do the encoder's rings and the histories."""
    model, variables = rounded
    prompts = {slot: PROMPT[:n] for slot, n in enumerate((61, 40, 17, 3))}
    state, _ = exact(model, variables, fresh_state(model.settings), prompts)
    replayed, tail = encode_prompts(
        model, variables, fresh_state(model.settings), ALL_SLOTS, list(prompts.values()), ONE_CHUNK
    )
    replayed, _, _ = replay_decoder(model, variables, replayed, jnp.arange(SLOTS, dtype=jnp.int32), tail)
    assert _all_bytes(replayed.memory) == _all_bytes(state.memory)
    for slot in ALL_SLOTS:
        left, right = owned(replayed, slot), owned(state, slot)
        kept = [name for name in left if not name.startswith("decoder_ring") or name.endswith("positions")]
        assert_same_bytes({n: left[n] for n in kept}, {n: right[n] for n in kept})


def test_replay_is_exact_as_long_as_it_covers_the_prompt():
    """Here it reaches beyond the window; a prompt that is longer still comes out visibly different."""
    model, variables = random_model(False, **SMALL_LAYOUT)
    length = 24
    assert length > model.settings.text.sliding_window
    prompts = [PROMPT[:n].tolist() for n in (length, 16, 3, 61)]

    def run(mode: str):
        options = PrefillOptions(mode, (WIDTH,), length)
        return prefill(model, variables, fresh_state(model.settings), ALL_SLOTS, prompts, options)

    (state, logits), (wanted_state, wanted) = run("replay"), run("exact")
    np.testing.assert_allclose(logits[:3], wanted[:3], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(logits[:3].argmax(-1), wanted[:3].argmax(-1))
    for slot in ALL_SLOTS[:3]:
        assert_close(owned(state, slot), owned(wanted_state, slot))
    # Random weights are no trained model: bounded replay is an approximation, and shows as one.
    assert np.abs(np.asarray(logits[3] - wanted[3])).max() > 1e-2


def test_later_chunks_compile_nothing_new():
    """An encoder tail that is bound to no device would compile the first and the later chunks apart."""
    model, variables = random_model(False, **SMALL_LAYOUT)
    options = PrefillOptions("replay", (WIDTH,), 24)

    def compiled_after(tokens: int) -> int:
        prompts = [random_tokens(1, tokens).tolist()] * SLOTS
        encode_prompts(model, variables, fresh_state(model.settings), ALL_SLOTS, prompts, options)
        return encode_chunk.compiled_programs()

    assert compiled_after(WIDTH) == compiled_after(2 * WIDTH + 2)
