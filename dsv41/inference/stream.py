"""Text of one request as it grows: whole characters only, and never a part of a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from dsv41.tokens.tokenizer import StreamDecoder, Tokenizer


class TextStream:
    """Turns tokens into pieces of text that no later token can change or cut.

    Text that may be the beginning of a stop text waits until it is known not to be one.

    Attributes:
      stopped: a stop text was found; the pieces so far are the text before it, and no more follow.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stop = tuple(stop)
        self._waiting = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        return self._take(self._decoder.push(token))

    def finish(self) -> str:
        """What was waiting, when no more tokens come."""
        piece = self._take(self._decoder.finish())
        rest, self._waiting = self._waiting, ""
        return piece + rest

    def _take(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._waiting + piece
        # What waits is the longest possible beginning, so that a match never starts in text already given out.
        found = [start for start in map(text.find, self._stop) if start >= 0]
        if found:
            self.stopped, self._waiting = True, ""
            return text[: min(found)]
        certain = len(text) - self._possible_beginning(text)
        self._waiting = text[certain:]
        return text[:certain]

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` with which a stop text begins."""
        longest = max(map(len, self._stop), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
