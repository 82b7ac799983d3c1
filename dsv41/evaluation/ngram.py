"""A baseline for language models: interpolated Kneser–Ney over bytes, orders 1 … n, the uniform distribution below.

Every document is a string of bytes closed by an end symbol and preceded by as many of the same symbol as the longest
context needs, so the end is predicted too, as a language model predicts its end token. With c(h·) the count of a
context in the training documents, N(h·) the number of symbols seen after it, and a discount d that depends on the
count (Chen and Goodman's three a order):

    p(w | h) = max(c(hw) − d(c(hw)), 0) / c(h·) + λ(h) · p(w | h′)        λ(h) = Σ_w d(c(hw)) / c(h·)

where h′ is h without its oldest symbol. At the highest order c counts occurrences, below it different predecessors. A
context never seen leaves p(w | h) = p(w | h′); below order 1 every symbol has probability 1/257.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

END = 256
"""The symbol that ends a document."""

SYMBOLS = 257

MAX_ORDER = 7
"""Symbols that fit into one signed 64-bit key."""


@dataclasses.dataclass(frozen=True)
class _Order:
    """The counts of one order.

    Attributes:
      grams: int64 ``[grams]``, sorted; an n-gram as a number of n digits in base 257, its last symbol the lowest.
      discounted: float64 ``[grams]``, max(c − d, 0).
      contexts: int64 ``[contexts]``, sorted: grams without their last symbol.
      totals: float64 ``[contexts]``, c(h·).
      discounts: float64 ``[contexts]``, Σ_w d(c(hw)).
    """

    grams: np.ndarray
    discounted: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    discounts: np.ndarray


class ByteModel:
    """An n-gram model of byte strings, fitted at once."""

    def __init__(self, documents: Sequence[bytes], order: int = 5) -> None:
        """Counts the documents.

        Raises:
          ValueError: the order is not in 1 … 7, or there is nothing to count.
        """
        if not 1 <= order <= MAX_ORDER:
            raise ValueError(f"order: {order} is not in 1 … {MAX_ORDER}")
        if not documents:
            raise ValueError("documents: none to fit the model on")
        self._order = order
        grams, counts = np.unique(_grams(documents, order), return_counts=True)
        orders = [_counted(grams, counts)]
        for length in range(order - 1, 0, -1):
            # Each different gram one order above is a different predecessor of its suffix.
            grams, counts = np.unique(grams % SYMBOLS**length, return_counts=True)
            orders.append(_counted(grams, counts))
        self._orders = orders[::-1]

    def probabilities(self, grams: np.ndarray) -> np.ndarray:
        """Probability of the last symbol after the others: float64 ``[grams]``.

        Args:
          grams: int64 ``[grams]``, numbers of as many digits in base 257 as the order, the last symbol lowest.
        """
        probability = np.full(len(grams), 1 / SYMBOLS)
        for length, counted in enumerate(self._orders, start=1):
            suffixes = grams % SYMBOLS**length
            at, seen = _find(counted.grams, suffixes)
            context, known = _find(counted.contexts, suffixes // SYMBOLS)
            higher = (np.where(seen, counted.discounted[at], 0.0) + counted.discounts[context] * probability) / (
                counted.totals[context]
            )
            probability = np.where(known, higher, probability)
        return probability

    def bits(self, documents: Sequence[bytes]) -> float:
        """Code length of the documents and their ends, in bits."""
        return float(-np.log2(self.probabilities(_grams(documents, self._order))).sum())


def bits_per_byte(train: Sequence[str | bytes], held_out: Sequence[str | bytes], order: int = 5) -> float:
    """Bits of the held-out documents and their ends, per byte of their text (UTF-8).

    Raises:
      ValueError: see :class:`ByteModel`; or the held-out documents have no bytes.
    """
    fitted, measured = _as_bytes(train), _as_bytes(held_out)
    total = sum(map(len, measured))
    if not total:
        raise ValueError(f"held_out: {len(measured)} documents without a byte")
    return ByteModel(fitted, order).bits(measured) / total


def _as_bytes(documents: Sequence[str | bytes]) -> list[bytes]:
    return [document.encode() if isinstance(document, str) else document for document in documents]


def _grams(documents: Sequence[bytes], order: int) -> np.ndarray:
    """The gram of every byte and every end: int64 ``[bytes + documents]``."""
    # order − 1 ends between two documents, at least one: no context reaches into the document before.
    margin = max(order - 1, 1)
    padding = np.full(margin, END, np.int64)
    parts = [part for document in documents for part in (np.frombuffer(document, np.uint8), padding)]
    symbols = np.concatenate([padding, *parts]).astype(np.int64)
    grams = np.zeros(len(symbols) - order + 1, np.int64)
    for offset in range(order):
        grams = grams * SYMBOLS + symbols[offset : offset + len(grams)]
    # Of the ends between two documents the first is predicted, the others are context only.
    predicted = symbols != END
    predicted[margin + np.cumsum([len(document) + margin for document in documents]) - margin] = True
    return grams[predicted[order - 1 :]]


def _counted(grams: np.ndarray, counts: np.ndarray) -> _Order:
    d = _discounts(counts)[np.minimum(counts, 3)]
    contexts, first = np.unique(grams // SYMBOLS, return_index=True)  # sorted grams: a context's grams are neighbours
    return _Order(
        grams=grams,
        discounted=np.maximum(counts - d, 0.0),
        contexts=contexts,
        totals=np.add.reduceat(counts.astype(np.float64), first),
        discounts=np.add.reduceat(np.minimum(d, counts), first),
    )


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Discounts of counts 0, 1, 2 and 3 or more: float64 ``[4]``, from the numbers of grams that occur 1 … 4 times.

    An estimate is brought into 0.05 … count: without any discount a symbol not seen in a context would be impossible.
    """
    n1, n2, n3, n4 = (int(np.count_nonzero(counts == count)) for count in (1, 2, 3, 4))
    if not n1 or not n2 or not n3:
        # So few grams that the estimates do not exist, as at order 1, where nearly all symbols are frequent.
        return np.array([0.0, 0.5, 0.5, 0.5])
    y = n1 / (n1 + 2 * n2)
    estimates = [1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
    return np.concatenate([[0.0], np.clip(estimates, 0.05, [1, 2, 3])])


def _find(sorted_keys: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A valid index for each key, and whether the key is there."""
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return at, sorted_keys[at] == keys
