"""Look-ups in the background, and the host's addresses, against direct gathers and the device's hashes."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.checkpoint import CheckpointReader
from dsv41.config import load_config
from dsv41.engram.addresses import NgramHistory
from dsv41.engram.loading import open_tables
from dsv41.engram.prefetch import Prefetcher
from dsv41.numerics.ngram_hash import hash_ids, lookback, next_tail, ngram_hash
from pallas_kernels.formats import Packed
from tests.conftest import GOLDEN

CONFIG = load_config(GOLDEN / "tiny40" / "fp8")
TEXT = CONFIG.text
TOKEN_MAP = np.load(GOLDEN / "tiny40" / "token_map.npy")


# Look-ups


@pytest.fixture(scope="module")
def tables():
    """Both tables of a golden checkpoint, mapped, and their whole tensors."""
    reader = CheckpointReader(GOLDEN / "tiny40" / "fp8")
    names = {n: f"layers.{n}.engram.embed" for n in TEXT.engram_layer_ids}
    whole = {n: Packed(reader.read(f"{x}.weight"), reader.read(f"{x}.scale")) for n, x in names.items()}
    return open_tables("mapped", reader, CONFIG, jax.local_devices()[0]), whole


class Recorded:
    """A table that keeps what it was asked for, and answers when it is let go."""

    def __init__(self, table) -> None:
        self.rows, self.row_bytes, self._table = table.rows, table.row_bytes, table
        self.asked, self.go = [], threading.Event()
        self.go.set()

    def lookup(self, ids):
        self.asked.append(ids.copy())
        self.go.wait()
        return self._table.lookup(ids)


def assert_rows(found: dict[int, Packed], whole: dict[int, Packed], ids: dict[int, np.ndarray]) -> None:
    assert found.keys() == ids.keys()
    for layer, wanted in ids.items():
        assert np.asarray(found[layer].payload).tobytes() == whole[layer].payload[wanted].tobytes()
        np.testing.assert_array_equal(found[layer].scales, whole[layer].scales[wanted])


def test_a_direct_gather_under_load(tables):
    """32 requests with many rows in common, steps of all sizes in flight at once, fetched out of order."""
    opened, whole = tables
    rng = np.random.default_rng(0)
    wanted = []
    for step in range(40):
        shape = (32, (1, 6, 16)[step % 3], TEXT.engram_columns)
        few = {layer: rng.integers(0, table.rows, 50) for layer, table in opened.items()}
        wanted.append({layer: rng.choice(few[layer], shape).astype(np.int32) for layer in opened})
    with Prefetcher(opened) as prefetcher:
        given = [{layer: ids.copy() for layer, ids in step.items()} for step in wanted]
        tickets = []
        for step in given:
            tickets.append(prefetcher.start(step))
            for ids in step.values():
                ids[:] = 0  # the caller's arrays are its own again
        found: list = [None] * len(tickets)
        for i in rng.permutation(len(tickets)):
            found[i] = tickets[i].result()
        total = prefetcher.report()
    for rows, ids in zip(found, wanted, strict=True):
        assert_rows(rows, whole, ids)
    unique = [np.unique(ids).size for step in wanted for ids in step.values()]
    row_bytes = {table.row_bytes for table in opened.values()}.pop()
    assert total.steps == len(wanted)
    assert total.rows_asked == sum(ids.size for step in wanted for ids in step.values())
    assert total.rows_read == sum(unique)
    assert total.rows_read < total.rows_asked / 10
    assert total.bytes_read == total.rows_read * row_bytes


def test_no_two_steps_share_memory(tables):
    """Rows held from earlier steps stay what they were, and lie elsewhere than later ones."""
    opened, whole = tables
    ids = {layer: np.arange(24, dtype=np.int32).reshape(1, 1, 24) for layer in opened}
    other = {layer: wanted + 100 for layer, wanted in ids.items()}
    with Prefetcher(opened) as prefetcher:
        steps = [prefetcher.start(ids if i % 2 == 0 else other) for i in range(8)]
        found = [step.result() for step in steps]
    for i, rows in enumerate(found):
        assert_rows(rows, whole, ids if i % 2 == 0 else other)
    leaves = jax.tree.leaves(found)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_each_row_is_read_once_and_shapes_do_not_depend_on_it(tables):
    opened, whole = tables
    layer = TEXT.engram_layer_ids[0]
    table = Recorded(opened[layer])
    with Prefetcher({layer: table}) as prefetcher:
        for ids in ([[7, 7, 3], [3, 7, 7]], [[1, 2, 3], [4, 5, 6]], [[9, 9, 9], [9, 9, 9]]):
            wanted = {layer: np.array(ids, np.int32)}
            assert_rows(prefetcher.start(wanted).result(), whole, wanted)
    assert [asked.tolist() for asked in table.asked] == [[3, 7, 7, 7, 7, 7], [1, 2, 3, 4, 5, 6], [9] * 6]


def test_errors_reach_the_caller(tables):
    opened, _ = tables
    layer = TEXT.engram_layer_ids[0]
    rows = opened[layer].rows

    class Broken(Recorded):
        def lookup(self, ids):
            raise OSError("the disk is gone")

    with Prefetcher({layer: Broken(opened[layer])}) as prefetcher:
        with pytest.raises(IndexError, match=f"row {rows} of a table of {rows} rows"):
            prefetcher.start({layer: np.array([3, rows])})
        with pytest.raises(IndexError, match="row -1 of"):
            prefetcher.start({layer: np.array([-1, 3])})
        with pytest.raises(KeyError):
            prefetcher.start({5: np.array([3])})
        ticket = prefetcher.start({layer: np.array([3])})
        with pytest.raises(OSError, match="the disk is gone"):
            ticket.result()


class Output:
    """Stands for a device's output that is there from some moment on."""

    def __init__(self) -> None:
        self.ready = threading.Event()

    def is_ready(self) -> bool:
        return self.ready.is_set()


