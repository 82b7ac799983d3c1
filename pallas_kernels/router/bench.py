"""The router at the official sizes: 6 of 384 experts, rows of 5120."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark.case import Case
from pallas_kernels.router import reference, route

_EXPERTS, _HIDDEN = 384, 5120
_STATIC = {"k": 6, "scale": 1.5}
_SAMPLES = 16


def cases() -> list[Case]:
    few = "two launches, the product in parts and the choice: their latency"
    return [_case(rows, note) for rows, note in ((1, few), (64, few), (8192, "the product is XLA's"))]


def _case(rows: int, note: str) -> Case:
    return Case(
        operation="route",
        name=f"{rows} rows, {_STATIC['k']} of {_EXPERTS} experts",
        arrays=functools.partial(_arrays, rows),
        call=lambda arrays: route(**arrays, **_STATIC),
        operations=2.0 * rows * _EXPERTS * _HIDDEN,
        bytes=2.0 * (rows + _EXPERTS) * _HIDDEN + 8.0 * (rows * _STATIC["k"] + _EXPERTS) + 2.0 * rows,
        error=_wrong_picks,
        torch=_torch,
        torch_note="its product is rounded to bfloat16",
        note=note,
    )


def _arrays(rows: int, rng: np.random.Generator) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), 4)
    biases = jax.random.uniform(keys[2], (2, _EXPERTS))
    return {
        "x": jax.random.normal(keys[0], (rows, _HIDDEN), jnp.bfloat16),
        "weight": (jax.random.normal(keys[1], (_EXPERTS, _HIDDEN)) / _HIDDEN**0.5).astype(jnp.bfloat16),
        "bias": biases[0],
        "image_bias": biases[1],
        "is_image": jax.random.bernoulli(keys[3], 0.2, (rows,)),
        "valid": jnp.ones(rows, bool),
    }


def _wrong_picks(arrays: dict[str, Any], out: tuple[jax.Array, jax.Array]) -> float:
    """Share of places with another expert than in float64; two scores that differ by less than a rounding may swap."""
    rows = {name: np.asarray(arrays[name][:_SAMPLES]) for name in ("x", "is_image", "valid")}
    rest = {name: np.asarray(arrays[name]) for name in ("weight", "bias", "image_bias")}
    wanted = reference.route(**rows, **rest, **_STATIC)[0]
    return float(np.mean(wanted != np.asarray(out[0])[:_SAMPLES]))


def _torch(arrays: dict[str, jax.Array]):
    torch = importlib.import_module("torch")
    x, weight, bias, image_bias = (torch.from_dlpack(arrays[name]) for name in ("x", "weight", "bias", "image_bias"))
    is_image = torch.from_dlpack(arrays["is_image"].astype(jnp.uint8)).bool()

    def run():
        # PyTorch's product is rounded to bfloat16 here.
        scores = torch.nn.functional.softplus((x @ weight.T).float()).sqrt()
        chosen = torch.topk(scores + torch.where(is_image[:, None], image_bias, bias), _STATIC["k"]).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / weights.sum(1, keepdim=True) * _STATIC["scale"]

    return run
