"""Packing documents into rows: which piece of which document lies at which column, and a row's arrays.

Documents are one flat array of tokens with bounds, so that a plan over them is a few integers a piece.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from dsv41.training.corpora import DataError

IGNORED = -1
"""Target without a loss; also the document of a padding column."""


@dataclasses.dataclass(frozen=True)
class Documents:
    """Tokenised documents, one after the other.

    Attributes:
      tokens: int32 ``[total]``; each document begins with the begin token and ends with the end token.
      bounds: int64 ``[documents + 1]``; document i is ``tokens[bounds[i] : bounds[i + 1]]``.
      text_bytes: UTF-8 bytes of all texts, begin and end tokens not counted.
    """

    tokens: np.ndarray
    bounds: np.ndarray
    text_bytes: int

    def __len__(self) -> int:
        return len(self.bounds) - 1


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where the pieces of documents lie, sorted by row and column.

    Attributes:
      begins: int64 ``[pieces]``, index of a piece's first token in the documents' flat array.
      counts: int32 ``[pieces]``, tokens of a piece; ``1 … length``.
      columns: int32 ``[pieces]``, column of its first token: a multiple of the alignment.
      continued: bool ``[pieces]``, the document goes on in another piece.
      rows: int64 ``[rows + 1]``; row r holds the pieces ``rows[r] : rows[r + 1]``.
      length: columns of a row.
    """

    begins: np.ndarray
    counts: np.ndarray
    columns: np.ndarray
    continued: np.ndarray
    rows: np.ndarray
    length: int

    def __len__(self) -> int:
        return len(self.rows) - 1


def pack(bounds: np.ndarray, length: int, alignment: int) -> Packing:
    """Packs documents into rows by best fit, longest piece first: each goes where the least space is left over.

    A document that is longer than a row is cut into rows; what is left is a piece of its own. The result depends on
    nothing but the arguments.

    Args:
      bounds: of the documents, see :class:`Documents`.
      length: columns of a row.
      alignment: pieces begin at its multiples.

    Raises:
      DataError: the length is no positive multiple of the alignment.
    """
    if length < 1 or alignment < 1 or length % alignment:
        raise DataError(f"length: {length} is no multiple of {alignment}, to which documents are aligned")
    begins, counts, continued = _cut(np.asarray(bounds, np.int64), length)
    order = np.argsort(-counts, kind="stable")
    row_of, column_of = np.empty(len(counts), np.int64), np.empty(len(counts), np.int64)
    open_rows: dict[int, list[int]] = {}  # columns left -> rows that have so many left
    spaces: list[int] = []  # the keys of open_rows, sorted
    row_count = 0
    for piece in order.tolist():
        width = -(-int(counts[piece]) // alignment) * alignment
        at = bisect.bisect_left(spaces, width)
        if at < len(spaces):
            space = spaces[at]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space], spaces[at]
        else:
            space, row = length, row_count
            row_count += 1
        row_of[piece], column_of[piece] = row, length - space
        left = space - width
        if left and left not in open_rows:
            bisect.insort(spaces, left)
            open_rows[left] = []
        if left:
            open_rows[left].append(row)
    order = np.lexsort((column_of, row_of))
    return Packing(
        begins=begins[order],
        counts=counts[order].astype(np.int32),
        columns=column_of[order].astype(np.int32),
        continued=continued[order],
        rows=np.searchsorted(row_of[order], np.arange(row_count + 1)),
        length=length,
    )


def _cut(bounds: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First token, number of tokens and "goes on" of all pieces, in the documents' order."""
    sizes = np.diff(bounds)
    pieces = -(-sizes // length)
    document = np.repeat(np.arange(len(sizes)), pieces)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begins = bounds[document] + nth * length
    counts = np.minimum(bounds[document + 1] - begins, length)
    return begins, counts, nth + 1 < pieces[document]


def row_arrays(tokens: np.ndarray, packing: Packing, row: int) -> dict[str, np.ndarray]:
    """One packed row: int32 ``[length]`` each.

    Where a document is cut, the last token of the piece still has its target, the first token of the next piece: a
    pass over all rows then predicts each token but the begin tokens exactly once.

    Args:
      tokens: flat array of the documents.
      row: 0 … rows − 1.

    Returns:
      ``tokens``: ids, 0 at padding. ``targets``: the next token of the same document, −1 at its last token and at
      padding. ``documents``: the column at which the token's piece begins, −1 at padding.
    """
    out = empty_row(packing.length)
    for piece in range(packing.rows[row], packing.rows[row + 1]):
        begin, count, column = int(packing.begins[piece]), int(packing.counts[piece]), int(packing.columns[piece])
        followed = count if packing.continued[piece] else count - 1
        out["tokens"][column : column + count] = tokens[begin : begin + count]
        out["targets"][column : column + followed] = tokens[begin + 1 : begin + 1 + followed]
        out["documents"][column : column + count] = column
    return out


def empty_row(length: int) -> dict[str, np.ndarray]:
    """A row of padding, by which a last batch is filled up; see :func:`row_arrays`."""
    return {
        "tokens": np.zeros(length, np.int32),
        "targets": np.full(length, IGNORED, np.int32),
        "documents": np.full(length, IGNORED, np.int32),
    }
