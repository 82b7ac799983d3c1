"""The drafter's training loss and gradients against the reference's autograd, straight through the roundings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.checkpoint.placement import flatten_tree, parameter_place
from dsv41.layers.dspark import Drafter
from dsv41.model import Model
from dsv41.numerics.rounding import RoundingPolicy
from dsv41.settings import Settings
from dsv41.training.dspark import DsparkConfig, draft_terms, sum_terms
from dsv41.training.forward import TrainBatch, forward
from dsv41.verification.golden import Golden
from dsv41.verification.gradients import GRADIENT_LIMIT
from dsv41.verification.table import Row, at_most, largest, relative_rms, reported

_SET = "expected_dspark"


def draft_gradients(
    golden: Golden, variables: Mapping, drafter_params: Mapping, preset: str
) -> tuple[float, dict[tuple[str, ...], np.ndarray]]:
    """Mean cross-entropy of the golden's blocks under a policy preset, and its gradients by the parameter's path."""
    settings = Settings.for_training(golden.config, RoundingPolicy.preset(preset))
    model, drafter = Model(settings), Drafter(settings)
    expected = golden.tensors(_SET)
    ids, anchors = expected["input_ids"].astype(np.int32), expected["anchors"].astype(np.int32)
    columns = jnp.asarray(np.tile(anchors, (len(ids), 1)))
    options = DsparkConfig(anchors=len(anchors), gamma=math.inf, cross_entropy=1.0, total_variation=0.0, confidence=0.0)
    # Padding, which must change nothing.
    padding = ((0, 0), (0, -ids.shape[1] % 16))
    filled = (np.pad(ids, padding), np.pad(ids[:, 1:], ((0, 0), (0, 1 + padding[1][1])), constant_values=-1))
    documents = np.pad(np.zeros_like(ids), padding, constant_values=-1)
    batch = TrainBatch(*map(jnp.asarray, (*filled, documents)))
    outputs = jax.jit(forward, static_argnums=0)(model, variables, batch)

    @jax.jit
    def loss_and_gradient(params, outputs):
        def loss(params):
            sums = sum_terms(options, *draft_terms(model, drafter, variables, params, outputs, batch, columns))
            return sums.loss / sums.weight

        return jax.value_and_grad(loss)(params)

    loss, gradient = loss_and_gradient(drafter_params, outputs)
    return float(loss), {path: np.asarray(leaf) for path, leaf in flatten_tree(gradient).items()}


def compare_draft_gradients(golden: Golden, variables: Mapping, drafter_params: Mapping, preset: str) -> list[Row]:
    """Every parameter's norm, and the whole gradients that the set has.

    Args:
      variables, drafter_params: float weights, as modules with plain storage have them.
      preset: "off", or "cache": there a deep backbone's flips are true differences, and nothing is held.
    """
    loss, ours = draft_gradients(golden, variables, drafter_params, preset)
    prefix = {"off": "", "cache": "quant."}[preset]
    checks = json.loads((golden.directory / f"{_SET}.json").read_text())["checks"]

    def tensor(name: str) -> np.ndarray:
        place = parameter_place(golden.config, name)
        return ours[place.path[1:]][place.index]

    norms = {f"mtp.{name}": norm for name, norm in checks[f"{prefix}grad_norm"].items()}
    mine = {name: float(np.linalg.norm(tensor(name).astype(np.float64))) for name in norms}
    without = [mine[name] for name, norm in norms.items() if norm is None]
    by_norm = {name: abs(mine[name] - norm) / norm for name, norm in norms.items() if norm is not None}
    whole = {
        key: relative_rms(tensor(key.removeprefix(f"{prefix}grad.")), theirs)
        for key, theirs in golden.tensors(_SET).items()
        if key.startswith(f"{prefix}grad.")
    }
    group = "drafter's gradients, rounding " + ("on" if prefix else "off")
    is_held = preset == "off"
    errors = [("cross-entropy", "relative", abs(loss / checks[f"{prefix}cross_entropy"] - 1), "")]
    for what, measured in (("norms", by_norm), ("whole", whole)):
        worst, error = largest(measured)
        errors.append((what, "largest relative", error, f"{len(measured)}; largest: {worst}"))
    rows = [
        at_most(group, name, measure, error, GRADIENT_LIMIT, note)
        if is_held
        else reported(group, name, measure, error, note)
        for name, measure, error, note in errors
    ]
    pathless = np.max(without, initial=0.0)
    return [*rows, at_most(group, "parameters without a path", "norm", pathless, 0.0, str(len(without)))]
