"""What the rows about gradients find: each kind of mistake fails a row, and the reference's own gradients none.

Nothing is computed: gradients are made up of what the golden has, whole ones or any of the right norm. Real ones are
compared in test_verify.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from dsv41.checkpoint import checkpoint_layout
from dsv41.checkpoint.placement import parameter_place
from dsv41.verification import drafts_gradient, gradients
from dsv41.verification.golden import Golden
from dsv41.verification.table import failed
from tests.conftest import GOLDEN


class MadeUp:
    """Gradients of the golden's set by parameter, as the comparisons take them; what is changed in place counts."""

    def __init__(self, golden: Golden, name: str, prefix: str, part: str = "") -> None:
        self._config = golden.config
        self._layout = checkpoint_layout(golden.config)
        self._first = 1 if part else 0
        self.tree: dict[tuple[str, ...], np.ndarray] = {}
        checks = json.loads((golden.directory / f"{name}.json").read_text())["checks"]
        expected = golden.tensors(name)
        for parameter, norm in checks[f"{prefix}grad_norm"].items():
            tensor, key = self.of(part + parameter), f"{prefix}grad.{part}{parameter}"
            if key in expected:
                tensor[...] = expected[key]
            elif f"{key}.rows" in expected:
                tensor[expected["grad.embed.rows_ids"]] = expected[f"{key}.rows"]
            elif norm is not None:
                tensor.flat[0] = norm
        self.loss = checks[f"{prefix}loss" if f"{prefix}loss" in checks else f"{prefix}cross_entropy"]

    def of(self, parameter: str) -> np.ndarray:
        """A parameter's part of its leaf."""
        place, shape = parameter_place(self._config, parameter), self._layout[parameter].value_shape
        path = place.path[self._first :]
        return self.tree.setdefault(path, np.zeros((*place.stack, *shape)))[place.index]


def spoil(made: MadeUp, how: str, parameter: str) -> None:
    tensor = made.of(parameter)
    if how == "scaled":
        tensor *= 1.001
    elif how == "turned round":
        tensor *= -1
    else:
        tensor.flat[-1] = {"there": 1e-6, "NaN": np.nan}[how]


def found(rows: list) -> set[str]:
    return {f"{row.name}, {row.measure}" for row in failed(rows)}


NORMS, WHOLE = "gradients, norms, largest relative", "gradients, whole, largest relative"
NO_PATH = "parameters without a path, norm"


@pytest.mark.parametrize(
    ("how", "parameter", "rows"),
    [
        ("scaled", "layers.3.attn.wq_b.weight", {NORMS}),
        ("scaled", "layers.6.hc_ffn_base", {NORMS, WHOLE}),
        ("turned round", "embed.weight", {WHOLE}),
        ("there", "layers.2.attn.indexer.wk.weight", {NO_PATH}),
        ("NaN", "layers.4.ffn.gate.bias", {NO_PATH}),
        ("NaN", "layers.3.attn.wq_b.weight", {NORMS, "gradients, norms, median relative"}),
    ],
)
def test_a_wrong_gradient_of_the_backbone_fails_its_row(monkeypatch, how, parameter, rows):
    golden = Golden(GOLDEN / "mini8" / "f32", checkpoint=GOLDEN / "mini8" / "fp8")
    made = {"off": MadeUp(golden, "expected_grad", ""), "cache": MadeUp(golden, "expected_grad", "quant.")}
    monkeypatch.setattr(gradients, "gradients", lambda *arguments: (made[arguments[-1]].loss, made[arguments[-1]].tree))
    assert not failed(gradients.compare_gradients(golden, {}))
    spoil(made["off"], how, parameter)
    assert found(gradients.compare_gradients(golden, {})) == rows
    made["off"].loss *= 1.001
    assert found(gradients.compare_gradients(golden, {})) == rows | {"loss, relative"}


def test_with_many_layers_limits_are_wider_and_rounding_is_reported(monkeypatch):
    golden = Golden(GOLDEN / "mini8" / "f32", checkpoint=GOLDEN / "mini8" / "fp8")
    made = {"off": MadeUp(golden, "expected_grad", ""), "cache": MadeUp(golden, "expected_grad", "quant.")}
    monkeypatch.setattr(gradients, "gradients", lambda *arguments: (made[arguments[-1]].loss, made[arguments[-1]].tree))
    parameter = "layers.3.attn.wq_b.weight"
    made["off"].of(parameter)[...] *= 1.0005
    made["cache"].loss *= 1.001
    spoil(made["cache"], "scaled", parameter)
    assert found(gradients.compare_gradients(golden, {})) == {NORMS, "loss, relative"}
    monkeypatch.setattr(gradients, "SHALLOW_LAYERS", 7)
    assert not failed(gradients.compare_gradients(golden, {}))
    made["off"].of(parameter)[...] *= 1.001
    assert found(gradients.compare_gradients(golden, {})) == {NORMS}
    spoil(made["cache"], "there", "layers.2.attn.indexer.wk.weight")
    assert found(gradients.compare_gradients(golden, {})) == {NORMS, NO_PATH}


@pytest.mark.parametrize(
    ("how", "parameter", "rows"),
    [
        ("scaled", "mtp.0.attn.wq_b.weight", {"norms, largest relative"}),
        ("NaN", "mtp.0.attn.wq_b.weight", {"norms, largest relative"}),
        ("NaN", "mtp.0.ffn.gate.bias", {NO_PATH}),
    ],
)
def test_a_wrong_gradient_of_the_drafter_fails_its_row(monkeypatch, how, parameter, rows):
    golden = Golden(GOLDEN / "mini8" / "f32", checkpoint=GOLDEN / "mini8" / "fp8")
    made = MadeUp(golden, "expected_dspark", "", "mtp.")
    compare: Callable = drafts_gradient.compare_draft_gradients
    monkeypatch.setattr(drafts_gradient, "draft_gradients", lambda *_: (made.loss, made.tree))
    assert not failed(compare(golden, {}, {}, "off"))
    spoil(made, how, parameter)
    assert found(compare(golden, {}, {}, "off")) == rows
    made.loss *= 1.001
    assert found(compare(golden, {}, {}, "off")) == rows | {"cross-entropy, relative"}
