"""Loss and gradients of the training pass against the reference's autograd, straight through the roundings."""

from __future__ import annotations

import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dsv41.checkpoint.placement import flatten_tree, parameter_place
from dsv41.model import Model
from dsv41.numerics.rounding import RoundingPolicy
from dsv41.settings import Settings
from dsv41.training.forward import TrainBatch
from dsv41.training.losses import LossConfig
from dsv41.training.step import Counts, Recipe, loss_and_gradient
from dsv41.training.update import Update, masters
from dsv41.verification.golden import Golden
from dsv41.verification.limits import SHALLOW_LAYERS
from dsv41.verification.table import Row, at_most, largest, relative_rms, reported

GRADIENT_LIMIT = 1e-4
"""Relative, of a norm or of a whole gradient, rounding off. With rounding on a flipped value is a true difference."""

DEEP_LIMIT = 1e-3
"""The same with more than :data:`~dsv41.verification.limits.SHALLOW_LAYERS` layers: float32's own noise grows on the
way down, most where Engram's gates are steep. With rounding on early flips decide them all there.
"""

_loss_and_gradient = jax.jit(loss_and_gradient, static_argnums=0)


def gradients(golden: Golden, variables: Mapping, preset: str) -> tuple[float, dict[tuple[str, ...], np.ndarray]]:
    """Loss, and gradients by the path of the parameter, of the golden's tokens under a policy preset.

    Layers are recomputed in the backward pass as in training, where every gradient is held to a limit ("off"); with
    rounding they are not, a fifth less to compile.
    """
    remat = "choices" if preset == "off" else "nothing"
    model = Model(Settings.for_training(golden.config, RoundingPolicy.preset(preset), remat))
    recipe = Recipe(model, LossConfig(balance=0.0), Update(optax.identity(), ()))
    batch = _batch(golden.tensors("expected_grad")["input_ids"].astype(np.int32))
    params = masters(variables["params"])
    sums, gradient = _loss_and_gradient(recipe, params, variables["constants"], batch, None, Counts.of(batch))
    return float(sums.loss), {path: np.asarray(leaf) for path, leaf in flatten_tree(gradient).items()}


def compare_gradients(golden: Golden, variables: Mapping) -> list[Row]:
    """Every parameter's norm, and the whole gradients that the set has, with rounding off and on.

    Args:
      variables: float weights, as a model with plain storage has them.
    """
    rows = []
    for prefix, preset in (("", "off"), ("quant.", "cache")):
        loss, ours = gradients(golden, variables, preset)
        rows += _compare(golden, prefix, loss, ours)
    return rows


def _compare(golden: Golden, prefix: str, loss: float, ours: Mapping[tuple[str, ...], np.ndarray]) -> list[Row]:
    checks = json.loads((golden.directory / "expected_grad.json").read_text())["checks"]
    group, is_exact = ("gradients, rounding on", False) if prefix else ("gradients, rounding off", True)
    is_shallow = golden.config.text.num_hidden_layers <= SHALLOW_LAYERS
    norms = {name: norm for name, norm in checks[f"{prefix}grad_norm"].items() if _is_text(name)}
    errors, without = {}, []
    for name, norm in norms.items():
        mine = float(np.linalg.norm(_tensor(golden, ours, name).astype(np.float64)))
        if norm is None:
            without.append(mine)
        else:
            errors[name] = abs(mine - norm) / norm
    expected = golden.tensors("expected_grad")
    ids = expected["grad.embed.rows_ids"]
    whole = {}
    for key, theirs in expected.items():
        if key.startswith(f"{prefix}grad.") and not key.endswith("rows_ids"):
            name = key.removeprefix(f"{prefix}grad.")
            mine = _tensor(golden, ours, name.removesuffix(".rows"))
            whole[name] = relative_rms(mine[ids] if name.endswith(".rows") else mine, theirs)
    limit = GRADIENT_LIMIT if is_exact or is_shallow else None
    rows = [
        _near(group, "loss", "relative", abs(loss / checks[f"{prefix}loss"] - 1), limit),
        at_most(group, "parameters without a path", "norm", np.max(without, initial=0.0), 0.0, f"{len(without)}"),
    ]
    furthest = (GRADIENT_LIMIT if is_shallow else DEEP_LIMIT) if is_exact else None
    for what, measured in (("gradients, norms", errors), ("gradients, whole", whole)):
        worst, error = largest(measured)
        note = f"{len(measured)}; largest: {worst}"
        rows.append(_near(group, what, "largest relative", error, furthest, note))
        rows.append(_near(group, what, "median relative", float(np.median(list(measured.values()))), limit))
    return rows


def _near(group: str, name: str, measure: str, error: float, limit: float | None, note: str = "") -> Row:
    """A row that is held to a limit; without one it is only reported."""
    return (
        reported(group, name, measure, error, note)
        if limit is None
        else at_most(group, name, measure, error, limit, note)
    )


def _is_text(name: str) -> bool:
    return not name.startswith(("vision.", "aligner.", "image_", "mtp."))


def _tensor(golden: Golden, tree: Mapping[tuple[str, ...], np.ndarray], name: str) -> np.ndarray:
    place = parameter_place(golden.config, name)
    return tree[place.path][place.index]


def _batch(ids: np.ndarray) -> TrainBatch:
    """Each row one text, padded to a multiple of 32 columns, which must change nothing."""
    rows, length = ids.shape
    padding = ((0, 0), (0, -length % 32))
    targets = np.concatenate([ids[:, 1:], np.full((rows, 1), -1, np.int32)], axis=1)
    documents = np.zeros_like(ids)
    filled = (np.pad(x, padding, constant_values=value) for x, value in ((ids, 0), (targets, -1), (documents, -1)))
    return TrainBatch(*map(jnp.asarray, filled))
