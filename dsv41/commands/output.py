"""What ``dsv41 generate`` shows of one request while it runs."""

from __future__ import annotations

import json
import sys

from dsv41.tokens.chat import ChatPiece, ChatReader


class TextOutput:
    """Generated text on stdout, as it comes."""

    def push(self, text: str) -> None:
        print(text, end="", flush=True)

    def finish(self, _: str) -> None:
        print()


class ChatOutput:
    """A generated message: its content on stdout as it comes, its reasoning on stderr, then each tool call on stdout
    as one line of JSON."""

    def __init__(self, reader: ChatReader) -> None:
        self._reader, self._last = reader, None

    def push(self, text: str) -> None:
        self._show(self._reader.push(text))

    def finish(self, finish_reason: str) -> None:
        reply = self._reader.finish(finish_reason)
        self._show(reply.pieces)
        if self._last == "reasoning":
            print(file=sys.stderr)
        print()
        for call in reply.message.get("tool_calls", ()):
            print(json.dumps(call, ensure_ascii=False))

    def _show(self, pieces: tuple[ChatPiece, ...]) -> None:
        for piece in pieces:
            if piece.kind == "content":
                if self._last == "reasoning":
                    print(file=sys.stderr)
                print(piece.text, end="", flush=True)
            elif piece.kind == "reasoning":
                print(piece.text, end="", file=sys.stderr, flush=True)
            self._last = piece.kind
