"""One request on its way from its first token to its completion."""

from __future__ import annotations

import itertools
import statistics
import time

from dsv41.inference.requests import Completion, Event, Figures, Request
from dsv41.inference.slots import SlotSizes
from dsv41.inference.stream import TextStream
from dsv41.settings import Settings
from dsv41.tokens.tokenizer import Tokenizer


class Progress:
    """What a request that is being served has got so far: its tokens, its text, and when they came.

    Args:
      tokenizer: None if the model has none.
      sizes: of the batch that the request is in.
      index: the request's place in the call.
      prompt: its prompt's tokens.
      start, opened: when the call began, and when the request got its slot (``time.perf_counter``).
    """

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer | None,
        sizes: SlotSizes,
        index: int,
        request: Request,
        prompt: int,
        start: float,
        opened: float,
    ) -> None:
        self._settings, self._sizes = settings, sizes
        self._index, self._request, self._prompt = index, request, prompt
        self._start, self._opened = start, opened
        self._text = None if tokenizer is None else TextStream(tokenizer, request.stop)
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._times: list[float] = []

    def push(self, token: int) -> Event:
        """Takes in a token; the event of the last one has the completion."""
        self._tokens.append(token)
        self._times.append(time.perf_counter())
        ended = token == self._settings.config.eos_token_id
        piece = ""
        if self._text is not None:
            piece = "" if ended else self._text.push(token)
            ended = ended or self._text.stopped
        finished = ended or len(self._tokens) == self._request.max_new_tokens
        if finished and self._text is not None:
            piece += self._text.finish()
        self._pieces.append(piece)
        return Event(self._index, token, piece, self._completion("stop" if ended else "length") if finished else None)

    def _completion(self, reason: str) -> Completion:
        text = None if self._text is None else "".join(self._pieces)
        return Completion(self._request.id, text, tuple(self._tokens), reason, self._figures())

    def _figures(self) -> Figures:
        times, sizes = self._times, self._sizes
        gaps = [after - before for before, after in itertools.pairwise(times)]
        total = times[-1] - self._opened
        held = -(-(self._prompt + self._request.max_new_tokens) // self._settings.page_tokens)
        return Figures(
            prompt_tokens=self._prompt,
            new_tokens=len(self._tokens),
            queue_s=self._opened - self._start,
            ttft_s=times[0] - self._opened,
            first_inter_token_s=gaps[0] if gaps else None,
            steady_inter_token_s=statistics.median(gaps[1:]) if len(gaps) > 1 else None,
            total_s=total,
            tokens_per_s=len(self._tokens) / total,
            state_bytes=sizes.request + held * sizes.page,
            batch_state_bytes=sizes.batch,
        )
