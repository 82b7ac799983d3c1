"""The whole verification of one golden directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax

from dsv41.layers.dspark import Drafter
from dsv41.model import Model
from dsv41.numerics.rounding import RoundingPolicy
from dsv41.settings import Settings
from dsv41.verification.drafts_gradient import compare_draft_gradients
from dsv41.verification.dspark import Drafting, compare_anchors, compare_drafts, compare_rings, compare_rounded_anchors
from dsv41.verification.end_to_end import compare_all, compare_case, run_case
from dsv41.verification.golden import Golden
from dsv41.verification.gradients import compare_gradients
from dsv41.verification.layerwise import compare_layers
from dsv41.verification.limits import REPLAY_ROUNDED, STRICT, Limits, rounded_limits
from dsv41.verification.replay import compare_replay
from dsv41.verification.table import Row, skipped
from dsv41.verification.vision import compare_pictures

PAGE_TOKENS = 8
"""Small pages, so that the short goldens spread over many."""


def verify(golden: Golden, progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Compares everything that the directory has with what the model computes on the present back end.

    Args:
      progress: called with the name of each stage before it runs.
    """
    rows: list[Row] = []
    variables: Mapping | None = None
    drafter_variables: Mapping | None = None

    def drafting(cache_rounding: bool) -> Drafting:
        nonlocal drafter_variables
        backbone, weights = model(cache_rounding)
        drafter = Drafter(backbone.settings)
        if drafter_variables is None:
            drafter_variables = golden.drafter_variables(drafter)
        return Drafting(backbone, drafter, weights, drafter_variables)

    def model(cache_rounding: bool) -> tuple[Model, Mapping]:
        nonlocal variables
        model = Model(Settings.default(golden.config, cache_rounding=cache_rounding, page_tokens=PAGE_TOKENS))
        if variables is None:
            variables = golden.variables(model)
        return model, variables

    # Float32 must mean float32 on every back end: TF32 and bfloat16 passes are the defaults elsewhere.
    with jax.default_matmul_precision("highest"):
        if golden.has("expected_noquant"):
            progress("rounding off, free selection")
            smooth = run_case(*model(False), golden, "A")
            rows += compare_case("rounding off", golden, "expected_noquant", "A", smooth, STRICT)
            if "A.dspark.logits" in golden.tensors("expected_noquant"):
                rows += compare_drafts(
                    "drafts, rounding off", golden, "expected_noquant", drafting(False), smooth, STRICT
                )
        if golden.has("expected"):
            runs = {}
            for case in _cases(golden):
                progress(f"rounding on, case {case}")
                runs[case] = run_case(*model(True), golden, case)
                rows += compare_case("rounding on", golden, "expected", case, runs[case], Limits())
            rows += compare_all("rounding on", golden, runs, rounded_limits(golden.config))
            progress("rounding on, forced selection")
            forced = run_case(*model(True), golden, "A", forced=True)
            rows += compare_case("rounding on, selection forced", golden, "expected", "A", forced, Limits())
            progress("layer by layer")
            rows += compare_layers(golden, *model(True))
            if "A.dspark.logits" in golden.tensors("expected"):
                progress("drafts, rounding on")
                limits = rounded_limits(golden.config)
                rows += compare_drafts("drafts, rounding on", golden, "expected", drafting(True), runs["A"], limits)
                rows += compare_rings("drafts, rounding on", golden, drafting(True))
            progress("pictures")
            rows += compare_pictures("pictures", golden, _cases(golden))
        if golden.has("expected_replay"):
            progress("replay, rounding off")
            rows += compare_replay("replay, rounding off", golden, *model(False), "", STRICT)
            progress("replay, rounding on")
            rows += compare_replay("replay, rounding on", golden, *model(True), "quant.", REPLAY_ROUNDED)
        if golden.has("expected_dspark") and golden.has("expected_noquant"):
            progress("teacher-forced drafts")
            rows += compare_anchors("teacher-forced drafts", golden, drafting(False), smooth)
            limits = rounded_limits(golden.config)
            rows += compare_rounded_anchors("teacher-forced drafts", golden, drafting(True), limits)
        if golden.has("expected_grad"):
            progress("gradients")
            plain = Model(Settings.for_training(golden.config, RoundingPolicy.preset("off")))
            weights = golden.variables(plain)
            rows += compare_gradients(golden, weights)
            if golden.has("expected_dspark"):
                progress("drafter's gradients")
                params = golden.drafter_variables(Drafter(plain.settings))["params"]
                rows += compare_draft_gradients(golden, weights, params, "off")
    known = {"expected", "expected_noquant", "expected_replay", "expected_dspark", "expected_grad"}
    for name in golden.sets:
        if name not in known:
            rows.append(skipped(name, "all tensors", "no comparison is known for this set"))
    return rows


def _cases(golden: Golden) -> tuple[str, ...]:
    names = golden.tensors("expected")
    return tuple(sorted({n.split(".")[0] for n in names if n.endswith(".prefill.logits")}))
