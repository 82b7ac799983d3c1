"""The routed experts at the official sizes: 384 of 2304 × 5120, six to a token, packed."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark import pytorch
from pallas_kernels.benchmark.case import Case
from pallas_kernels.expert_matmul import ExpertWeights, expert_matmul, reference
from pallas_kernels.expert_matmul.weights import decode_weights
from pallas_kernels.formats import FP4_E8M0, FP8_E8M0, Format

_EXPERTS, _CHOSEN, _INNER, _HIDDEN = 384, 6, 2304, 5120
_STATIC = {"limit": 10.0, "activation_fmt": FP8_E8M0}
_SAMPLES = 2
_TORCH_NOTE = (
    "is given rounded inputs and weights already unpacked to bfloat16, 3.8 times the bytes, gate and up in one matrix; "
    "it does not round the last product's inputs to float8, which is most of its error"
)


def cases() -> list[Case]:
    memory, matrix = "target: 60 % of the floor", "target: 300 TFLOP/s"
    few = (
        "six experts are 54 and 60 tiles, so that half of the multiprocessors have none; "
        "next: try smaller tiles for few blocks"
    )
    notes = {1: few, 64: memory, 128: memory, 256: memory, 512: memory, 2048: "", 8192: matrix}
    return [_case(tokens, note) for tokens, note in notes.items()]


def _case(tokens: int, note: str) -> Case:
    # Experts that random choices leave unused are not read.
    used = _EXPERTS * (1 - (1 - _CHOSEN / _EXPERTS) ** tokens)
    weights = used * 3 * _INNER * FP4_E8M0.entry_bytes(_HIDDEN)
    return Case(
        operation="expert_matmul",
        name=f"{tokens} tokens × {_CHOSEN} of {_EXPERTS} experts",
        arrays=functools.partial(_arrays, tokens),
        call=lambda arrays: expert_matmul(**arrays, **_STATIC),
        operations=6.0 * tokens * _CHOSEN * _INNER * _HIDDEN,
        bytes=weights + tokens * (_HIDDEN * (2 + 4) + _CHOSEN * 8),
        error=_error,
        torch=_torch,
        torch_note=_TORCH_NOTE,
        note=note,
    )


def _arrays(tokens: int, rng: np.random.Generator) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(int(rng.integers(2**31))), 10))
    chosen = np.argsort(rng.random((tokens, _EXPERTS)), axis=1)[:, :_CHOSEN]
    return {
        "x": jax.random.normal(next(keys), (tokens, _HIDDEN), jnp.bfloat16),
        "expert_ids": jnp.asarray(chosen, jnp.int32),
        "expert_weights": jax.random.uniform(next(keys), (tokens, _CHOSEN), minval=0.1, maxval=0.5),
        "w1": _matrices(_INNER, _HIDDEN, next(keys)),
        "w3": _matrices(_INNER, _HIDDEN, next(keys)),
        "w2": _matrices(_HIDDEN, _INNER, next(keys)),
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _matrices(out: int, width: int, key: jax.Array) -> ExpertWeights:
    """Any code is a value; scales as of weights of about 1/√width."""
    codes = jax.random.bits(key, (_EXPERTS, out, width // 2), jnp.uint8)
    return ExpertWeights(codes, jax.random.randint(key, (_EXPERTS, out, width // 32), 116, 121).astype(jnp.uint8))


def _error(arrays: dict[str, Any], out: jax.Array, activation_fmt: Format = FP8_E8M0) -> float:
    ids = arrays["expert_ids"][:_SAMPLES]
    sample = {name: arrays[name][:_SAMPLES] for name in ("x", "expert_weights")}
    sample |= {n: jax.tree.map(lambda leaf: leaf[ids.reshape(-1)], arrays[n]) for n in ("w1", "w3", "w2")}
    sample["expert_ids"] = jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
    static = _STATIC | {"activation_fmt": activation_fmt}
    wanted = jax.jit(functools.partial(reference.expert_matmul, **static))(**sample)
    error = jnp.max(jnp.abs(out[:_SAMPLES] - wanted)) / jnp.max(jnp.abs(wanted))
    return float(error)


def _torch(arrays: dict[str, Any]):
    """Rows sorted by expert, a grouped product for gate and up and one for down, rows back and summed."""
    torch = importlib.import_module("torch")
    x = pytorch.tensors(jax.jit(FP8_E8M0.round)(arrays["x"]))
    ids, weights = pytorch.tensors((arrays["expert_ids"], arrays["expert_weights"]))
    gate_up = pytorch.tensors(_unpacked(arrays["w1"], arrays["w3"]))
    down = pytorch.tensors(_unpacked(arrays["w2"]))
    experts = torch.arange(down.shape[0], dtype=ids.dtype, device=ids.device)

    def run():
        chosen, order = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(chosen, experts, right=True, out_int32=True)
        gate, up = _grouped_product(x[order // ids.shape[1]], gate_up, ends).float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=_STATIC["limit"]), up.clamp(-_STATIC["limit"], _STATIC["limit"])
        inner = torch.nn.functional.silu(gate) * up * weights.flatten()[order, None]
        out = _grouped_product(inner.to(x.dtype), down, ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return out[back].unflatten(0, ids.shape).sum(dim=1, dtype=torch.float32)

    return run


@jax.jit
def _unpacked(*matrices: ExpertWeights) -> jax.Array:
    """Matrices of the same experts, one below the other, in bfloat16."""
    together = ExpertWeights(*(jnp.concatenate(leaves, axis=1) for leaves in zip(*matrices, strict=True)))
    return decode_weights(together, jnp.bfloat16)


def _grouped_product(rows, weights, ends):
    """Rows before each expert's end times its matrix: ``[rows, in]``, ``[experts, out, in]``, ``[experts]`` int32."""
    torch = importlib.import_module("torch")
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if grouped is not None:
        return grouped(rows, weights.mT, offs=ends)
    out, first = rows.new_empty(len(rows), weights.shape[1]), 0
    for expert, last in enumerate(ends.tolist()):
        if first < last:
            torch.mm(rows[first:last], weights[expert].T, out=out[first:last])
        first = last
    return out
