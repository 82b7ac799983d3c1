"""Dense linear maps at the official sizes: what a layer multiplies a few tokens with."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark import pytorch
from pallas_kernels.benchmark.case import Case
from pallas_kernels.block_linear import block_linear, reference
from pallas_kernels.block_linear.weights import BLOCK, decode_blocks
from pallas_kernels.formats import FP8_E8M0

# [out, in]: queries up and output down, queries down, the shared expert's gate.
_SHAPES = [(32768, 1280), (5120, 8192), (1280, 5120), (2304, 5120)]
# Matrices of one call, of as many layers: a single small one is over before a host has asked for the next.
_LAYERS = 8
_SAMPLES = 4
# torch._scaled_mm has no scales of square blocks of 32.
_TORCH_NOTE = "is given rounded inputs and weights already decoded to bfloat16, twice the bytes"


def cases() -> list[Case]:
    large, small = "target: 60 % of the floor", "starting its two or three kernels takes longer than its floor"
    notes = {shape: large if shape[0] * shape[1] > 2**24 else small for shape in _SHAPES}
    few = [_case(rows, shape, note) for shape, note in notes.items() for rows in (1, 64, 128)]
    return [*few, _case(4096, _SHAPES[0], "rounded by a kernel, decoded once and multiplied by XLA")]


def _case(rows: int, shape: tuple[int, int], note: str) -> Case:
    out, width = shape
    moved = out * width + out * width / BLOCK**2 + 2 * rows * (out + width)
    return Case(
        operation="block_linear",
        name=f"{_LAYERS} matrices {out} × {width}, {rows} rows",
        arrays=functools.partial(_arrays, rows, shape),
        call=lambda arrays: [_linear(arrays["x"], *matrix) for matrix in arrays["matrices"]],
        operations=_LAYERS * 2.0 * rows * out * width,
        bytes=_LAYERS * float(moved),
        error=_error,
        torch=_torch,
        torch_note=_TORCH_NOTE,
        note=note,
    )


def _linear(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    return block_linear(x, weight, scale, activation_fmt=FP8_E8M0)


def _arrays(rows: int, shape: tuple[int, int], rng: np.random.Generator) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), _LAYERS + 1)
    x = jax.random.normal(keys[0], (rows, shape[1]), jnp.bfloat16)
    return {"x": x, "matrices": [_matrix(shape, key) for key in keys[1:]]}


@functools.partial(jax.jit, static_argnums=0)
def _matrix(shape: tuple[int, int], key: jax.Array) -> tuple[jax.Array, jax.Array]:
    weight = (jax.random.normal(key, shape) * 16).astype(jnp.float8_e4m3fn)
    scales = jax.random.randint(key, (shape[0] // BLOCK, shape[1] // BLOCK), 116, 120)
    return weight, scales.astype(jnp.uint8)


def _error(arrays: dict[str, Any], out: list[jax.Array]) -> float:
    """Of the first columns: the reference goes through a matrix block by block."""
    weight, scale = arrays["matrices"][-1]
    columns = 2 * BLOCK
    wanted = reference.block_linear(
        arrays["x"][:_SAMPLES].astype(jnp.float32), weight[:columns], scale[:2], activation_fmt=FP8_E8M0
    )
    mine = out[-1][:_SAMPLES, :columns].astype(jnp.float32)
    return float(jnp.max(jnp.abs(mine - wanted)) / jnp.max(jnp.abs(wanted)))


def _torch(arrays: dict[str, Any]):
    decode = jax.jit(functools.partial(decode_blocks, dtype=jnp.bfloat16))
    x = pytorch.tensors(jax.jit(FP8_E8M0.round)(arrays["x"]))
    weights = pytorch.tensors([decode(*matrix) for matrix in arrays["matrices"]])
    return lambda: [x @ weight.T for weight in weights]
