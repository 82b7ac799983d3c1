"""Shapes to be timed: boundaries at the official width, prefill and decode."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark import pytorch
from pallas_kernels.benchmark.case import Case, output_bytes
from pallas_kernels.mhc import Boundary, HyperConnection, Update, mhc, reference, xla
from pallas_kernels.mhc.types import STATISTICS_EPS, Coefficients

COPIES, WIDTH = 4, 5120
STATIC = {"norm_eps": 1e-20, "eps": 1e-6, "iterations": 20}
# Rows whose results are compared with float64.
_SAMPLE = 32


def arrays(rng: np.random.Generator, tokens: int) -> dict[str, Any]:
    """Arguments with coefficients far from uniform."""
    keys = iter(jax.random.split(jax.random.key(int(rng.integers(2**31))), 8))

    def normal(*shape: int, dtype: str = "float32") -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    rows = (2 + COPIES) * COPIES
    comb = xla.sinkhorn(2 * normal(tokens, COPIES, COPIES), 20, 1e-6)
    return {
        "streams": normal(tokens, COPIES, WIDTH, dtype="bfloat16"),
        "mix": jax.nn.sigmoid(normal(tokens, COPIES)),
        "connection": HyperConnection(
            normal(rows, COPIES * WIDTH) / np.sqrt(COPIES * WIDTH), normal(rows), jnp.asarray([0.7, 1.2, 0.9])
        ),
        "norm_weight": (1 + 0.1 * normal(WIDTH)).astype(jnp.bfloat16),
        "update": Update(normal(tokens, WIDTH, dtype="bfloat16"), 1 + jnp.tanh(normal(tokens, COPIES)), comb),
    }


def call(arrays: dict[str, Any]) -> Boundary:
    return mhc(**arrays, **STATIC)


def error(arrays: dict[str, Any], out: Boundary) -> float:
    """Largest error of a sample of rows over the largest value, of all five results."""
    tokens = arrays["mix"].shape[0]
    rows = np.linspace(0, tokens - 1, min(_SAMPLE, tokens)).astype(int)
    sample = arrays | {name: jax.tree.map(lambda x: x[rows], arrays[name]) for name in ("streams", "mix", "update")}
    got = jax.tree.leaves(jax.tree.map(lambda x: x[rows], out))
    pairs = zip(got, jax.tree.leaves(reference.mhc(**sample, **STATIC)), strict=True)
    wide = ((np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in wide)


def in_torch(arrays: dict[str, Any]):
    """The equations as they stand."""
    torch = importlib.import_module("torch")
    streams, mix, connection, norm_weight, update = pytorch.tensors(
        tuple(arrays[name] for name in ("streams", "mix", "connection", "norm_weight", "update"))
    )
    scale = connection.scale.repeat_interleave(torch.tensor([COPIES, COPIES, COPIES**2], device=mix.device))
    norm_weight = norm_weight.float()

    def coefficients(h) -> Coefficients:
        flat = h.flatten(1)
        inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + STATISTICS_EPS)
        m = flat @ connection.fn.T * inverse * scale + connection.base
        pre, post, comb = m.split([COPIES, COPIES, COPIES**2], dim=-1)
        comb = torch.softmax(comb.unflatten(-1, (COPIES, COPIES)), dim=-1) + STATIC["eps"]
        comb = comb / (comb.sum(-2, keepdim=True) + STATIC["eps"])
        for _ in range(STATIC["iterations"] - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + STATIC["eps"])
            comb = comb / (comb.sum(-2, keepdim=True) + STATIC["eps"])
        return Coefficients(torch.sigmoid(pre) + STATIC["eps"], 2 * torch.sigmoid(post), comb)

    def run() -> Boundary:
        kept = update.comb.mT @ streams.float()
        updated = (update.post[..., None] * update.y[:, None].float() + kept).to(streams.dtype)
        h = updated.float()
        x = (mix[:, None] @ h)[:, 0].to(streams.dtype).float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + STATIC["norm_eps"]) * norm_weight
        return Boundary(updated, x.to(streams.dtype), coefficients(h))

    return run


def cases() -> list[Case]:
    result = []
    for tokens, note in (
        (
            4096,
            "target: 70 % of the copy's bandwidth; missed. The pass over the streams runs at nearly what a copy of "
            "their size does, then the product with fn reads them again. Next: Mosaic GPU, the product on tiles that "
            "are in shared memory to be stored; in Triton both in one kernel were slower than the two",
        ),
        (64, "two launches: their latency, and 2 MB of fn"),
        (1, "two launches: their latency, and 2 MB of fn"),
    ):
        shapes = jax.eval_shape(lambda tokens=tokens: arrays(np.random.default_rng(0), tokens))
        result.append(
            Case(
                operation="mhc",
                name=f"{tokens} tokens, {COPIES} streams of {WIDTH}",
                arrays=functools.partial(arrays, tokens=tokens),
                call=call,
                operations=2.0 * tokens * shapes["connection"].fn.size,
                bytes=output_bytes(shapes) + output_bytes(jax.eval_shape(call, shapes)),
                error=error,
                torch=in_torch,
                torch_note="one operation after another, in float32 between bfloat16 streams",
                note=note,
            )
        )
    return result
