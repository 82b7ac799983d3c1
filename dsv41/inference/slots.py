"""A fixed number of request slots: open some with their prompts, step all, close one.

On a mesh slots lie on its batch shards, as many on each, and every shard has a page pool of its own. Prompts enter side
by side, one on each shard that has one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.engram.feed import EngramFeed
from dsv41.inference.pages import PageAllocator
from dsv41.inference.prefill import PrefillOptions, clear_requests, image_spans, prefill
from dsv41.inference.requests import Request
from dsv41.inference.speculation import Speculation
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.sharding.requests import context_shards, empty_state
from dsv41.sharding.steps import GATHERED, REQUESTS, sharded_step
from dsv41.state.request import create_state
from dsv41.state.sizes import drafter_bytes, state_bytes
from dsv41.steps.decode import generate_step
from dsv41.steps.engram import begin_generate, finish_generate
from dsv41.steps.prefill import Variables
from dsv41.steps.sampling import Sampler, create_sampler, sample


class SlotSizes(NamedTuple):
    """Bytes of the whole allocated state, of one page over all sources, and of a request without its pages."""

    batch: int
    page: int
    request: int


@dataclasses.dataclass(frozen=True)
class SlotShape:
    """What the compiled steps of a batch depend on.

    Attributes:
      batch: slots.
      pages: pages of all pools.
      table_pages: pages that one request may hold.
    """

    batch: int
    pages: int
    table_pages: int

    def sizes(self, settings: Settings, drafts: bool = False) -> SlotSizes:
        """The bytes of a state of this shape; ``drafts``: with the drafter's rings."""
        one_page, none = (sum(state_bytes(settings, 1, pages, self.table_pages).values()) for pages in (1, 0))
        whole = state_bytes(settings, self.batch, self.pages, self.table_pages)
        rings = drafter_bytes(settings) if drafts else 0
        return SlotSizes(batch=sum(whole.values()) + self.batch * rings, page=one_page - none, request=none + rings)


