"""The exact top-k at the sizes of the index selection: 512 entries of a history, 2048 blocks of its blocks."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark.case import Case
from pallas_kernels.top_k import reference, top_k

_SAMPLED_ROWS = 4


def cases() -> list[Case]:
    shapes = [
        (64, 131072, 512, "target: 15 times lax.top_k"),
        (8, 2**20, 512, "one decode step over a million entries"),
        (1, 2**20, 512, "one row: three small kernels after each other, so the time is their latency"),
        (1024, 32768, 512, "a tile of prefill"),
        (8, 131072, 2048, "the candidate blocks of a decode step"),
        (64, 131072, 4096, ""),
    ]
    return [
        Case(
            operation="top_k",
            name=f"{rows} × {n}, k = {k}",
            arrays=functools.partial(_arrays, rows, n),
            call=functools.partial(_call, k),
            operations=0.0,
            bytes=4.0 * rows * n + 8.0 * rows * k,
            error=functools.partial(_wrong_picks, k),
            torch=functools.partial(_torch, k),
            torch_note="equal scores in any order",
            note=note,
        )
        for rows, n, k, note in shapes
    ]


def _arrays(rows: int, n: int, rng: np.random.Generator) -> dict[str, jax.Array]:
    return {"scores": jax.random.normal(jax.random.key(int(rng.integers(2**31))), (rows, n), jnp.float32)}


def _call(k: int, arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return top_k(arrays["scores"], k)


def _wrong_picks(k: int, arrays: dict[str, jax.Array], out: tuple[jax.Array, jax.Array]) -> float:
    """Share of places with another index than the stable sort has."""
    wanted = reference.top_k(arrays["scores"][:_SAMPLED_ROWS], k)[1]
    return float(jnp.mean(wanted != out[1][:_SAMPLED_ROWS]))


def _torch(k: int, arrays: dict[str, jax.Array]):
    torch = importlib.import_module("torch")
    scores = torch.from_dlpack(arrays["scores"])
    return lambda: tuple(torch.topk(scores, k))