def test_time_behind_the_first_layer_is_hidden_and_the_rest_is_not(tables):
    opened, _ = tables
    layer = TEXT.engram_layer_ids[0]
    table, ids = Recorded(opened[layer]), {layer: np.arange(6, dtype=np.int32)}
    with Prefetcher({layer: table}) as prefetcher:
        prefetcher.start(ids).result()  # compiled

        def spent(read_s: float, layer_s: float | None, before_s: float = 0.0):
            """A read that ends after ``read_s``, beside a first layer that does after ``layer_s`` (None: none)."""
            prefetcher.reset()
            table.go.clear()
            output = Output()
            timers = [threading.Timer(read_s, table.go.set)]
            if layer_s is not None:
                timers.append(threading.Timer(layer_s, output.ready.set))
            ticket = prefetcher.start(ids)
            for timer in timers:
                timer.start()
            time.sleep(before_s)
            ticket.result(None if layer_s is None else output)
            for timer in timers:
                timer.join()
            total = prefetcher.report()
            assert total.hidden_s + total.waited_s == pytest.approx(total.lookup_s)
            assert total.lookup_s >= read_s * 0.9
            return total

        # The layer outlasts the read; the read outlasts the layer; no layer; the caller came when all was done.
        assert spent(0.05, 0.5).waited_s == 0
        assert spent(0.4, 0.1).waited_s == pytest.approx(0.3, abs=0.1)
        assert spent(0.2, None).hidden_s < 0.1
        late = spent(0.05, None, before_s=0.4)
        assert late.waited_s == 0
        assert late.hidden_s < 0.3


# Addresses


