"""The generation engine: requests in, completions or a stream of tokens out, in continuously refilled batches."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from dsv41.checkpoint import CheckpointReader, LoadProgress, RandomSource, TensorSource
from dsv41.config import ModelConfig, load_config
from dsv41.engram.feed import EngramFeed
from dsv41.engram.loading import Tables, open_tables
from dsv41.engram.prefetch import Lookups
from dsv41.inference.calibration import read_calibration
from dsv41.inference.measurements import AcceptanceStatistics
from dsv41.inference.options import DEFAULT_OPTIONS, EngineOptions
from dsv41.inference.progress import Progress
from dsv41.inference.requests import Completion, Event, Request, RequestError, prompt_tokens
from dsv41.inference.scheduler import FixedDepth, Scheduler, ThroughputScheduler
from dsv41.inference.slots import Slots, SlotShape
from dsv41.inference.speculation import LoadedDrafter, Speculation, step_widths
from dsv41.layers.dspark import Drafter
from dsv41.loading import checkpoint_variables, load_drafter, model_tokenizer, random_variables
from dsv41.model import Model
from dsv41.pictures.encoder import EncodedPicture, Pictures
from dsv41.pictures.files import picture_plan
from dsv41.settings import Settings
from dsv41.sharding.parallel import SINGLE, Parallel
from dsv41.sharding.requests import context_shards
from dsv41.sharding.rules import MeshError
from dsv41.steps.acceptance import Rule
from dsv41.steps.prefill import Variables
from dsv41.tokens.tokenizer import Tokenizer

PrefillProgress = Callable[[int, int], None]
"""Called with a request's place in the call and the prompt tokens that were just done."""


