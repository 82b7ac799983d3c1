"""From texts to packed batches: read, tokenise, hold out, pack, shuffle; the same batches wherever a run resumes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from dsv41.tokens.tokenizer import Tokenizer
from dsv41.training.corpora import CORPORA, DataError, corpus, split
from dsv41.training.packing import Documents, Packing, empty_row, pack, row_arrays

Batch = dict[str, np.ndarray]
"""``tokens``, ``targets``, ``documents``: int32 ``[rows, length]``, see :func:`~dsv41.training.packing.row_arrays`."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What a run trains on.

    Attributes:
      length: columns of a row; a document that is longer is cut.
      batch_rows: rows of a batch over all processes together.
      corpus: name of a packaged corpus (:data:`~dsv41.training.corpora.CORPORA`), or None.
      files: in place of a corpus: ``.txt`` (a file is a document), ``.jsonl`` (a line is an object with ``text``) or
        ``.npy`` (one-dimensional token ids, each document closed by the end token).
      holdout: share of the documents that is held out, see :func:`~dsv41.training.corpora.split`.
      seed: of the rows' order.
    """

    length: int
    batch_rows: int
    corpus: str | None = None
    files: tuple[pathlib.Path, ...] = ()
    holdout: float = 0.04
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.corpus is None) == (not self.files):
            raise DataError(f"corpus: {self.corpus!r} and files {[*map(str, self.files)]}: give one of the two")
        if self.corpus is not None and self.corpus not in CORPORA:
            raise DataError(f"corpus: {self.corpus!r} is none of {', '.join(sorted(CORPORA))}")
        for field in ("length", "batch_rows"):
            if getattr(self, field) < 1:
                raise DataError(f"{field}: {getattr(self, field)} is not positive")
        if not 0 <= self.seed < 2**32:
            raise DataError(f"seed: {self.seed} is not in 0 … 2³² − 1")
        if not 0 <= self.holdout <= 0.5:
            raise DataError(f"holdout: {self.holdout} is not a share in 0 … 0.5")


def load_texts(config: DataConfig) -> tuple[list[str], list[str]]:
    """Training and held-out texts, for training a tokenizer or a baseline.

    Raises:
      DataError: the corpus is not installed, a file is malformed or holds tokens, or there is nothing to hold out.
      OSError: a file cannot be read.
    """
    if config.corpus is not None:
        return split(corpus(config.corpus), config.holdout, CORPORA[config.corpus].parallel)
    texts: list[str] = []
    for path in config.files:
        if path.suffix == ".txt":
            texts.append(_utf8(path))
        elif path.suffix == ".jsonl":
            texts.extend(_json_lines(path))
        else:
            raise DataError(f"files: {path}: {path.suffix!r} where text is needed: .txt or .jsonl")
    return split(texts, config.holdout)


def load_documents(config: DataConfig, tokenizer: Tokenizer, begin: int, end: int) -> tuple[Documents, Documents]:
    """Training and held-out documents as tokens.

    Args:
      tokenizer: of the model; for ``.npy`` files it counts the text's bytes.
      begin, end: ids of the tokens that every document begins and ends with.

    Raises:
      DataError: see :func:`load_texts`; also files of tokens and of text together, ids outside of the vocabulary, or
        a last document without its end.
      OSError: a file cannot be read.
    """
    if not any(path.suffix == ".npy" for path in config.files):
        train, held_out = load_texts(config)
        return _from_texts(train, tokenizer, begin, end), _from_texts(held_out, tokenizer, begin, end)
    if any(path.suffix != ".npy" for path in config.files):
        raise DataError(f"files: {[*map(str, config.files)]}: all of them .npy or none")
    documents = [document for path in config.files for document in _token_file(path, tokenizer.vocab_size, end)]
    train, held_out = split(documents, config.holdout)
    return _from_tokens(train, tokenizer, begin, end), _from_tokens(held_out, tokenizer, begin, end)


class TrainingBatches:
    """One process's share of an endless sequence of batches; an iterator of :data:`Batch` with ``batch_rows /
    process_count`` rows.

    All rows pass once in an order drawn from the seed, then in another order, and so on; batches run on over the seam.
    Batch b is the same rows for every number of processes, so a run may resume with another number.
    """

    def __init__(
        self, config: DataConfig, documents: Documents, alignment: int, process_index: int = 0, process_count: int = 1
    ) -> None:
        """
        Args:
          alignment: columns at whose multiples a document may begin.
          process_index, process_count: of this process.

        Raises:
          DataError: the rows do not divide over the processes, the length is no multiple of the alignment, or there
            are no documents.
        """
        if config.batch_rows % process_count:
            raise DataError(f"batch_rows: {config.batch_rows} do not divide over {process_count} processes")
        if not len(documents):
            raise DataError("no documents to train on")
        packing = pack(documents.bounds, config.length, alignment)
        rows = grain.MapDataset.source(_Rows(documents.tokens, packing)).seed(config.seed).shuffle().repeat()
        batches = rows[process_index::process_count].batch(config.batch_rows // process_count)
        # Rows are copied out of memory: one thread a few batches ahead keeps up with any device.
        self._iterator = iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))
        self._fingerprint = _fingerprint(config, documents, alignment)
        self._rows = len(packing)
        self._batch_rows = config.batch_rows

    @property
    def rows(self) -> int:
        """Packed rows of one pass over the documents."""
        return self._rows

    @property
    def passes(self) -> float:
        """How often the documents have been passed so far."""
        return self._iterator.get_state()["next_index"] * self._batch_rows / self._rows

    def __iter__(self) -> TrainingBatches:
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """The position, as JSON has it: after :meth:`set_state` with it the same batches follow."""
        return {"batch": self._iterator.get_state()["next_index"], "data": self._fingerprint}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position.

        Raises:
          DataError: it belongs to other documents, another packing or another seed.
        """
        if state["data"] != self._fingerprint:
            raise DataError(
                f"the position belongs to data {state['data']}, these are {self._fingerprint}: other documents, "
                "length, batch_rows, alignment or seed"
            )
        self._iterator.set_state({"next_index": state["batch"]})


