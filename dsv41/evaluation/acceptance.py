"""How many drafts a backbone accepts, and what that gains: from real verification, not from a loss."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dsv41.inference.engine import Engine
from dsv41.inference.measurements import AcceptanceStatistics
from dsv41.inference.requests import Request

_COUNTS = ("drafted", "verified", "reached", "accepted")


class _Run(NamedTuple):
    """Tokens of every request, and how many a second."""

    tokens: list[tuple[int, ...]]
    per_second: float


def without_drafts(engine: Engine) -> Engine:
    """An engine over the same weights that does not speculate; Engram's tables must be among them."""
    options = dataclasses.replace(engine.options, speculative=None)
    return Engine(engine.model, engine.variables, engine.tokenizer, options)


def measure_acceptance(
    drafting: Engine,
    plain: Engine,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Continues prompts with and without drafts.

    Everything runs twice, and the second time counts: then all is compiled, and a scheduler knows its machine.

    Args:
      drafting: with ``speculative``, the drafts to verify a step; plain: the same without, see :func:`without_drafts`.
      prompts: token ids, held out from the drafter's training.
      new_tokens: of each prompt, unless the text ends before.
      temperature: of the sampling; 0: greedy.
      seed: of the first prompt's sampling; the others' count on from it.

    Returns:
      ``acceptance``, by position of the block the share of the drafts that were accepted among those whose
      predecessors were (None where none came so far), with the counts ``verified``, ``reached`` and ``accepted``;
      ``steps``, ``mean_accepted`` drafts of a step (None without any) and ``tokens_per_step``, one more;
      ``tokens_per_s`` and ``plain_tokens_per_s``, prefill included, and ``speedup``, their ratio; ``same_tokens``, the
      share of prompts with the same continuation both ways, None where they may differ: the sampling of an engine that
      is not deterministic keeps the distribution alone.

    Raises:
      ValueError: an engine drafts that should not, or the other way round.
      RequestError: a prompt does not fit the engine.
    """
    if drafting.options.speculative is None:
        raise ValueError("drafting: this engine was made without speculative")
    if plain.options.speculative is not None:
        raise ValueError(f"plain: this engine was made with speculative {plain.options.speculative!r}")
    requests = [
        Request(tokens=prompt, max_new_tokens=new_tokens, temperature=temperature, seed=seed + i)
        for i, prompt in enumerate(prompts)
    ]
    for engine in (plain, drafting):
        engine.generate(requests)
    before = drafting.statistics
    expected, run = _timed(plain, requests), _timed(drafting, requests)
    statistics = _since(drafting.statistics, before)
    same = None
    if temperature == 0 or drafting.options.deterministic:
        same = float(np.mean([a == b for a, b in zip(run.tokens, expected.tokens, strict=True)]))
    mean = statistics.mean_accepted if statistics.steps else None
    return {
        "speculative": drafting.options.speculative,
        "temperature": temperature,
        "deterministic": drafting.options.deterministic,
        "prompts": len(requests),
        "new_tokens": sum(map(len, run.tokens)),
        "steps": statistics.steps,
        "acceptance": [None if np.isnan(share) else float(share) for share in statistics.acceptance],
        **{name: getattr(statistics, name).tolist() for name in _COUNTS[1:]},
        "mean_accepted": mean,
        "tokens_per_step": None if mean is None else 1 + mean,
        "tokens_per_s": run.per_second,
        "plain_tokens_per_s": expected.per_second,
        "speedup": run.per_second / expected.per_second,
        "same_tokens": same,
    }


def _timed(engine: Engine, requests: Sequence[Request]) -> _Run:
    begin, compiled = time.perf_counter(), engine.compile_s
    tokens = [completion.tokens for completion in engine.generate(requests)]
    seconds = time.perf_counter() - begin - (engine.compile_s - compiled)
    return _Run(tokens, sum(map(len, tokens)) / seconds)


def _since(now: AcceptanceStatistics, before: AcceptanceStatistics) -> AcceptanceStatistics:
    """What was counted between two readings."""
    difference = AcceptanceStatistics(len(now.drafted))
    for name in _COUNTS:
        getattr(difference, name)[:] = getattr(now, name) - getattr(before, name)
    difference.steps = now.steps - before.steps
    return difference