class Engine:
    """Generates text. Holds the model and its weights; what requests need is made anew in every call.

    Attributes:
      model, variables: what the steps run.
      tokenizer: None if the model's vocabulary is not the packaged one; requests then give tokens.
      options: see :class:`EngineOptions`.
      compile_s: seconds spent on compiling so far, each step's first run included.
    """

    def __init__(
        self,
        model: Model,
        variables: Variables,
        tokenizer: Tokenizer | None,
        options: EngineOptions = DEFAULT_OPTIONS,
        load_pictures: Callable[[], Pictures] | None = None,
        drafter: LoadedDrafter | None = None,
        tables: Tables | None = None,
    ) -> None:
        """An engine over weights that are loaded.

        Args:
          drafter: needed by ``options.speculative``.
          tables: Engram's, where they are not among the variables.
          load_pictures: loads the vision part; called once, when the first request with picture files comes. None:
            this engine takes encoded pictures only.
        """
        self.model, self.variables, self.tokenizer, self.options = model, variables, tokenizer, options
        check_mesh(model.settings, options)
        self.compile_s = 0.0
        self._load_pictures, self._pictures = load_pictures, None
        self._limit = options.length_limit(model.settings.config)
        options.check_speculation(model.settings.config)
        if options.speculative is not None and drafter is None:
            raise ValueError(f"speculative: {options.speculative!r}, but this engine was given no drafter")
        self._drafter = drafter if options.speculative is not None else None
        self._schedulers: dict[int, Scheduler] = {}
        if (tables is None) != model.settings.engram_in_step:
            raise ValueError(f"tables: {tables}, but the model's engram_in_step is {model.settings.engram_in_step}")
        self._tables, self._lookups = tables, Lookups()
        self._prefill = options.prefill_options(model.settings.config)
        self._warm: set[tuple[SlotShape, int, bool]] = set()

    @classmethod
    def from_checkpoint(
        cls,
        directory: str | pathlib.Path,
        options: EngineOptions = DEFAULT_OPTIONS,
        *,
        packed_weights: bool | None = None,
        progress: Callable[[LoadProgress], None] | None = None,
        parallel: Parallel = SINGLE,
    ) -> Engine:
        """An engine for a checkpoint in the public layout.

        Args:
          packed_weights: True keeps quantised weights as they are stored, False multiplies them out; None: packed
            where the checkpoint is quantised.
          progress: called while the weights are read.
          parallel: the mesh that the model is divided over; one device by default.

        Raises:
          MeshError: the model or the options do not fit the mesh.
          ConfigError, CheckpointError: the checkpoint cannot be run; the message names field, tensor or file.
          ValueError: an option does not fit the model.
        """
        directory = pathlib.Path(directory)
        config = load_config(directory)
        options.length_limit(config)
        options.check_speculation(config)
        in_step = options.engram == "device"
        settings = Settings.default(config, packed_weights=packed_weights, engram_in_step=in_step)
        settings = dataclasses.replace(settings, parallel=parallel)
        check_mesh(settings, options)
        model, tokenizer, reader = Model(settings), model_tokenizer(config, directory), CheckpointReader(directory)
        tables = None if in_step else open_tables(options.engram, reader, config, jax.local_devices()[0])
        variables = checkpoint_variables(model, directory, tokenizer, progress)
        pictures = functools.partial(Pictures, model.settings.whole, reader)
        drafter = _load_drafter(model, options, reader, progress)
        if drafter is not None:
            temperature = read_calibration(directory, config.text.dspark_block_size)
            drafter = dataclasses.replace(drafter, temperature=temperature)
        return cls(model, variables, tokenizer, options, pictures, drafter, tables)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        options: EngineOptions = DEFAULT_OPTIONS,
        *,
        seed: int = 0,
        parallel: Parallel = SINGLE,
    ) -> Engine:
        """An engine with random weights: everything runs, the text is noise.

        Raises:
          MeshError: the model or the options do not fit the mesh.
        """
        in_step, source = options.engram == "device", RandomSource(config, seed)
        settings = dataclasses.replace(Settings.default(config, engram_in_step=in_step), parallel=parallel)
        check_mesh(settings, options)
        model, tokenizer = Model(settings), model_tokenizer(config)
        tables = None if in_step else open_tables(options.engram, source, config, jax.local_devices()[0])
        pictures = functools.partial(Pictures, model.settings.whole, source)
        drafter = _load_drafter(model, options, source)
        variables = random_variables(model, seed, tokenizer)
        return cls(model, variables, tokenizer, options, pictures, drafter, tables)

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
          CheckpointError: a request has picture files, and the vision part cannot be loaded.
        """
        requests = list(requests)
        prompts = [self._checked(i, request) for i, request in enumerate(requests)]
        if self._pictures is None and any(request.picture_files for request in requests):
            self._pictures = self._load_pictures()
        return self._run(requests, prompts, on_prefill) if requests else iter(())

    def slot_shape(self, lengths: Sequence[int]) -> SlotShape:
        """The batch in which requests of these total lengths run; on a mesh whole parts of it."""
        options, page_tokens, parallel = self.options, self.model.settings.page_tokens, self.model.settings.parallel
        shards, contexts = parallel.parts("batch"), context_shards(parallel)
        limit_pages = _whole_parts(-(-self._limit // page_tokens), contexts)
        if options.deterministic:
            batch, table_pages = options.max_batch, limit_pages
        else:
            batch = min(_whole_parts(_power_of_two(len(lengths)), shards), options.max_batch)
            pages = _whole_parts(_power_of_two(-(-max(lengths) // page_tokens)), contexts)
            table_pages = min(pages, limit_pages)
        pages = batch * table_pages
        if options.pool_tokens is not None:
            parts = shards * contexts
            pages = min(pages, options.pool_tokens // (page_tokens * parts) * parts)
        return SlotShape(batch, pages, table_pages)

    def _checked(self, index: int, request: Request) -> tuple[int, ...]:
        settings = self.model.settings
        try:
            if request.picture_files and self._load_pictures is None:
                raise RequestError("images: this engine has no vision part; it takes encoded pictures only")
            prompt = prompt_tokens(request, settings.config, self.tokenizer, self._limit)
            length = len(prompt) + request.max_new_tokens
            pool, page_tokens = self.options.pool_tokens, settings.page_tokens
            if pool is not None:
                # A request lies on one batch shard.
                pool //= settings.parallel.parts("batch")
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
        feed = None
        if self._tables is not None:
            token_map = np.asarray(self.variables["constants"]["token_map"])
            feed = EngramFeed(self.model.settings, token_map, self._tables, shape.batch)
        with contextlib.nullcontext() if feed is None else feed:
            speculation = self._speculation(shape.batch, feed)
            slots = Slots(self.model, self.variables, shape, self._prefill, speculation, feed)
            self._compile(slots, shape, requests, prompts)
            yield from self._serve(slots, shape, requests, prompts, on_prefill)
            if feed is not None:
                self._lookups += feed.report()

    def _serve(
        self,
        slots: Slots,
        shape: SlotShape,
        requests: Sequence[Request],
        prompts: Sequence[Sequence[int]],
        on_prefill: PrefillProgress | None,
    ) -> Iterator[Event]:
        """Runs all requests through the slots."""
        waiting = collections.deque(range(len(requests)))
        live: dict[int, Progress] = {}
        sizes = shape.sizes(self.model.settings, drafts=self._drafter is not None)
        start = time.perf_counter()
        while waiting or live:
            # In order of arrival: a short request does not overtake a long one that waits for pages.
            while rows := slots.room_for([len(prompts[i]) + requests[i].max_new_tokens for i in waiting]):
                entering = [waiting.popleft() for _ in rows]
                progress = None if on_prefill is None else lambda i, count, group=entering: on_prefill(group[i], count)
                opened = time.perf_counter()
                pictures = [[self._embeddings(image) for image in requests[i].images] for i in entering]
                arguments = ([requests[i] for i in entering], [prompts[i] for i in entering])
                tokens = slots.open(rows, *arguments, progress, pictures)
                for row, index in zip(rows, entering, strict=True):
                    live[row] = Progress(
                        self.model.settings,
                        self.tokenizer,
                        sizes,
                        index,
                        requests[index],
                        len(prompts[index]),
                        start,
                        opened,
                    )
                for row, token in zip(rows, tokens, strict=True):
                    yield self._advance(slots, live, row, token)
            if not live:
                continue
            tokens = slots.step()
            for row in sorted(live):
                for token in tokens[row]:
                    yield self._advance(slots, live, row, token)
                    if row not in live:  # drafts beyond the end are of no use
                        break

    def _speculation(self, batch: int, engram: EngramFeed | None = None) -> Speculation | None:
        """How a batch of so many slots verifies drafts; None if its steps consume one token each."""
        options, text = self.options, self.model.settings.text
        block = text.dspark_block_size if text.num_nextn_predict_layers else 0
        if options.speculative is None and not options.deterministic:
            return None
        depth = options.speculative or 0
        if options.deterministic:
            rule, widths = Rule.COUPLED, (1 + block,)
        else:
            rule, widths = Rule.REJECTION, step_widths(block) if depth == "auto" else (1 + depth,)
        scheduler = self._schedulers.get(batch)
        if scheduler is None:
            if depth == "auto":
                scheduler = ThroughputScheduler(block, widths, temperature=self._drafter.temperature)
            else:
                scheduler = FixedDepth(depth, block, widths)
            self._schedulers[batch] = scheduler
        return Speculation(self.model, self.variables, batch, rule, scheduler, widths, self._drafter, engram)

    @property
    def statistics(self) -> AcceptanceStatistics | None:
        """Drafts verified and accepted by all calls so far; None without speculation."""
        if self.options.speculative is None:
            return None
        total = AcceptanceStatistics(self.model.settings.text.dspark_block_size)
        for scheduler in self._schedulers.values():
            total.merge(scheduler.statistics)
        return total

    @property
    def lookups(self) -> Lookups | None:
        """What Engram's look-ups have cost in all calls so far; None where the steps look up themselves."""
        return None if self._tables is None else self._lookups

    def _advance(self, slots: Slots, live: dict[int, Progress], row: int, token: int) -> Event:
        event = live[row].push(token)
        if event.completion is not None:
            slots.close(row)
            del live[row]
        return event

    def _embeddings(self, image: str | os.PathLike[str] | EncodedPicture) -> np.ndarray:
        """Embeddings ``[span, d]`` of a request's picture."""
        return (image if isinstance(image, EncodedPicture) else self._pictures.read(image)).embeddings

    def _compile(
        self, slots: Slots, shape: SlotShape, requests: Sequence[Request], prompts: Sequence[Sequence[int]]
    ) -> None:
        """Compiles what these prompts need and no earlier call has, so that no figure contains it."""
        widths = {
            (width, bool(request.images))
            for request, prompt in zip(requests, prompts, strict=True)
            for width, _ in self._prefill.chunks(len(prompt))
        }
        missing = {chunk for chunk in widths if (shape, *chunk) not in self._warm}
        begin = time.perf_counter()
        if self._pictures is not None:
            vision = self.model.settings.config.vision
            files = {file for request in requests for file in request.picture_files}
            self._pictures.warm_up({picture_plan(file, vision).span for file in files})
        if missing:
            slots.warm_up(sorted(missing))
            self._warm |= {(shape, *chunk) for chunk in missing}
        self.compile_s += time.perf_counter() - begin


