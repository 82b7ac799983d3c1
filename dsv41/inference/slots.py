"""A fixed number of request slots on the device: open one with a prompt, step all, close one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.inference.pages import PageAllocator
from dsv41.inference.prefill import PrefillOptions, clear_requests, prefill
from dsv41.inference.requests import Request
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.state.request import ModelState, create_state
from dsv41.state.sizes import state_bytes
from dsv41.steps.decode import generate_step
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

    def sizes(self, settings: Settings) -> SlotSizes:
        """The bytes of a state of this shape."""
        one_page, none = (sum(state_bytes(settings, 1, pages, self.table_pages).values()) for pages in (1, 0))
        whole = state_bytes(settings, self.batch, self.pages, self.table_pages)
        return SlotSizes(batch=sum(whole.values()), page=one_page - none, request=none)


class Slots:
    """Requests that decode together. Every slot is open (holds a request with a pending token) or free.

    The token that a step returns for a slot is sampled, not consumed: it is pending, and enters the model with the
    next step. Steps of free slots change nothing.
    """

    def __init__(self, model: Model, variables: Variables, shape: SlotShape, options: PrefillOptions) -> None:
        self._model, self._variables, self._options = model, variables, options
        settings = model.settings
        self._pages = PageAllocator(shape.batch, shape.pages, shape.table_pages, settings.page_tokens)
        # Where the parameters are: arrays that are bound to no device would compile every step twice.
        device = next(iter(variables["constants"]["token_map"].devices()))
        state = create_state(settings, shape.batch, shape.pages, shape.table_pages)
        self._state, self._sampler = jax.device_put((state, create_sampler(shape.batch)), device)
        self._open = np.zeros(shape.batch, bool)
        self._active = jnp.asarray(self._open)

    def has_room(self, tokens: int) -> bool:
        """Whether a slot is free, and pages for a request of so many tokens in all."""
        return not self._open.all() and self._pages.pages_for(tokens) <= self._pages.free

    def warm_up(self, chunks: Sequence[int]) -> None:
        """Compiles the steps by running each once: prompts of these lengths without pages, and a step of no request."""
        for length in chunks:
            self._first_token(0, Request(tokens=(0,)), [0] * length, None)
        self._clear(0)
        self.step()

    def open(
        self, request: Request, prompt: Sequence[int], progress: Callable[[int], None] | None = None
    ) -> tuple[int, int]:
        """Gives a request a slot, passes its prompt through the model and samples its first token.

        Args:
          prompt: token ids; :meth:`has_room` must hold for them and ``request.max_new_tokens``.
          progress: called with the tokens of each chunk done.

        Returns:
          the slot and the first token.
        """
        row = int(np.argmin(self._open))
        self._pages.reserve(row, len(prompt) + request.max_new_tokens)
        self._clear(row)
        token = self._first_token(row, request, prompt, progress)
        self._set_open(row, True)
        return row, token

    def step(self) -> np.ndarray:
        """Consumes the pending token of every open slot and samples the next; int32 ``[batch]``."""
        self._state, self._sampler, tokens = generate_step(
            self._model, self._variables, self._state, self._sampler, self._active
        )
        return np.asarray(tokens)

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

    def _first_token(
        self, row: int, request: Request, prompt: Sequence[int], progress: Callable[[int], None] | None
    ) -> int:
        self._state, logits = prefill(
            self._model, self._variables, self._state, [row], [prompt], self._options, progress=progress
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
