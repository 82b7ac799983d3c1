"""Cases A, B and C: a prompt, then teacher-forced decode steps, against the reference's numbers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.config import TextConfig
from dsv41.model import Model
from dsv41.numerics.ngram_hash import hash_ids, lookback, ngram_hash
from dsv41.state.request import create_sequential_state
from dsv41.verification import capture
from dsv41.verification.golden import Golden
from dsv41.verification.limits import Limits
from dsv41.verification.table import (
    Row,
    at_least,
    at_most,
    cosine,
    divergence,
    greedy_agreement,
    max_abs,
    relative_rms,
    reported,
    row_errors,
    same_sets,
)  # fmt: skip

SLOTS = 2
"""Requests of the state that all cases run in; a case of one row leaves the other slot inactive."""


@dataclasses.dataclass
class CaseRun:
    """What the model made of one case.

    Attributes:
      prefill: the prompt's chunk; decode: one entry a step.
      caches: by golden name, after the prompt ("prefill_cache.…") and after the last step ("final_cache.…").
    """

    prefill: capture.Capture
    decode: list[capture.Capture]
    caches: dict[str, np.ndarray]


def bucket(tokens: int) -> int:
    """Width that a chunk of so many tokens is padded to, so that cases share compilations."""
    return -(-tokens // 64) * 64


def capacity(golden: Golden) -> int:
    """Tokens that each slot has room for: every case of the directory fits."""
    longest = max(v.shape[-1] for name in golden.sets for k, v in golden.tensors(name).items() if "input_ids" in k)
    return bucket(max(longest, golden.tensors("expected")["A.input_ids"].shape[1]))


def image_flags(golden: Golden, case: str) -> np.ndarray | None:
    """Positions of image spans in the prompt, bool ``[rows, query]``; None in text cases."""
    types = golden.tensors("expected").get(f"{case}.token_types")
    return None if types is None else types >= 0


def run_case(model: Model, variables: Mapping, golden: Golden, case: str, forced: bool = False) -> CaseRun:
    """Runs a case; ``forced`` uses the golden's selections and candidate pool instead of the model's own."""
    settings, expected = model.settings, golden.tensors("expected")
    ids, prompt = expected[f"{case}.input_ids"], golden.prompt_length(case)
    rows, total = ids.shape
    tokens = capacity(golden)
    state = create_sequential_state(settings, SLOTS, tokens)

    def selection(phase: str, step: int | None = None) -> tuple[dict[int, np.ndarray], np.ndarray | None]:
        if not forced:
            return {}, None
        pick = lambda name: expected[f"{case}.{phase}.{name}"][() if step is None else step]  # noqa: E731
        source = settings.text.candidate_source_layer_id
        candidates = None if source is None else pick(f"candidates.{source}")
        return {s: pick(f"topk.{s}") for s in settings.table.index_sources}, candidates

    width, flags = bucket(prompt), image_flags(golden, case)
    embed = expected[f"{case}.prefill.embed"] if flags is not None else None
    state, prefill = capture.run_chunk(
        model, variables, state, ids[:, :prompt], width, *selection("prefill"), flags, embed
    )
    caches = _caches(golden, settings, state, "prefill_cache", prompt, rows)
    decode = []
    for step in range(total - prompt):
        position = prompt + step
        state, out = capture.run_chunk(
            model, variables, state, ids[:, position : position + 1], 1, *selection("decode", step)
        )
        decode.append(out)
    caches |= _caches(golden, settings, state, "final_cache", total, rows)
    return CaseRun(prefill, decode, caches)


def _caches(golden: Golden, settings, state, when: str, length: int, rows: int) -> dict[str, np.ndarray]:
    """The caches that the golden has for case A, in its names and layouts."""
    out: dict[str, np.ndarray] = {}
    for name in golden.tensors("expected"):
        if not name.startswith(f"A.{when}."):
            continue
        kind, layer = name.split(".")[2], int(name.split(".")[3])
        ratio = settings.table.layers[layer].kind.ratio
        if kind in ("compress_kv", "index_k"):
            part = "main" if kind == "compress_kv" else "index"
            out[name] = capture.memory_of(settings, state, layer, part, rows, length // ratio)
        elif kind == "window_kv":
            out[name] = capture.ring_of(settings, state, layer, rows)
        elif kind in ("tail_kv", "tail_score"):
            kv, gate = capture.tail_of(settings, state, layer, rows)
            out[name] = (kv if kind == "tail_kv" else gate)[:, : length % ratio]
    return out


def compare_logits(group: str, name: str, ours: np.ndarray, golden: np.ndarray, limits: Limits) -> list[Row]:
    """Rows for logits ``[…, vocab]`` under the limits of the present rounding."""
    rows = []
    kl_mean, kl_max = divergence(ours, golden)
    note = f"KL mean {kl_mean:.1e} max {kl_max:.1e}, cosine {cosine(ours, golden):.6f}"
    if limits.logits is not None:
        rows.append(at_most(group, name, "max abs", max_abs(ours, golden), limits.logits, note))
    else:
        rows.append(reported(group, name, "max abs", max_abs(ours, golden), note))
        share = float(np.mean(row_errors(ours, golden) <= 1e-3))
        median = float(np.median(np.abs(ours.astype(np.float64) - golden)))
        if limits.median is not None:
            rows.append(at_most(group, name, "median abs", median, limits.median))
        if limits.rows_within is not None:
            rows.append(at_least(group, name, "rows within 1e-3", share, limits.rows_within))
    agreement = greedy_agreement(ours, golden)
    if limits.greedy is None:
        rows.append(reported(group, name, "greedy tokens", agreement))
    else:
        rows.append(at_least(group, name, "greedy tokens", agreement, limits.greedy))
    return rows


def compare_case(
    group: str, golden: Golden, set_name: str, case: str, run: CaseRun, limits: Limits, forced: bool = False
) -> list[Row]:
    """Rows of one case: logits, and for case A hidden, streams, selections and caches."""
    expected = golden.tensors(set_name)
    decode = np.stack([step.logits[:, 0] for step in run.decode])
    # The limits on medians and shares are over the prompt's rows; a dozen decode rows are too few for a share.
    rows = compare_logits(
        group, f"{case}.prefill.logits", run.prefill.logits, expected[f"{case}.prefill.logits"], limits
    )
    few = dataclasses.replace(limits, median=None, rows_within=None)
    rows += compare_logits(group, f"{case}.decode.logits", decode, expected[f"{case}.decode.logits"], few)
    for name, value in expected.items():
        parts = name.split(".")
        if parts[0] != case or name in (f"{case}.prefill.logits", f"{case}.decode.logits"):
            continue
        if parts[1] in ("prefill", "decode") and len(parts) == 4 and parts[2] == "topk":
            ours = _layer_value(run, parts[1], int(parts[3]), "topk")
            same = same_sets(ours, value)
            note = f"{np.sum(~same)} of {same.size} rows differ" + (" (own choice, inputs forced)" if forced else "")
            rows.append(_share(group, name, float(same.mean()), limits.selections, note))
        elif name in (f"{case}.prefill.final_hidden", f"{case}.prefill.main_hidden"):
            ours = run.prefill.hidden if parts[2] == "final_hidden" else run.prefill.taps
            rows.append(_tensor(group, name, ours, value, limits))
        elif parts[1] == "prefill" and parts[2] in ("layer", "pre_mix", "engram_gate") and len(parts) == 4:
            ours = run.prefill.layers[int(parts[3])][parts[2]][: value.shape[0]]
            rows.append(_tensor(group, name, ours, value, limits))
        elif parts[1] == "prefill" and parts[2] == "router_idx":
            same = same_sets(run.prefill.layers[int(parts[3])]["router_idx"], value)
            rows.append(
                _share(
                    group, name, float(same.mean()), limits.selections, f"{np.sum(~same)} of {same.size} rows differ"
                )
            )
        elif name in run.caches:
            rows.append(_tensor(group, name, run.caches[name], _live_tail(golden, name, value), limits))
        elif parts[1] in ("prefill", "decode") and parts[2] == "engram_hash":
            rows.append(_hashes(group, golden, case, name, value))
    return rows


def compare_all(group: str, golden: Golden, runs: Mapping[str, CaseRun], limits: Limits) -> list[Row]:
    """Rows for the logits of all cases together, prompts and steps: where a rounding flips is chance, and one flip
    early in one prompt moves most rows of that prompt."""
    expected = golden.tensors("expected")
    ours, want = [], []
    for case, run in runs.items():
        vocab = run.prefill.logits.shape[-1]
        ours += [run.prefill.logits.reshape(-1, vocab), *(step.logits[:, 0] for step in run.decode)]
        want += [expected[f"{case}.{phase}.logits"].reshape(-1, vocab) for phase in ("prefill", "decode")]
    return compare_logits(group, "logits of all cases", np.concatenate(ours), np.concatenate(want), limits)


def _layer_value(run: CaseRun, phase: str, layer: int, name: str) -> np.ndarray:
    if phase == "prefill":
        return run.prefill.layers[layer][name]
    return np.stack([step.layers[layer][name] for step in run.decode])


def _live_tail(golden: Golden, name: str, value: np.ndarray) -> np.ndarray:
    """Golden tails keep stale slots; only those of the open group are live."""
    if ".tail_" not in name:
        return value
    length = golden.prompt_length("A")
    if ".final_cache." in name:
        length = golden.tensors("expected")["A.input_ids"].shape[1]
    return value[:, : length % golden.config.text.compress_ratios[int(name.split(".")[3])]]


def _tensor(group: str, name: str, ours: np.ndarray, golden: np.ndarray, limits: Limits) -> Row:
    if limits.logits is not None:
        return at_most(group, name, "max abs", max_abs(ours, golden), limits.logits)
    return reported(group, name, "relative RMS", relative_rms(ours, golden), f"max abs {max_abs(ours, golden):.1e}")


def _share(group: str, name: str, share: float, limit: float | None, note: str) -> Row:
    if limit is None:
        return reported(group, name, "same sets", share, note)
    return at_least(group, name, "same sets", share, limit, note)


@functools.partial(jax.jit, static_argnums=0)
def _row_ids(text: TextConfig, compressed: jax.Array, pad: jax.Array) -> jax.Array:
    """Engram rows ``[layers, rows, query, columns]`` of compressed ids ``[rows, query]`` from a sequence's start."""
    before = jnp.full((compressed.shape[0], text.engram_max_ngram_size - 1), -1, jnp.int32)
    return hash_ids(ngram_hash(text), lookback(compressed, before), pad)


def _hashes(group: str, golden: Golden, case: str, name: str, value: np.ndarray) -> Row:
    """Engram row ids: exact, from tokens alone."""
    text, expected = golden.config.text, golden.tensors("expected")
    ids, prompt = expected[f"{case}.input_ids"], golden.prompt_length(case)
    compressed = golden.token_map[ids].astype(np.int32)
    flags = image_flags(golden, case)
    if flags is not None:
        compressed[:, :prompt][flags] = -1
    width = bucket(ids.shape[1])
    padded = np.pad(compressed, ((0, 0), (0, width - ids.shape[1])), constant_values=-1)
    ours = np.asarray(_row_ids(text, padded, golden.token_map[text.engram_pad_token_id]))
    ours = np.moveaxis(ours, 0, 2)[:, : ids.shape[1]]
    ours = ours[:, :prompt] if ".prefill." in name else np.moveaxis(ours[:, prompt:], 1, 0)[:, :, None]
    return at_most(group, name, "ids that differ", int(np.sum(ours != value)), 0)