def device_rows(ids: np.ndarray, tail: np.ndarray) -> dict[int, np.ndarray]:
    """The rows that the model itself would look up for compressed ids."""
    pad = jnp.int32(TOKEN_MAP[TEXT.engram_pad_token_id])
    rows = hash_ids(ngram_hash(TEXT), lookback(jnp.asarray(ids), jnp.asarray(tail)), pad)
    return dict(zip(TEXT.engram_layer_ids, np.asarray(rows), strict=True))


def assert_ids(a: dict[int, np.ndarray], b: dict[int, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for layer in a:
        np.testing.assert_array_equal(a[layer], b[layer])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_addresses_are_the_devices(data):
    """Chunks, single tokens and drafts of which some count, padded, with image spans, in two of four slots."""
    history = NgramHistory(TEXT, TOKEN_MAP, 4)
    tail = np.full((2, TEXT.engram_max_ngram_size - 1), -1, np.int32)
    slots, width = data.draw(st.sampled_from([[0, 3], [2, 1]])), 6
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for _ in range(data.draw(st.integers(1, 5))):
        count = np.array(data.draw(st.lists(st.integers(0, width), min_size=2, max_size=2)), np.int32)
        accepted = np.array([data.draw(st.integers(0, int(n))) for n in count], np.int32)
        is_image = rng.random((2, width)) < data.draw(st.sampled_from([0.0, 0.3]))
        tokens = rng.integers(0, TEXT.vocab_size, (2, width))
        live = np.arange(width) < count[:, None]
        tokens = np.where(live, tokens, rng.choice([-1, 2**31 - 1, TEXT.vocab_size], (2, width)))
        ids = np.where(live & ~is_image, TOKEN_MAP[np.where(live, tokens, 0)], -1).astype(np.int32)
        for _ in range(2):  # looking up moves nothing
            assert_ids(history.rows(slots, tokens, count, is_image), device_rows(ids, tail))
        history.advance(slots, tokens, accepted, is_image)
        tail = np.asarray(next_tail(jnp.asarray(ids), jnp.asarray(tail), jnp.asarray(accepted)))
    # The slots that nobody named are where they were: at the start.
    fresh = np.array([[5], [6]])
    others = [slot for slot in range(4) if slot not in slots]
    start = np.full_like(tail, -1)
    assert_ids(history.rows(others, fresh, np.ones(2)), device_rows(TOKEN_MAP[fresh], start))
    history.place(slots, tail[::-1])
    assert_ids(history.rows(slots, fresh, np.ones(2)), device_rows(TOKEN_MAP[fresh], tail[::-1]))


def test_rows_of_the_reference():
    """Case C3: its image span ends one token before the prompt does, so that decode looks back on it."""
    golden = np.load(GOLDEN.parent / "engram" / "small_models.npz")
    case = {name: golden[f"tiny40.C3.{name}"] for name in ("input_ids", "token_types")}
    prefill, decode = (golden[f"tiny40.C3.{part}.engram_hash"] for part in ("prefill", "decode"))
    requests, length = prefill.shape[:2]
    history, slots = NgramHistory(TEXT, TOKEN_MAP, requests), range(requests)
    is_image, prompt = case["token_types"] != -1, case["input_ids"][:, :length]
    rows = history.rows(slots, prompt, np.full(requests, length), is_image)
    np.testing.assert_array_equal(np.stack(list(rows.values()), axis=2), prefill)
    history.advance(slots, prompt, np.full(requests, length), is_image)
    for step, wanted in enumerate(decode):
        token, one = case["input_ids"][:, length + step : length + step + 1], np.ones(requests, int)
        np.testing.assert_array_equal(np.stack(list(history.rows(slots, token, one).values()), axis=2), wanted)
        history.advance(slots, token, one)


def test_a_token_outside_the_vocabulary_is_refused():
    history = NgramHistory(TEXT, TOKEN_MAP, 1)
    for bad in (-1, TEXT.vocab_size):
        with pytest.raises(ValueError, match=f"token {bad} is not in the vocabulary of {TEXT.vocab_size}"):
            history.rows([0], np.array([[3, bad]]), np.array([2]))
