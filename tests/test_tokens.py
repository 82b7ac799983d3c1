"""The vocabulary, streamed decoding and token compression, against the official numbers."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.config import load_config
from dsv41.tokens.compression import token_map
from dsv41.tokens.tokenizer import StreamDecoder, Tokenizer

ROOT = pathlib.Path(__file__).parent
DATA = ROOT / "data" / "engram"
OFFICIAL = json.loads((DATA / "engram_official.json").read_text())
CONFIG = load_config(ROOT.parent / "configs" / "deepseek-v4.1-flash")
SENTENCES = sorted(OFFICIAL["sentences"])
TOKENIZER = Tokenizer()
# Tokens that hold only a part of a character: the ones that streaming and compression must take care of.
FRAGMENTS = [i for i in range(TOKENIZER.vocab_size) if "\ufffd" in TOKENIZER.token_text(i)]


@pytest.fixture(scope="module")
def compressed() -> np.ndarray:
    return token_map(TOKENIZER)


def test_vocabulary_is_the_configs():
    assert TOKENIZER.vocab_size == CONFIG.text.vocab_size == 129_280
    assert TOKENIZER.token_form(CONFIG.bos_token_id) == "<｜begin▁of▁sentence｜>"
    assert TOKENIZER.token_form(CONFIG.eos_token_id) == "<｜end▁of▁sentence｜>"
    assert TOKENIZER.token_form(CONFIG.text.engram_pad_token_id) == "<｜▁pad▁｜>"
    assert TOKENIZER.token_form(CONFIG.image_token_id) == "<｜image2｜>"
    forms = {TOKENIZER.token_form(i) for i in range(TOKENIZER.vocab_size)}
    assert len(forms) == TOKENIZER.vocab_size


@pytest.mark.parametrize("name", SENTENCES)
def test_encodes_as_the_official_tokenizer(name):
    sentence = OFFICIAL["sentences"][name]
    assert TOKENIZER.encode(sentence["text"]) == sentence["token_ids"]
    assert TOKENIZER.decode(sentence["token_ids"]) == sentence["text"]


def test_special_strings_in_a_text_are_tokens_and_none_is_added():
    assert TOKENIZER.encode("") == []
    ids = TOKENIZER.encode("a<｜end▁of▁sentence｜>b")
    assert ids == [*TOKENIZER.encode("a"), CONFIG.eos_token_id, *TOKENIZER.encode("b")]
    assert TOKENIZER.decode(ids) == "a<｜end▁of▁sentence｜>b"


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_and_bytes_add_up(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(np.array(ids, np.int32)) == text
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("token", [-1, 129_280, 2**40])
def test_unknown_ids_are_refused(token):
    decoder = StreamDecoder(TOKENIZER)
    reads = (TOKENIZER.token_text, TOKENIZER.token_form, TOKENIZER.token_bytes, decoder.push)
    for read in (*reads, lambda i: TOKENIZER.decode([5, i])):
        with pytest.raises(ValueError, match=f"{token} is not in the vocabulary"):
            read(token)


def _stream(ids: list[int]) -> list[str]:
    decoder = StreamDecoder(TOKENIZER)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.integers(0, TOKENIZER.vocab_size - 1))))
def test_stream_equals_decoding_at_once(ids):
    assert "".join(_stream(ids)) == TOKENIZER.decode(ids)


def test_stream_holds_back_exactly_the_unfinished_character():
    text = "né 深度 😀🧿𝒳!"
    ids = TOKENIZER.encode(text)
    assert set(ids) & set(FRAGMENTS)
    raw, shown = b"", ""
    for token, piece in zip(ids, _stream(ids), strict=False):
        raw, shown = raw + TOKENIZER.token_bytes(token), shown + piece
        assert shown == raw.decode(errors="ignore")
    assert shown == text


def test_stream_finish_reports_the_cut_character_and_starts_anew():
    decoder = StreamDecoder(TOKENIZER)
    first, second = TOKENIZER.encode("😀")
    assert decoder.push(first) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.push(first) + decoder.push(second) == "😀"
    assert decoder.finish() == ""


def test_token_map_is_the_official_one(compressed):
    # The file marks ids that open a new key by -1 and gives the compressed id of all others.
    repeats = np.load(DATA / "token_map_official.npz")["repeats"]
    official = np.where(repeats < 0, np.cumsum(repeats < 0) - 1, repeats)
    np.testing.assert_array_equal(compressed, official)
    assert compressed.dtype == np.int32
    assert compressed.max() + 1 == CONFIG.text.engram_compressed_vocab_size == 99_092
    assert compressed[CONFIG.text.engram_pad_token_id] == OFFICIAL["pad_compressed_id"]


@pytest.mark.parametrize("name", SENTENCES)
def test_compressed_sentences(compressed, name):
    sentence = OFFICIAL["sentences"][name]
    assert compressed[TOKENIZER.encode(sentence["text"])].tolist() == sentence["compressed_ids"]


def test_compression_joins_case_accents_and_white_space_only(compressed):
    def key(text: str) -> int:
        (token,) = TOKENIZER.encode(text)
        return int(compressed[token])

    assert key("The") == key(" the") == key(" THE")
    assert key(" ") == key("\n") == key("\t") == key("  ")
    assert len({key("the"), key("a"), key(" "), key("<think>")}) == 4
    # Nothing is left of a lone vowel sign or combining accent: such tokens keep their own text as key.
    assert len({key("ा"), key("ি"), key(" ")}) == 3
