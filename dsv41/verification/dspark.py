"""The drafter against the reference: drafts along case A, and teacher-forced drafts at several anchors."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.layers.dspark import Drafter
from dsv41.model import Model
from dsv41.state.ring import Ring, create_ring
from dsv41.steps.draft import seed_drafter, teacher_forced_logits
from dsv41.verification import capture
from dsv41.verification.end_to_end import CaseRun, bucket, compare_logits
from dsv41.verification.golden import Golden
from dsv41.verification.layerwise import FLIPPED_LIMIT
from dsv41.verification.limits import LAYER_ABSOLUTE, LAYER_RELATIVE_RMS, STRICT, Limits
from dsv41.verification.table import Row, at_most, max_abs, relative_rms, reported, row_errors

_forced = jax.jit(teacher_forced_logits, static_argnums=(0, 1))


class Drafting(NamedTuple):
    """A model with its drafter, and the variables of both."""

    model: Model
    drafter: Drafter
    variables: Mapping
    drafter_variables: Mapping

    def empty_ring(self, rows: int) -> Ring:
        ring = create_ring(self.model.settings, self.model.settings.text.num_nextn_predict_layers, rows)
        return jax.device_put(ring, jax.local_devices()[0])

    def feed(self, ring: Ring, taps: np.ndarray, start: int) -> Ring:
        """Takes in taps ``[rows, query, targets · d]`` of positions from ``start`` on (padded to a bucket)."""
        rows, queries, width = taps.shape
        targets = len(self.model.settings.text.dspark_target_layer_ids)
        padded = np.zeros((targets, rows, bucket(queries), width // targets), np.float32)
        padded[:, :, :queries] = np.moveaxis(taps.reshape(rows, queries, targets, -1), 2, 0)
        taps = jnp.asarray(padded, self.model.settings.dtype)
        start, count = (jnp.full((rows,), n, jnp.int32) for n in (start, queries))
        return seed_drafter(self.drafter, self.drafter_variables, ring, jnp.arange(rows), taps, start, count)

    def draft(self, ring: Ring, start: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits and confidence of the block that begins at ``start`` with ``tokens`` ``[rows, block]``."""
        starts = jnp.full((tokens.shape[0],), start, jnp.int32)
        out = _forced(*self, ring, starts, jnp.asarray(tokens, jnp.int32))
        return tuple(np.asarray(x, np.float32) for x in out)


def compare_drafts(
    group: str, golden: Golden, set_name: str, drafting: Drafting, run: CaseRun, limits: Limits
) -> list[Row]:
    """Case A: rings filled from the run's own taps, a draft after each of the first decode steps."""
    expected = golden.tensors(set_name)
    ids = expected["A.dspark.output_ids"]
    steps, rows, width = ids.shape
    prompt = run.prefill.taps.shape[1]
    ring = drafting.feed(drafting.empty_ring(rows), run.prefill.taps, 0)
    logits, confidence = [], []
    for step in range(steps):
        ring = drafting.feed(ring, run.decode[step].taps, prompt + step)
        out = drafting.draft(ring, prompt + step + 1, ids[step, :, : width - 1])
        logits.append(out[0])
        confidence.append(out[1])
    few = Limits(logits=limits.logits, greedy=limits.greedy)
    result = compare_logits(group, "A.dspark.logits", np.stack(logits), expected["A.dspark.logits"], few)
    error = max_abs(np.stack(confidence), expected["A.dspark.confidence"])
    if limits.logits is None:
        result.append(reported(group, "A.dspark.confidence", "max abs", error))
    else:
        result.append(at_most(group, "A.dspark.confidence", "max abs", error, limits.logits))
        drafts = int(np.sum(np.stack(logits).argmax(-1) != ids[..., 1:]))
        result.append(at_most(group, "A.dspark.output_ids", "ids that differ", drafts, 0))
    return result


def compare_rings(group: str, golden: Golden, drafting: Drafting) -> list[Row]:
    """The rings after the prompt, fed what the golden's own target layers read."""
    expected = golden.tensors("expected")
    taps = expected["A.prefill.main_hidden"]
    ring = drafting.feed(drafting.empty_ring(taps.shape[0]), taps, 0)
    entries = np.asarray(capture.decoded(drafting.model.settings.formats.window, ring.entries), np.float32)
    rows = []
    for stage, ours in enumerate(entries):
        name = f"A.dspark.prefill_window_kv.{stage}"
        want = expected[name]
        if golden.flavour == "fp8":
            rows.append(at_most(group, name, "relative RMS", relative_rms(ours, want), LAYER_RELATIVE_RMS))
        else:
            share = float(np.mean(row_errors(ours, want) > LAYER_ABSOLUTE))
            rows.append(at_most(group, name, "share of rows beyond 1e-4", share, FLIPPED_LIMIT))
    return rows


def compare_anchors(group: str, golden: Golden, drafting: Drafting, run: CaseRun) -> list[Row]:
    """Teacher-forced drafts of the set ``expected_dspark``, rounding off.

    Args:
      run: case A, whose tokens are the set's: its taps fill the rings.
    """
    expected = golden.tensors("expected_dspark")
    block = drafting.model.settings.text.dspark_block_size
    taps = np.concatenate([run.prefill.taps, *(step.taps for step in run.decode)], axis=1)
    logits = np.concatenate([run.prefill.logits, *(step.logits for step in run.decode)], axis=1)
    backbone = np.stack([logits[:, t + 1 : t + 1 + block] for t in expected["anchors"]])
    rows = _compare_drafts_at(group, golden, drafting, "", expected["anchors"], taps, STRICT)
    return rows + compare_logits(group, "backbone_logits", backbone, expected["backbone_logits"], STRICT)


def compare_rounded_anchors(group: str, golden: Golden, drafting: Drafting, limits: Limits) -> list[Row]:
    """The same with rounding on, from the golden's own taps: the backbone's flips are not the drafter's."""
    taps = golden.tensors("expected")["A.prefill.main_hidden"]
    anchors = golden.tensors("expected_dspark")["anchors"]
    within = anchors[anchors < taps.shape[1]]
    return _compare_drafts_at(group, golden, drafting, "quant.", within, taps, limits)


def _compare_drafts_at(
    group: str,
    golden: Golden,
    drafting: Drafting,
    prefix: str,
    anchors: np.ndarray,
    taps: np.ndarray,
    limits: Limits,
) -> list[Row]:
    """Drafts after anchors, the rings filled from taps ``[rows, query, targets · d]`` of the positions before."""
    expected = golden.tensors("expected_dspark")
    ids, block = expected["input_ids"].astype(np.int32), drafting.model.settings.text.dspark_block_size
    logits, confidence = [], []
    for anchor in anchors:
        begin = int(anchor) + 1
        ring = drafting.feed(drafting.empty_ring(len(ids)), taps[:, :begin], 0)
        drafted = drafting.draft(ring, begin, ids[:, begin : begin + block])
        logits.append(drafted[0])
        confidence.append(drafted[1])
    chosen = np.isin(expected["anchors"], anchors)
    rows = compare_logits(group, f"{prefix}logits", np.stack(logits), expected[f"{prefix}logits"][chosen], limits)
    error = max_abs(np.stack(confidence), expected[f"{prefix}confidence"][chosen])
    row = reported if limits.logits is None else functools.partial(at_most, limit=limits.logits)
    return [*rows, row(group, f"{prefix}confidence", "max abs", error)]
