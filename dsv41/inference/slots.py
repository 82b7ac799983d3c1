"""A fixed number of request slots on the device: open one with a prompt, step all, close one."""

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
from dsv41.state.request import ModelState, create_state
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
      pages: pages of the shared pool.
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
        settings = model.settings
        self._pages = PageAllocator(shape.batch, shape.pages, shape.table_pages, settings.page_tokens)
        # Where the parameters are: arrays that are bound to no device would compile every step twice.
        device = next(iter(variables["constants"]["token_map"].devices()))
        state = create_state(settings, shape.batch, shape.pages, shape.table_pages)
        self._state, self._sampler = jax.device_put((state, create_sampler(shape.batch)), device)
        self._open = np.zeros(shape.batch, bool)
        self._remaining = np.zeros(shape.batch, np.int32)  # tokens that each request may still get
        self._pending = np.zeros(shape.batch, np.int32)
        self._active = jnp.asarray(self._open)

    def has_room(self, tokens: int) -> bool:
        """Whether a slot is free, and pages for a request of so many tokens in all."""
        return not self._open.all() and self._pages.pages_for(tokens) <= self._pages.free

    def warm_up(self, chunks: Sequence[tuple[int, bool]]) -> None:
        """Compiles the steps by running each once: prompts without pages, and a step of no request.

        Args:
          chunks: lengths of prompts, each with whether there are pictures in it.
        """
        one = np.zeros((1, self._model.settings.text.hidden_size), np.float32)
        for length, pictured in chunks:
            image = self._model.settings.config.image_token_id
            prompt = [0] * (length - 1) + [image if pictured else 0]
            self._first_token(0, Request(tokens=(0,)), prompt, None, [one] if pictured else [])
        if self._speculation is None:
            self.step()
        else:
            self._state, self._sampler = self._speculation.warm_up(self._state, self._sampler)
        for row in range(len(self._open)):
            self._clear(row)
        if self._engram is not None:
            self._engram.reset()

    def open(
        self,
        request: Request,
        prompt: Sequence[int],
        progress: Callable[[int], None] | None = None,
        pictures: Sequence[np.ndarray] = (),
    ) -> tuple[int, int]:
        """Gives a request a slot, passes its prompt through the model and samples its first token.

        Args:
          prompt: token ids; :meth:`has_room` must hold for them and ``request.max_new_tokens``.
          progress: called with the tokens of each chunk done.
          pictures: embeddings ``[span, d]`` of the pictures whose image tokens stand in the prompt.

        Returns:
          the slot and the first token.
        """
        row = int(np.argmin(self._open))
        self._pages.reserve(row, len(prompt) + request.max_new_tokens)
        self._clear(row)
        token = self._first_token(row, request, prompt, progress, pictures)
        self._remaining[row], self._pending[row] = request.max_new_tokens - 1, token
        self._set_open(row, True)
        return row, token

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
        self._pages.release(row)
        self._set_open(row, False)

    def _set_open(self, row: int, value: bool) -> None:
        self._open[row] = value
        # A copy: the device may go on reading the host's array after the next change of it.
        self._active = jnp.asarray(self._open.copy())

    def _clear(self, row: int) -> None:
        self._state = _clear(self._state, np.array([row], np.int32), self._pages.table.copy())
        if self._speculation is not None:
            self._speculation.open(row)

    def _first_token(
        self,
        row: int,
        request: Request,
        prompt: Sequence[int],
        progress: Callable[[int], None] | None,
        pictures: Sequence[np.ndarray],
    ) -> int:
        images = [image_spans(prompt, pictures, self._model.settings)] if pictures else None
        self._state, logits = prefill(
            self._model,
            self._variables,
            self._state,
            [row],
            [prompt],
            self._options,
            progress=progress,
            on_taps=None if self._speculation is None else functools.partial(self._speculation.read_prompt, row),
            images=images,
            engram=self._engram,
        )
        self._sampler, token = _sample_first(
            self._sampler,
            np.int32(row),
            logits,
            np.uint32(request.seed),
            np.float32(request.temperature),
            np.float32(request.top_p),
        )
        return int(token)


@functools.partial(jax.jit, donate_argnums=0)
def _clear(state: ModelState, rows: jax.Array, page_table: jax.Array) -> ModelState:
    return clear_requests(state, rows, page_table)


@functools.partial(jax.jit, donate_argnums=0)
def _sample_first(
    sampler: Sampler, row: jax.Array, logits: jax.Array, seed: jax.Array, temperature: jax.Array, top_p: jax.Array
) -> tuple[Sampler, jax.Array]:
    """Installs a request's sampler in its slot after draw 0, made from the prefill's logits ``[1, vocab]``."""
    fresh = create_sampler(1)
    fresh = fresh.replace(
        seed=fresh.seed.at[0].set(seed),
        temperature=fresh.temperature.at[0].set(temperature),
        top_p=fresh.top_p.at[0].set(top_p),
    )
    drawn = sample(fresh, logits, jnp.ones((1,), bool))
    return jax.tree.map(lambda all_rows, one: all_rows.at[row].set(one[0]), sampler, drawn), drawn.pending[0]
