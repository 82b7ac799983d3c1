"""Engram's n-gram hash against the reference's numbers, Python's integers and itself across cuts."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.config import ConfigError, TextConfig, load_config
from dsv41.numerics.ngram_hash import (
    BLOCKED,
    NgramHash,
    hash_ids,
    hash_ids_host,
    lookback,
    next_tail,
    ngram_hash,
)

ROOT = pathlib.Path(__file__).parent
DATA = ROOT / "data" / "engram"
OFFICIAL = json.loads((DATA / "engram_official.json").read_text())
SMALL = json.loads((DATA / "small_models.json").read_text())
TEXT = load_config(ROOT.parent / "configs" / "deepseek-v4.1-flash").text
PAD = OFFICIAL["pad_compressed_id"]

_device_hash = jax.jit(hash_ids, static_argnums=0)
_lookback = jax.jit(lookback)
_next_tail = jax.jit(next_tail)


def _small(name: str) -> TextConfig:
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in SMALL[name].items()}
    return dataclasses.replace(TEXT, **fields)


def _start(batch: int, order: int) -> jax.Array:
    return jnp.full((batch, order - 1), BLOCKED, jnp.int32)


def _hash_sequence(constants: NgramHash, ids: np.ndarray, pad: int) -> np.ndarray:
    """``[batch, query, layers, columns]`` (the goldens' order) of whole sequences, device and host checked equal."""
    seen = _lookback(jnp.asarray(ids, jnp.int32), _start(ids.shape[0], constants.order))
    rows = np.asarray(_device_hash(constants, seen, jnp.int32(pad)))
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(rows, hash_ids_host(constants, np.asarray(seen), pad))
    return np.moveaxis(rows, 0, -2)


def test_official_constants():
    constants = ngram_hash(TEXT)
    for i, layer in enumerate(str(n) for n in TEXT.engram_layer_ids):
        assert constants.multipliers[i].tolist() == OFFICIAL["multipliers"][layer]
        assert constants.primes[i].tolist() == np.ravel(OFFICIAL["primes"][layer]).tolist()
        assert constants.offsets[i].tolist() == OFFICIAL["offsets"][layer]
    assert constants.primes.sum(axis=1).tolist() == OFFICIAL["prime_sums"]
    assert (constants.multipliers < 2 * OFFICIAL["multiplier_bound"]).all()
    assert ngram_hash(dataclasses.replace(TEXT)) is constants


@pytest.mark.parametrize("text", [TEXT, _small("mini8"), _small("tiny40")], ids=["official", "mini8", "tiny40"])
def test_products_stay_below_63_bits(text):
    largest = int(ngram_hash(text).multipliers.max())
    assert largest * (text.engram_compressed_vocab_size - 1) < 2**63


@pytest.mark.parametrize("name", sorted(OFFICIAL["sentences"]))
def test_official_sentences(name):
    sentence = OFFICIAL["sentences"][name]
    rows = _hash_sequence(ngram_hash(TEXT), np.array([sentence["compressed_ids"]]), PAD)
    np.testing.assert_array_equal(rows[0], sentence["hash_ids"])


def test_official_masked_example():
    example = OFFICIAL["masked_example"]
    english = OFFICIAL["sentences"]["english"]
    length = len(example["token_ids"])
    assert example["token_ids"] == english["token_ids"][:length]
    ids = np.where(example["token_mask"], english["compressed_ids"][:length], BLOCKED)
    rows = _hash_sequence(ngram_hash(TEXT), ids[None], PAD)
    np.testing.assert_array_equal(rows[0], example["hash_ids"])


@pytest.mark.parametrize("case", ["A", "C1", "C2", "C3"])
@pytest.mark.parametrize("model", ["mini8", "tiny40"])
def test_small_models_prefill_and_decode(model, case):
    golden = np.load(DATA / "small_models.npz")
    text = _small(model)
    token_map = golden[f"{model}.token_map"]
    ids = token_map[golden[f"{model}.{case}.input_ids"]]
    prefill, decode = (golden[f"{model}.{case}.{part}.engram_hash"] for part in ("prefill", "decode"))
    length = prefill.shape[1]
    if case != "A":
        is_image = golden[f"{model}.{case}.token_types"] != -1
        assert is_image.any()
        ids[:, :length][is_image] = BLOCKED
    rows = _hash_sequence(ngram_hash(text), ids, int(token_map[text.engram_pad_token_id]))
    np.testing.assert_array_equal(rows[:, :length], prefill)
    np.testing.assert_array_equal(rows[:, length:], decode[:, :, 0].swapaxes(0, 1))


# Largest primes below powers of two, so that every step width of the remainder occurs.
PRIMES = {8: 251, 16: 65521, 20: 1048573, 24: 16777213, 28: 268435399, 31: 2**31 - 1}


@pytest.mark.parametrize("bits", PRIMES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_device_equals_pythons_integers(bits, data):
    """Ids up to the compressed vocabulary, products up to 2⁶³, primes of every size."""
    vocabulary = data.draw(st.sampled_from([2, 347, TEXT.engram_compressed_vocab_size, 2**31]))
    bound = (2**63 - 1) // vocabulary // 2
    factor = st.one_of(st.just(2 * bound - 1), st.integers(0, bound - 1).map(lambda x: 2 * x + 1))
    multipliers = np.array([data.draw(st.lists(factor, min_size=3, max_size=3)) for _ in range(2)], np.int64)
    prime = PRIMES[bits]
    primes = np.array([[prime, 3, 2, prime], [prime, prime, 5, 7]], np.int64)
    constants = NgramHash(multipliers, primes, np.zeros_like(primes))
    one_id = st.one_of(st.just(BLOCKED), st.just(vocabulary - 1), st.integers(0, vocabulary - 1))
    seen = np.array([data.draw(st.lists(one_id, min_size=3, max_size=3)) for _ in range(2)], np.int32)
    pad = data.draw(st.integers(0, vocabulary - 1))

    expected = np.empty((2, 2, 4), np.int64)
    for layer, position, column in np.ndindex(expected.shape):
        value = 0
        for i in range(column // 2 + 2):
            token = int(seen[position, i])
            value ^= (pad if token < 0 else token) * int(multipliers[layer, i])
        expected[layer, position, column] = value % int(primes[layer, column])
    np.testing.assert_array_equal(hash_ids_host(constants, seen, pad), expected)
    np.testing.assert_array_equal(hash_ids(constants, jnp.asarray(seen), jnp.int32(pad)), expected)


_LENGTH = 20
_ids = st.lists(st.one_of(st.integers(0, 99_091), st.just(BLOCKED)), min_size=_LENGTH, max_size=_LENGTH)


def _padded(row: np.ndarray) -> np.ndarray:
    return np.concatenate([row, np.full(_LENGTH - len(row), 77)]).astype(np.int32)


@settings(max_examples=15, deadline=None)
@given(rows=st.lists(_ids, min_size=2, max_size=2))
def test_cut_anywhere_gives_the_same_hashes(rows):
    """Every cut of a 20-token text, the rows of a batch cut at different places, chunks padded with strangers."""
    constants = ngram_hash(TEXT)
    whole = _hash_sequence(constants, np.array(rows), PAD)
    for cut in range(_LENGTH + 1):
        cuts = [cut, _LENGTH - cut]
        head = np.stack([_padded(np.array(row[:c])) for row, c in zip(rows, cuts, strict=True)])
        rest = np.stack([_padded(np.array(row[c:])) for row, c in zip(rows, cuts, strict=True)])
        tail = _next_tail(head, _start(2, constants.order), jnp.array(cuts, jnp.int32))
        first = _device_hash(constants, _lookback(head, _start(2, constants.order)), jnp.int32(PAD))
        second = _device_hash(constants, _lookback(rest, tail), jnp.int32(PAD))
        for b, c in enumerate(cuts):
            joined = np.concatenate([first[:, b, :c], second[:, b, : _LENGTH - c]], axis=1)
            np.testing.assert_array_equal(np.moveaxis(joined, 0, -2), whole[b])


@settings(max_examples=15, deadline=None)
@given(row=_ids)
def test_token_by_token_equals_the_whole(row):
    """Decode steps: chunks of one token, the tail carried along; a step that consumes nothing changes nothing."""
    whole = np.asarray(_lookback(np.array([row], np.int32), _start(1, 4)))
    tail = _start(1, 4)
    for t, token in enumerate(row):
        ids = np.array([[token]], np.int32)
        np.testing.assert_array_equal(_lookback(ids, tail)[:, 0], whole[:, t])
        np.testing.assert_array_equal(_next_tail(ids, tail, jnp.array([0])), tail)
        tail = _next_tail(ids, tail, jnp.array([1]))


def test_a_blocked_position_blocks_everything_older():
    seen = _lookback(np.array([[5, BLOCKED, 6, 7, 8, 9]], np.int32), np.array([[1, 2, 3]], np.int32))
    assert seen.tolist() == [
        [
            [5, 3, 2, 1],
            [BLOCKED] * 4,
            [6, BLOCKED, BLOCKED, BLOCKED],
            [7, 6, BLOCKED, BLOCKED],
            [8, 7, 6, BLOCKED],
            [9, 8, 7, 6],
        ]
    ]


def test_row_counts_must_be_the_prime_sums():
    wrong = (TEXT.engram_num_embeddings[0], 384_016_681)
    message = re.escape("engram_num_embeddings: [384006168, 384016681]") + ".*" + re.escape("[384006168, 384016682]")
    with pytest.raises(ConfigError, match=message):
        ngram_hash(dataclasses.replace(TEXT, engram_num_embeddings=wrong))


def test_rows_beyond_int32_are_refused():
    with pytest.raises(ConfigError, match="engram_vocab_size: 100000000"):
        ngram_hash(dataclasses.replace(TEXT, engram_vocab_size=100_000_000))
    # Two buckets of 2³⁰ − 1 would fit; the primes at or above it do not.
    sums = (1_073_741_827 + 1_073_741_831,)
    narrow = dataclasses.replace(
        TEXT,
        engram_layer_ids=(1,),
        engram_num_embeddings=sums,
        engram_max_ngram_size=2,
        engram_n_heads=2,
        engram_vocab_size=2**30 - 1,
    )
    with pytest.raises(ConfigError, match=f"engram_num_embeddings: .{sums[0]}. has rows beyond int32"):
        ngram_hash(narrow)