def _load_drafter(
    model: Model,
    options: EngineOptions,
    source: TensorSource,
    progress: Callable[[LoadProgress], None] | None = None,
) -> LoadedDrafter | None:
    """The drafter of a model, if the options want one."""
    if options.speculative is None:
        return None
    drafter = Drafter(model.settings)
    return LoadedDrafter(drafter, load_drafter(drafter, source, progress))


def check_mesh(settings: Settings, options: EngineOptions) -> None:
    """Refuses options that a mesh cannot serve.

    Raises:
      MeshError: the batch is not divisible, or Engram's tables are to lie outside the devices.
    """
    parallel = settings.parallel
    if parallel.mesh is None:
        return
    shards = parallel.parts("batch")
    if options.max_batch % shards:
        where = " × ".join(f"{axis} {parallel.divided(axis)}" for axis in parallel.places("batch"))
        raise MeshError(f"max_batch of {options.max_batch} is not divisible by mesh axes {where}")
    if options.engram != "device":
        raise MeshError(f"engram {options.engram!r}: on a mesh the tables are divided over its devices")


def _whole_parts(count: int, parts: int) -> int:
    """The next multiple of ``parts``."""
    return -(-count // parts) * parts


def _power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count`` (at least 1)."""
    return 1 << (count - 1).bit_length()
