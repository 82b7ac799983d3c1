"""The generation engine: requests in, completions or a stream of tokens out, in continuously refilled batches."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from dsv41.checkpoint import LoadProgress
from dsv41.config import ModelConfig, load_config
from dsv41.inference.prefill import PrefillOptions
from dsv41.inference.requests import Completion, Event, Figures, Request, RequestError, prompt_tokens
from dsv41.inference.slots import Slots, SlotShape, SlotSizes
from dsv41.inference.stream import TextStream
from dsv41.loading import checkpoint_variables, model_tokenizer, random_variables
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.steps.prefill import Variables
from dsv41.tokens.tokenizer import Tokenizer

PrefillProgress = Callable[[int, int], None]
"""Called with a request's place in the call and the prompt tokens that were just done."""


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How an engine batches.

    Attributes:
      max_batch: requests that decode together at most. A call with fewer uses the next smaller power of two that
        holds them.
      max_length: positions (prompt and new tokens) that a request may have; None: the model's maximum.
      pool_tokens: tokens of memory that all requests share; None: enough for every slot to hold a longest request.
        With less, requests wait until others have finished.
      prefill: how prompts enter.
      deterministic: one compiled shape for every call (all slots, the longest length, one chunk size), so that a
        request gives the same tokens alone and in any batch. Without it matrix products of another shape may differ
        in their last bits.
    """

    max_batch: int = 8
    max_length: int | None = None
    pool_tokens: int | None = None
    prefill: PrefillOptions = dataclasses.field(default_factory=PrefillOptions)
    deterministic: bool = False

    def __post_init__(self) -> None:
        for field in ("max_batch", "max_length", "pool_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field}: {value} is below 1")

    def length_limit(self, config: ModelConfig) -> int:
        """Positions that a request may have.

        Raises:
          ValueError: ``max_length`` is beyond the model's positions.
        """
        positions = config.text.max_position_embeddings
        if self.max_length is not None and self.max_length > positions:
            raise ValueError(f"max_length: {self.max_length} exceeds max_position_embeddings {positions}")
        return self.max_length or positions


class Engine:
    """Generates text. Holds the model and its weights; what requests need is made anew in every call.

    Attributes:
      model, variables: what the steps run.
      tokenizer: None if the model's vocabulary is not the packaged one; requests then give tokens.
      options: see :class:`EngineOptions`.
      compile_s: seconds spent on compiling so far, each step's first run included.
    """

    def __init__(
        self, model: Model, variables: Variables, tokenizer: Tokenizer | None, options: EngineOptions = EngineOptions()
    ) -> None:
        self.model, self.variables, self.tokenizer, self.options = model, variables, tokenizer, options
        self.compile_s = 0.0
        self._limit = options.length_limit(model.settings.config)
        self._prefill = _prefill_options(options, self._limit)
        self._warm: set[tuple[SlotShape, int]] = set()

    @classmethod
    def from_checkpoint(
        cls,
        directory: str | pathlib.Path,
        options: EngineOptions = EngineOptions(),
        *,
        packed_weights: bool | None = None,
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> Engine:
        """An engine for a checkpoint in the public layout.

        Args:
          packed_weights: True keeps quantised weights as they are stored, False multiplies them out; None: packed
            where the checkpoint is quantised.
          progress: called while the weights are read.

        Raises:
          ConfigError, CheckpointError: the checkpoint cannot be run; the message names field or tensor.
          ValueError: an option does not fit the model.
        """
        directory = pathlib.Path(directory)
        config = load_config(directory)
        options.length_limit(config)
        model, tokenizer = Model(Settings.default(config, packed_weights=packed_weights)), model_tokenizer(config)
        return cls(model, checkpoint_variables(model, directory, tokenizer, progress), tokenizer, options)

    @classmethod
    def random(cls, config: ModelConfig, options: EngineOptions = EngineOptions(), *, seed: int = 0) -> Engine:
        """An engine with random weights: everything runs, the text is noise."""
        model, tokenizer = Model(Settings.default(config)), model_tokenizer(config)
        return cls(model, random_variables(model, seed, tokenizer), tokenizer, options)

    def generate(self, requests: Sequence[Request], on_prefill: PrefillProgress | None = None) -> list[Completion]:
        """Runs requests to their end; completions in the order of the requests.

        Raises:
          RequestError: before any work, a request that this engine cannot serve.
        """
        done = {e.index: e.completion for e in self.stream(requests, on_prefill) if e.completion is not None}
        return [done[i] for i in range(len(requests))]

    def stream(self, requests: Sequence[Request], on_prefill: PrefillProgress | None = None) -> Iterator[Event]:
        """Yields every token as soon as it is drawn; requests are checked at the call, not at the first token.

        Raises:
          RequestError: a request that this engine cannot serve.
        """
        requests = list(requests)
        prompts = [self._checked(i, request) for i, request in enumerate(requests)]
        return self._run(requests, prompts, on_prefill) if requests else iter(())

    def slot_shape(self, lengths: Sequence[int]) -> SlotShape:
        """The batch in which requests of these total lengths run."""
        options, page_tokens = self.options, self.model.settings.page_tokens
        limit_pages = -(-self._limit // page_tokens)
        if options.deterministic:
            batch, table_pages = options.max_batch, limit_pages
        else:
            batch = min(_power_of_two(len(lengths)), options.max_batch)
            table_pages = min(_power_of_two(-(-max(lengths) // page_tokens)), limit_pages)
        pages = batch * table_pages
        if options.pool_tokens is not None:
            pages = min(pages, options.pool_tokens // page_tokens)
        return SlotShape(batch, pages, table_pages)

    def _checked(self, index: int, request: Request) -> tuple[int, ...]:
        settings = self.model.settings
        try:
            prompt = prompt_tokens(request, settings.config, self.tokenizer, self._limit)
            length = len(prompt) + request.max_new_tokens
            pool, page_tokens = self.options.pool_tokens, settings.page_tokens
            if pool is not None and -(-length // page_tokens) > pool // page_tokens:
                raise RequestError(
                    f"max_new_tokens: {request.max_new_tokens} after a prompt of {len(prompt)} tokens never fit into "
                    f"the pool of {pool} tokens (whole pages of {page_tokens})"
                )
        except RequestError as error:
            name = f"request {index}" if request.id is None else f"request {index} (id {request.id!r})"
            raise RequestError(f"{name}: {error}") from None
        return prompt

    def _run(
        self, requests: Sequence[Request], prompts: Sequence[Sequence[int]], on_prefill: PrefillProgress | None
    ) -> Iterator[Event]:
        shape = self.slot_shape([len(p) + r.max_new_tokens for p, r in zip(prompts, requests, strict=True)])
        slots = Slots(self.model, self.variables, shape, self._prefill)
        self._compile(slots, shape, prompts)
        waiting = collections.deque(range(len(requests)))
        live: dict[int, _Live] = {}
        sizes = shape.sizes(self.model.settings)
        start = time.perf_counter()
        while waiting or live:
            # In order of arrival: a short request does not overtake a long one that waits for pages.
            while waiting and slots.has_room(len(prompts[waiting[0]]) + requests[waiting[0]].max_new_tokens):
                index = waiting.popleft()
                progress = None if on_prefill is None else lambda count, i=index: on_prefill(i, count)
                opened = time.perf_counter()
                row, token = slots.open(requests[index], prompts[index], progress)
                live[row] = _Live(self, sizes, index, requests[index], len(prompts[index]), start, opened)
                yield self._advance(slots, live, row, token)
            if not live:
                continue
            tokens = slots.step()
            for row in sorted(live):
                yield self._advance(slots, live, row, int(tokens[row]))

    def _advance(self, slots: Slots, live: dict[int, _Live], row: int, token: int) -> Event:
        event = live[row].push(token)
        if event.completion is not None:
            slots.close(row)
            del live[row]
        return event

    def _compile(self, slots: Slots, shape: SlotShape, prompts: Sequence[Sequence[int]]) -> None:
        """Compiles what these prompts need and no earlier call has, so that no figure contains it."""
        widths = {width for prompt in prompts for width, _ in self._prefill.chunks(len(prompt))}
        missing = {width for width in widths if (shape, width) not in self._warm}
        if missing:
            begin = time.perf_counter()
            slots.warm_up(sorted(missing))
            self.compile_s += time.perf_counter() - begin
            self._warm |= {(shape, width) for width in missing}


class _Live:
    """A request in a slot: its text so far and its times."""

    def __init__(
        self, engine: Engine, sizes: SlotSizes, index: int, request: Request, prompt: int, start: float, opened: float
    ) -> None:
        self._engine, self._sizes, self._index, self._request, self._prompt = engine, sizes, index, request, prompt
        self._start, self._opened = start, opened
        self._text = None if engine.tokenizer is None else TextStream(engine.tokenizer, request.stop)
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._times: list[float] = []

    def push(self, token: int) -> Event:
        self._tokens.append(token)
        self._times.append(time.perf_counter())
        ended = token == self._engine.model.settings.config.eos_token_id
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
        held = -(-(self._prompt + self._request.max_new_tokens) // self._engine.model.settings.page_tokens)
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


def _prefill_options(options: EngineOptions, limit: int) -> PrefillOptions:
    """The chunk sizes in use: one alone in deterministic mode, the largest that is not longer than a request."""
    sizes = options.prefill.chunk_sizes
    if not options.deterministic:
        return options.prefill
    fitting = [size for size in sizes if size <= limit]
    return dataclasses.replace(options.prefill, chunk_sizes=(fitting[-1] if fitting else sizes[0],))


def _power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count`` (at least 1)."""
    return 1 << (count - 1).bit_length()
