"""Training a small vocabulary in the official layout, for models that are trained here."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from dsv41.tokens.compression import token_map
from dsv41.tokens.tokenizer import TOKENIZER_FILE, Tokenizer, TokenizerError

BEGIN, END, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
NOISE, IMAGE = "<｜noise｜>", "<｜image2｜>"

FIRST_TOKENS = (BEGIN, END, PAD)
"""Ids 0, 1, 2, as in the official vocabulary."""

LAST_TOKENS = (NOISE, IMAGE)
"""The highest ids: DSpark's input at positions that are not drafted yet, and a picture's place in the sequence."""


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    first: Sequence[str] = FIRST_TOKENS,
    last: Sequence[str] = LAST_TOKENS,
) -> Tokenizer:
    """Byte-level BPE of exactly ``vocab_size`` tokens; equal texts in equal order give equal vocabularies.

    The ids are ``first``, the 256 bytes, the merges from the most frequent on, ``last``. Words do not cross spaces,
    digits stand in groups of up to three.

    Raises:
      TokenizerError: the size leaves no room for bytes and special tokens, or the texts have too few pairs to fill it.
    """
    smallest = 256 + len(first) + len(last)
    if vocab_size < smallest:
        raise TokenizerError(f"vocab_size: {vocab_size} is below {smallest}: 256 bytes and the special tokens")
    vocabulary = tokenizers.Tokenizer(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    vocabulary.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(last),
        special_tokens=list(first),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vocabulary.train_from_iterator(texts, trainer)
    vocabulary.add_special_tokens(list(last))
    size = vocabulary.get_vocab_size(with_added_tokens=True)
    if size != vocab_size:
        raise TokenizerError(f"vocab_size: {vocab_size}, but the texts give no more than {size} tokens")
    return Tokenizer(vocabulary)


def save_tokenizer(tokenizer: Tokenizer, directory: pathlib.Path) -> pathlib.Path:
    """Writes ``tokenizer.json`` into the directory (created if need be), whole or not at all; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / TOKENIZER_FILE
    descriptor, partial = tempfile.mkstemp(dir=directory, prefix=f".{TOKENIZER_FILE}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(tokenizer.to_json())
        pathlib.Path(partial).chmod(0o644)
        os.replace(partial, path)
    except BaseException:
        pathlib.Path(partial).unlink(missing_ok=True)
        raise
    return path


def vocabulary_fields(tokenizer: Tokenizer) -> dict[str, Any]:
    """The part of a ``config.json`` that follows from the vocabulary: special ids, sizes, compressed size.

    Raises:
      TokenizerError: the vocabulary lacks one of the five special tokens.
    """
    ids = {form: tokenizer.token_id(form) for form in (*FIRST_TOKENS, *LAST_TOKENS)}
    missing = [form for form, token in ids.items() if token is None]
    if missing:
        raise TokenizerError(f"the vocabulary of {tokenizer.vocab_size} tokens has no {' '.join(missing)}")
    return {
        "bos_token_id": ids[BEGIN],
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
        "image_token_id": ids[IMAGE],
        "text_config": {
            "vocab_size": tokenizer.vocab_size,
            "engram_pad_token_id": ids[PAD],
            "engram_compressed_vocab_size": int(token_map(tokenizer).max()) + 1,
            "dspark_noise_token_id": ids[NOISE],
        },
    }