class Slots:
    """Requests that decode together. Every slot is open (holds a request with a pending token) or free.

    The token that a step returns for a slot is sampled, not consumed: it is pending, and enters the model with the
    next step. Steps of free slots change nothing.
    """

    def __init__(
        self,
        model: Model,
        variables: Variables,
        shape: SlotShape,
        options: PrefillOptions,
        speculation: Speculation | None = None,
        engram: EngramFeed | None = None,
    ) -> None:
        """Empty slots.

        Args:
          speculation: how steps verify drafts; None: every step consumes one token.
          engram: has the rows of Engram's tables; None where the tables are parameters.
        """
        self._model, self._variables, self._options = model, variables, options
        self._speculation, self._engram = speculation, engram
        settings, parallel = model.settings, model.settings.parallel
        self._shards = parallel.parts("batch")
        self._each = shape.batch // self._shards
        pages = (self._each, shape.pages // self._shards, shape.table_pages, settings.page_tokens)
        self._pools = [PageAllocator(*pages, shards=context_shards(parallel)) for _ in range(self._shards)]
        self._sampler = create_sampler(shape.batch)
        if parallel.mesh is None:
            # Where the parameters are: arrays that are bound to no device would compile every step twice.
            device = next(iter(variables["constants"]["token_map"].devices()))
            state = create_state(settings, shape.batch, shape.pages, shape.table_pages)
            self._state, self._sampler = jax.device_put((state, self._sampler), device)
        else:
            self._state = empty_state(settings, shape.batch, shape.pages, shape.table_pages)
        self._open = np.zeros(shape.batch, bool)
        self._remaining = np.zeros(shape.batch, np.int32)  # tokens that each request may still get
        self._pending = np.zeros(shape.batch, np.int32)
        self._active = jnp.asarray(self._open)

    def room_for(self, lengths: Sequence[int]) -> list[int]:
        """Slots for the first requests of a queue that can enter side by side, one on each shard at most.

        Args:
          lengths: tokens of each in all, in order; none overtakes another.

        Returns:
          a free slot for each that can.
        """
        rows: list[int] = []
        for length in lengths:
            used = {row // self._each for row in rows}
            shards = [
                s for s in range(self._shards) if s not in used and self._free_slots(s) and self._pools[s].fits(length)
            ]
            if not shards:
                break
            # The emptiest first, so that requests spread evenly.
            shard = max(shards, key=self._free_slots)
            rows.append(shard * self._each + int(np.argmin(self._open[shard * self._each : (shard + 1) * self._each])))
        return rows

    def _free_slots(self, shard: int) -> int:
        return int(np.sum(~self._open[shard * self._each : (shard + 1) * self._each]))

    def warm_up(self, chunks: Sequence[tuple[int, bool]]) -> None:
        """Compiles the steps by running each once: prompts without pages, and a step of no request.

        Args:
          chunks: lengths of prompts, each with whether there are pictures in it.
        """
        one = np.zeros((1, self._model.settings.text.hidden_size), np.float32)
        for length, pictured in chunks:
            image = self._model.settings.config.image_token_id
            prompt = [0] * (length - 1) + [image if pictured else 0]
            pictures = [one] if pictured else []
            self._first_tokens([0], [Request(tokens=(0,))], [prompt], None, [pictures])
        if self._speculation is None:
            self.step()
        else:
            self._state, self._sampler = self._speculation.warm_up(self._state, self._sampler)
        self._clear(range(len(self._open)))
        if self._engram is not None:
            self._engram.reset()

    def open(
        self,
        rows: Sequence[int],
        requests: Sequence[Request],
        prompts: Sequence[Sequence[int]],
        progress: Callable[[int, int], None] | None = None,
        pictures: Sequence[Sequence[np.ndarray]] | None = None,
    ) -> list[int]:
        """Gives requests slots, passes their prompts through the model and samples their first tokens.

        Args:
          rows: the slots, from :meth:`room_for`.
          prompts: token ids.
          progress: called with a prompt's place among these and its tokens in each chunk done.
          pictures: for each prompt the embeddings ``[span, d]`` of the pictures whose image tokens stand in it.

        Returns:
          the first tokens.
        """
        for row, request, prompt in zip(rows, requests, prompts, strict=True):
            self._pools[row // self._each].reserve(row % self._each, len(prompt) + request.max_new_tokens)
        self._clear(rows)
        tokens = self._first_tokens(rows, requests, prompts, progress, pictures or [()] * len(rows))
        for row, request, token in zip(rows, requests, tokens, strict=True):
            self._remaining[row], self._pending[row] = request.max_new_tokens - 1, token
            self._set_open(row, True)
        return tokens

    def step(self) -> list[list[int]]:
        """Consumes the pending token of every open slot, and accepted drafts, and samples on.

        Returns:
          the new tokens of each slot, at least one of an open one; the last of them is pending.
        """
        if self._speculation is None:
            drawn = self._decode() if self._engram is None else self._decode_in_two_parts(self._engram)
            tokens = [[token] if is_open else [] for token, is_open in zip(drawn.tolist(), self._open, strict=True)]
        else:
            # A step commits one token whatever happens: only those beyond it may come from drafts.
            self._state, self._sampler, tokens = self._speculation.round(
                self._state, self._sampler, self._pending, self._open, self._remaining - 1
            )
        self._remaining -= np.array([len(row) for row in tokens], np.int32)
        for row in np.flatnonzero(self._open):
            self._pending[row] = tokens[row][-1]
        return tokens

    def _decode(self) -> np.ndarray:
        """A step of one token; the tokens drawn, int32 ``[batch]``."""
        self._state, self._sampler, drawn = generate_step(
            self._model, self._variables, self._state, self._sampler, self._active
        )
        return np.asarray(drawn)

    def _decode_in_two_parts(self, engram: EngramFeed) -> np.ndarray:
        """The same with Engram's rows read on the host, which begins as soon as a token is drawn."""
        tokens, count = self._pending[:, None], self._open.astype(np.int32)
        self._state, begun = begin_generate(self._model, self._variables, self._state, self._sampler, self._active)
        rows = engram.rows(tokens, count, behind=begun.flow.streams)
        self._state, self._sampler, drawn = finish_generate(
            self._model, self._variables, self._state, begun, rows, self._sampler, self._active
        )
        drawn = np.asarray(drawn)
        engram.advance(tokens, count)
        engram.start(drawn[:, None], count)
        return drawn

    def close(self, row: int) -> None:
        """Frees a slot and its pages."""
        self._pools[row // self._each].release(row % self._each)
        self._set_open(row, False)

    def _set_open(self, row: int, value: bool) -> None:
        self._open[row] = value
        # A copy: the device may go on reading the host's array after the next change of it.
        self._active = jnp.asarray(self._open.copy())

    def _clear(self, rows: Sequence[int]) -> None:
        cleared = np.isin(np.arange(len(self._open)), rows)
        table = np.concatenate([pool.table for pool in self._pools])
        self._state = clear_requests(self._model, self._state, cleared, table)
        if self._speculation is not None:
            self._speculation.open(cleared)

    def _first_tokens(
        self,
        rows: Sequence[int],
        requests: Sequence[Request],
        prompts: Sequence[Sequence[int]],
        progress: Callable[[int, int], None] | None,
        pictures: Sequence[Sequence[np.ndarray]],
    ) -> list[int]:
        """Passes one prompt of each of some shards through the model; their first tokens."""
        # Shards without a prompt pass an empty one, for a request that does not exist.
        shard_rows, shard_prompts = [self._each] * self._shards, [()] * self._shards
        spans, first = [()] * self._shards, [Request(tokens=(0,))] * self._shards
        for row, request, prompt, images in zip(rows, requests, prompts, pictures, strict=True):
            shard = row // self._each
            shard_rows[shard], shard_prompts[shard], first[shard] = row % self._each, prompt, request
            if images:
                spans[shard] = image_spans(prompt, images, self._model.settings)
        index = np.array(shard_rows, np.int32)

        def report(counts: np.ndarray) -> None:
            for i, row in enumerate(rows):
                if count := int(counts[row // self._each]):
                    progress(i, count)

        self._state, logits = prefill(
            self._model,
            self._variables,
            self._state,
            shard_rows,
            shard_prompts,
            self._options,
            progress=None if progress is None else report,
            on_taps=None if self._speculation is None else functools.partial(self._speculation.read_prompt, index),
            images=spans if any(spans) else None,
            engram=self._engram,
        )
        self._sampler, tokens = _sample_first(
            self._model,
            self._sampler,
            index,
            logits,
            np.array([request.seed for request in first], np.uint32),
            np.array([request.temperature for request in first], np.float32),
            np.array([request.top_p for request in first], np.float32),
        )
        tokens = np.asarray(tokens)
        return [int(tokens[row // self._each]) for row in rows]


@sharded_step(1, (1,), (REQUESTS,) * 6, (REQUESTS, GATHERED))
def _sample_first(
    model: Model,
    sampler: Sampler,
    rows: jax.Array,
    logits: jax.Array,
    seed: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
) -> tuple[Sampler, jax.Array]:
    """Installs requests' samplers in their slots after draw 0, made from the prefill's logits ``[rows, vocab]``.

    A number in ``rows`` that is no slot's is nobody's.
    """
    fresh = create_sampler(rows.shape[0]).replace(seed=seed, temperature=temperature, top_p=top_p)
    drawn = sample(fresh, logits, jnp.ones(rows.shape, bool))
    return jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), sampler, drawn), drawn.pending
