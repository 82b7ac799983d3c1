"""Rounds of speculative decoding for a batch of slots: draft, choose depths, verify, learn.

A plain step is the verification of no drafts, so one class serves speculation, its fallback, and deterministic plain
decoding, which must run in the same compiled step as speculation to give the same bits.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.engram.feed import EngramFeed
from dsv41.inference.scheduler import Scheduler, ThroughputScheduler
from dsv41.layers.dspark import Drafter
from dsv41.model import Model
from dsv41.sharding.requests import local_rows
from dsv41.state.request import ModelState
from dsv41.state.ring import create_ring
from dsv41.steps.acceptance import Rule
from dsv41.steps.draft import Drafts, clear_drafter, draft_step, seed_drafter
from dsv41.steps.engram import begin_verify, finish_verify
from dsv41.steps.prefill import Variables
from dsv41.steps.sampling import Sampler
from dsv41.steps.verify import verify_step


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A drafter and its weights.

    Attributes:
      temperature: of its confidences at each position of a block (:mod:`dsv41.inference.calibration`); None: not known.
    """

    drafter: Drafter
    variables: Variables
    temperature: tuple[float, ...] | None = None


def step_widths(block: int) -> tuple[int, ...]:
    """Compiled widths of the verify step for a block of drafts: no drafts, about half of them, all."""
    return tuple(sorted({1, 1 + (block + 1) // 2, 1 + block}))


class Round(NamedTuple):
    """State and sampler after a round, and the tokens that it committed for each slot (none for free ones)."""

    state: ModelState
    sampler: Sampler
    tokens: list[list[int]]


class Speculation:
    """The drafter's side of a batch of slots.

    Args:
      batch: slots.
      rule: how drafts are accepted.
      scheduler: chooses depths; it outlives the batch.
      widths: compiled widths of the verify step, the pending token included.
      drafter: None: nothing is ever drafted, and every round is plain.
      engram: has the rows of Engram's tables; None where the tables are parameters.
    """

    def __init__(
        self,
        model: Model,
        variables: Variables,
        batch: int,
        rule: Rule,
        scheduler: Scheduler,
        widths: Sequence[int],
        drafter: LoadedDrafter | None,
        engram: EngramFeed | None = None,
    ) -> None:
        self._model, self._variables, self._rule, self._scheduler = model, variables, rule, scheduler
        self._widths, self._drafter, self._engram = tuple(widths), drafter, engram
        text = model.settings.text
        # What the last step read at the target layers, not yet in the rings; all widths padded to one.
        taps = (len(text.dspark_target_layer_ids), batch, self._widths[-1], text.hidden_size)
        ring = create_ring(model.settings.whole, text.num_nextn_predict_layers, batch)
        taps = jnp.zeros(taps, model.settings.dtype)
        # Steps without drafts: bound to the device, as drafts are, or those steps would be compiled anew.
        nothing = jnp.zeros((batch, self._widths[-1] - 1), jnp.int32)
        no_distribution = jnp.zeros((batch, 0, text.vocab_size), jnp.float32)
        parts = (ring, taps, nothing, no_distribution)
        if model.settings.parallel.mesh is None:  # steps put them on a mesh by themselves
            parts = jax.device_put(parts, next(iter(variables["constants"]["token_map"].devices())))
        self._ring, self._taps, self._no_drafts, self._no_probabilities = parts
        self._count = np.zeros(batch, np.int32)

    def open(self, cleared: np.ndarray) -> None:
        """Empties slots, bool ``[batch]``, for new requests."""
        self._count[cleared] = 0
        if self._drafter is not None:
            self._ring = clear_drafter(self._drafter.drafter, self._ring, cleared)

    def read_prompt(self, rows: np.ndarray, taps: jax.Array, start: jax.Array, count: jax.Array) -> None:
        """Takes in positions of prompts: taps ``[targets, rows, query, d]``, start and count int32 ``[rows]``.

        Args:
          rows: int32 ``[rows]``, slots by their numbers on their shards; one that is no slot's is nobody's.
        """
        if self._drafter is not None:
            self._ring = seed_drafter(*self._module(), self._ring, rows, taps, start, count)

    def warm_up(self, state: ModelState, sampler: Sampler) -> tuple[ModelState, Sampler]:
        """Compiles every step with all slots busy, and measures it for a scheduler that asks what steps cost.

        State and sampler are of no use afterwards.
        """
        active, pending = np.ones(len(self._count), bool), np.zeros(len(self._count), np.int32)
        curve = self._scheduler.curve if isinstance(self._scheduler, ThroughputScheduler) else None
        for width in self._widths:
            depth = np.full(len(active), width - 1, np.int32)
            for timed in (False,) if curve is None else (False, True):
                drafts, draft_seconds = None, None
                if self._drafter is not None and width > 1:
                    drafts, draft_seconds = self._draft(state, sampler, active)
                elif self._drafter is not None:
                    self._feed(state)
                begin = time.perf_counter()
                state, sampler, _, _ = self._verify(state, sampler, pending, drafts, depth, width, active)
                if timed:
                    curve.record(width, width * len(active), time.perf_counter() - begin)
                    if draft_seconds is not None:
                        curve.record_draft(draft_seconds)
        self._count[:] = 0
        return state, sampler

    def round(
        self, state: ModelState, sampler: Sampler, pending: np.ndarray, active: np.ndarray, caps: np.ndarray
    ) -> Round:
        """One round of all open slots; each commits at least one token.

        Args:
          state, sampler: donated.
          pending: int32 ``[batch]``, the sampler's pending tokens.
          active: bool ``[batch]``.
          caps: int ``[batch]``, drafts that a request may have verified: its remaining tokens less one.
        """
        drafts, draft_seconds = None, None
        # A step that is wide anyway needs something to compare with, though it checks nothing of it.
        always = self._rule is Rule.REJECTION and self._widths[0] > 1
        if self._drafter is not None and (always or self._scheduler.drafts(active, caps)):
            drafts, draft_seconds = self._draft(state, sampler, active)
            plan = self._scheduler.choose(np.asarray(drafts.confidence), active, caps)
        else:
            if self._drafter is not None:
                self._feed(state)
            plan = self._scheduler.plain(active)
        begin = time.perf_counter()
        state, sampler, tokens, accepted = self._verify(state, sampler, pending, drafts, plan.depth, plan.width, active)
        self._scheduler.observe(plan, accepted, time.perf_counter() - begin, draft_seconds)
        live = np.where(active, accepted + 1, 0)
        return Round(state, sampler, [row[:count].tolist() for row, count in zip(tokens, live, strict=True)])

    def _module(self) -> tuple[Drafter, Variables]:
        return self._drafter.drafter, self._drafter.variables

    def _draft(self, state: ModelState, sampler: Sampler, active: np.ndarray) -> tuple[Drafts, float]:
        begin = time.perf_counter()
        drafter, variables = self._module()
        self._ring, drafts = draft_step(
            self._model,
            drafter,
            self._rule is Rule.REJECTION,
            self._variables,
            variables,
            self._ring,
            self._taps,
            self._begun(state),
            self._count.copy(),
            sampler,
            active.copy(),
        )
        self._count[:] = 0
        drafts.confidence.block_until_ready()
        return drafts, time.perf_counter() - begin

    def _begun(self, state: ModelState) -> jax.Array:
        """Where the last step of each request began, or, right after a prompt, where the prompt ends."""
        return state.length - self._count

    def _feed(self, state: ModelState) -> None:
        """Takes in the last step's positions without drafting: a later draft must not find a gap."""
        rows = local_rows(self._model.settings.parallel, len(self._count))
        self._ring = seed_drafter(*self._module(), self._ring, rows, self._taps, self._begun(state), self._count.copy())
        self._count[:] = 0

    def _verify(
        self,
        state: ModelState,
        sampler: Sampler,
        pending: np.ndarray,
        drafts: Drafts | None,
        depth: np.ndarray,
        width: int,
        active: np.ndarray,
    ) -> tuple[ModelState, Sampler, np.ndarray, np.ndarray]:
        count = width - 1
        tokens = (self._no_drafts if drafts is None else drafts.tokens)[:, :count]
        p = None
        if self._rule is Rule.REJECTION:
            p = drafts.probabilities[:, :count] if drafts is not None else self._no_probabilities
        # Copies: the device may go on reading the host's arrays after the next change of them.
        depth, active = depth.astype(np.int32), active.copy()
        if self._engram is None:
            state, sampler, outcome = verify_step(
                self._model, self._rule, self._variables, state, sampler, tokens, p, depth, active
            )
        else:
            fed = np.concatenate([pending[:, None], np.asarray(tokens)], axis=1), np.where(active, 1 + depth, 0)
            self._engram.start(*fed)
            state, begun = begin_verify(self._model, self._variables, state, sampler, tokens, depth, active)
            rows = self._engram.rows(*fed, behind=begun.flow.streams)
            state, sampler, outcome = finish_verify(
                self._model, self._rule, self._variables, state, begun, rows, sampler, tokens, p, depth, active
            )
            self._engram.advance(fed[0], np.asarray(outcome.consumed))
        if self._drafter is not None:
            missing = self._widths[-1] - width
            self._taps = jnp.pad(outcome.taps, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing else outcome.taps
            self._count = np.array(outcome.consumed)
        return state, sampler, np.asarray(outcome.tokens), np.asarray(outcome.accepted)
