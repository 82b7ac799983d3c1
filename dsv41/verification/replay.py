"""Bounded replay and prefix hits against the reference: cases D, E and F of ``expected_replay``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.inference.prefill import PrefillOptions, encode_prompts
from dsv41.model import Model
from dsv41.state.request import ModelState, create_sequential_state
from dsv41.state.ring import Ring
from dsv41.verification import capture
from dsv41.verification.end_to_end import SLOTS, bucket, capacity, compare_logits
from dsv41.verification.golden import Golden
from dsv41.verification.limits import Limits
from dsv41.verification.table import Row

CHUNK = 64


def compare_replay(
    group: str, golden: Golden, model: Model, variables: Mapping, prefix: str, limits: Limits
) -> list[Row]:
    """All cases of the set whose tensors start with ``prefix`` ("" or "quant.")."""
    expected = golden.tensors("expected_replay")
    ids = expected["input_ids"].astype(np.int32)
    window = model.settings.text.sliding_window
    few = dataclasses.replace(limits, median=None, rows_within=None)
    rows: list[Row] = []
    everything: list[tuple[np.ndarray, np.ndarray]] = []

    def compare(name: str, ours: np.ndarray, limits: Limits) -> None:
        want = expected[f"{prefix}{name}"]
        # Without a limit on values single cases are chance: one early flip moves most rows of a short case.
        rows.extend(compare_logits(group, f"{prefix}{name}", ours, want, limits if limits.logits else Limits()))
        everything.append((ours.reshape(-1, ours.shape[-1]), want.reshape(-1, want.shape[-1])))

    for case in sorted(
        {m[1] for m in (re.fullmatch(rf"{re.escape(prefix)}([DEF]\w*)\.decode\.logits", k) for k in expected) if m}
    ):
        decode = expected[f"{prefix}{case}.decode.logits"]
        steps, requests = decode.shape[:2]
        state = create_sequential_state(model.settings, SLOTS, capacity(golden))
        if case == "D":
            length = expected[f"{prefix}D.prefill.logits"].shape[1]
            state, logits = _exact(model, variables, state, ids[:requests, :length])
            compare("D.prefill.logits", logits, limits)
        else:
            cached, length = _lengths(case)
            if cached:
                # The prefix's pages stay, its rings are lost: what they hold must not matter, so it is NaN.
                state, _ = _exact(model, variables, state, ids[:requests, :cached])
                state = _lose_rings(state)
            state, tail = encode_prompts(
                model,
                variables,
                state,
                range(requests),
                [list(r[:length]) for r in ids[:requests]],
                PrefillOptions(chunk_sizes=(CHUNK,)),
                cached,
            )
            state, logits = capture.replayed_logits(model, variables, state, tail)
            compare(f"{case}.tail.logits", np.asarray(logits)[:, : min(length, window)], limits)
        ours = []
        for step in range(steps):
            state, out = capture.run_chunk(
                model, variables, state, ids[:requests, length + step : length + step + 1], 1
            )
            ours.append(out.logits[:, 0])
        compare(f"{case}.decode.logits", np.stack(ours), few)
    if limits.logits is None:
        ours, want = (np.concatenate(parts) for parts in zip(*everything, strict=True))
        rows += compare_logits(group, f"{prefix}logits of all cases", ours, want, limits)
    return rows


def _lengths(case: str) -> tuple[int, int]:
    """(cached, prompt) tokens of a case name: E200 is cold, F100_130 a hit of 100 in a prompt of 130."""
    numbers = [int(n) for n in case[1:].split("_")]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, numbers[0])


def _exact(model: Model, variables: Mapping, state: ModelState, tokens: np.ndarray) -> tuple[ModelState, np.ndarray]:
    """Exact prefill in chunks, logits of all positions."""
    logits = []
    for begin in range(0, tokens.shape[1], CHUNK):
        chunk = tokens[:, begin : begin + CHUNK]
        state, out = capture.run_chunk(model, variables, state, chunk, bucket(chunk.shape[1]))
        logits.append(out.logits)
    return state, np.concatenate(logits, axis=1)


@jax.jit
def _lose_rings(state: ModelState) -> ModelState:
    """Pages as they are; everything else of the requests gone, ring contents NaN."""

    def lost(ring: Ring) -> Ring:
        nan = ring.entries.map(lambda leaf: jnp.full_like(leaf, 0xFF if leaf.dtype == jnp.uint8 else jnp.nan))
        return Ring(nan, jnp.full_like(ring.positions, -1))

    return state.replace(
        encoder_ring=lost(state.encoder_ring),
        decoder_ring=lost(state.decoder_ring),
        tails={
            ratio: type(t)(jnp.full_like(t.kv, jnp.nan), jnp.full_like(t.gate, jnp.nan))
            for ratio, t in state.tails.items()
        },
        ngram_tail=jnp.full_like(state.ngram_tail, -1),
        length=jnp.zeros_like(state.length),
    )