def held_out_batches(
    config: DataConfig, documents: Documents, alignment: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """One pass over the documents in a fixed order; the last batch is filled up with rows of padding.

    Every token but the begin tokens is a target exactly once, over all processes together; every process gets equally
    many batches. Arguments and errors as of :class:`TrainingBatches`; no documents give no batches.
    """
    if config.batch_rows % process_count:
        raise DataError(f"batch_rows: {config.batch_rows} do not divide over {process_count} processes")
    rows = _Rows(documents.tokens, pack(documents.bounds, config.length, alignment))
    for first in range(0, len(rows), config.batch_rows):
        batch = [
            rows[row] if row < len(rows) else empty_row(config.length)
            for row in range(first + process_index, first + config.batch_rows, process_count)
        ]
        yield {name: np.stack([row[name] for row in batch]) for name in batch[0]}


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Packed rows by their number: the source of the pipeline."""

    tokens: np.ndarray
    packing: Packing

    def __len__(self) -> int:
        return len(self.packing)

    def __getitem__(self, row: int) -> Batch:
        return row_arrays(self.tokens, self.packing, row)


def _fingerprint(config: DataConfig, documents: Documents, alignment: int) -> str:
    """Eight hexadecimal digits over all that decides which batch follows which."""
    numbers = np.array([config.length, config.batch_rows, config.seed, alignment], np.int64)
    checksum = zlib.crc32(numbers.tobytes())
    for array in (documents.bounds, documents.tokens):
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return f"{checksum:08x}"


def _flat(documents: Sequence[np.ndarray], text_bytes: int) -> Documents:
    bounds = np.concatenate([[0], np.cumsum([len(document) for document in documents], dtype=np.int64)])
    tokens = np.concatenate([np.zeros(0, np.int32), *documents])
    return Documents(tokens, bounds.astype(np.int64), text_bytes)


def _from_texts(texts: Sequence[str], tokenizer: Tokenizer, begin: int, end: int) -> Documents:
    documents = [np.array([begin, *ids, end], np.int32) for ids in tokenizer.encode_batch(texts)]
    return _flat(documents, sum(len(text.encode()) for text in texts))


def _from_tokens(documents: Sequence[np.ndarray], tokenizer: Tokenizer, begin: int, end: int) -> Documents:
    sizes = np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)])
    sizes[[begin, end]] = 0
    begun = [
        document if document[0] == begin else np.concatenate([np.array([begin], np.int32), document])
        for document in documents
    ]
    return _flat(begun, int(sum(sizes[document].sum() for document in begun)))


def _token_file(path: pathlib.Path, vocab_size: int, end: int) -> list[np.ndarray]:
    """Documents of a ``.npy`` file, their end tokens included."""
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise DataError(f"files: {path}: no array of token ids: {error}") from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(f"files: {path}: {tokens.dtype} {list(tokens.shape)} where integers [tokens] are needed")
    if not len(tokens):
        return []
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise DataError(f"files: {path}: ids {tokens.min()} … {tokens.max()} outside of 0 … {vocab_size - 1}")
    if tokens[-1] != end:
        raise DataError(f"files: {path}: ends with token {tokens[-1]}, not with the end token {end}")
    ends = np.flatnonzero(tokens == end) + 1
    return np.split(tokens.astype(np.int32), ends[:-1])


def _utf8(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"files: {path}: not UTF-8: {error}") from error


def _json_lines(path: pathlib.Path) -> Iterator[str]:
    for number, line in enumerate(_utf8(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"files: {path}, line {number}: no object with a text: {error}") from error
        if not isinstance(text, str):
            raise DataError(f"files: {path}, line {number}: text is {text!r}, not a string")
        yield text
