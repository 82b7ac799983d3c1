"""Token compression: tokens whose texts differ only in case, accents, width or white space share one id.

The Engram hash reads compressed ids, so that ``The``, `` the`` and ``THE`` find the same n-gram rows.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Regex, normalizers

from dsv41.tokens.tokenizer import Tokenizer

# A private-use character that keeps a lone space from being stripped; it is in no token's text.
_LONE_SPACE = "\ue000"


def _normalizer() -> normalizers.Normalizer:
    # The library's tables, not Python's: what counts as an accent or as white space differs (Indic vowel signs,
    # the separators U+001C..U+001F), and with Python it would change with the interpreter's Unicode version.
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def token_map(tokenizer: Tokenizer) -> np.ndarray:
    """Compressed id of every token: ``[vocab]`` int32, numbered in the order in which a new key is first seen.

    The key of a token is its normalised text; its plain text if nothing is left of it; and the vocabulary's own
    spelling if the token is no whole UTF-8 text. Added tokens are treated like all others.
    Takes about a second for the official vocabulary, which gives 99,092 distinct ids.
    """
    normalizer = _normalizer()
    numbers: dict[str, int] = {}
    compressed = np.empty(tokenizer.vocab_size, np.int32)
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_text(token)
        key = tokenizer.token_form(token) if "\ufffd" in text else normalizer.normalize_str(text) or text
        compressed[token] = numbers.setdefault(key, len(numbers))
    return compressed
