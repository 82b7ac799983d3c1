"""Shapes to be timed: packing and unpacking 65,536 entries of width 512, and what a decode step writes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark.case import Case
from pallas_kernels.formats import FP4_E4M3, FP4_E8M0, FP8_E8M0, BlockFormat, Packed
from pallas_kernels.paged_memory import append, gather

PAGE_ENTRIES = 64
FORMATS = {"FP4_E4M3": FP4_E4M3, "FP4_E8M0": FP4_E8M0, "FP8_E8M0": FP8_E8M0}
_NOTE = (
    "target: 70 % of the copy's bandwidth, which is measured on 4 GiB; a copy as small as this reaches 80 % of that. "
    "FP4 append takes 15 instructions a value besides. Next: fewer of them for E2M1's rounding and the addresses"
)


def _pages(rng: np.random.Generator, entries: int) -> jax.Array:
    return jnp.asarray(rng.permutation(-(-entries // PAGE_ENTRIES))[None], jnp.int32)


def _append_arrays(rng: np.random.Generator, fmt: BlockFormat, entries: int, width: int) -> dict[str, Any]:
    table = _pages(rng, entries)
    values = jax.random.normal(jax.random.key(int(rng.integers(2**31))), (1, entries, width), jnp.bfloat16)
    pool = fmt.zeros((table.shape[1], PAGE_ENTRIES), width)
    return {"pool": pool, "page_table": table, "start": jnp.zeros(1, jnp.int32), "values": values}


def _append(arrays: dict[str, Any], fmt: BlockFormat) -> Packed:
    count = jnp.full(1, arrays["values"].shape[1], jnp.int32)
    return append(arrays["pool"], fmt, arrays["page_table"], arrays["start"], count, arrays["values"])


def _append_feed(arrays: dict[str, Any], out: Packed) -> dict[str, Any]:
    return arrays | {"pool": out}


def _append_error(arrays: dict[str, Any], out: Packed, fmt: BlockFormat) -> float:
    """Share of wrong bytes."""
    wanted = jax.jit(fmt.encode)(arrays["values"])
    written = out.map(lambda leaf: leaf[arrays["page_table"][0]].reshape(1, -1, leaf.shape[-1]))
    pairs = zip(written, wanted, strict=True)
    return max(float(jnp.mean(got[:, : want.shape[1]] != want)) for got, want in pairs)


def _gather_arrays(rng: np.random.Generator, fmt: BlockFormat, entries: int, width: int) -> dict[str, Any]:
    arrays = _append_arrays(rng, fmt, entries, width)
    pool = jax.jit(_append, static_argnums=1)(arrays, fmt)
    return {
        "pool": pool,
        "page_table": arrays["page_table"],
        "indices": jnp.asarray(rng.permutation(entries)[None], jnp.int32),
    }


def _gather(arrays: dict[str, Any], fmt: BlockFormat) -> jax.Array:
    return gather(arrays["pool"], fmt, arrays["page_table"], arrays["indices"], jnp.bfloat16)


def _gather_error(arrays: dict[str, Any], out: jax.Array, fmt: BlockFormat) -> float:
    """Share of wrong values."""
    entry = arrays["indices"]
    page = arrays["page_table"][0, entry // PAGE_ENTRIES]
    wanted = fmt.decode(arrays["pool"].map(lambda leaf: leaf[page, entry % PAGE_ENTRIES]), jnp.bfloat16)
    return float(jnp.mean(out != wanted))


def cases() -> list[Case]:
    result = []
    for name, fmt in FORMATS.items():
        for entries in (65536, 64):
            width = 512
            packed = entries * fmt.entry_bytes(width)
            moved = float(2 * width * entries + packed)
            for operation, make, call, error, feed in (
                ("paged_append", _append_arrays, _append, _append_error, _append_feed),
                ("paged_gather", _gather_arrays, _gather, _gather_error, None),
            ):
                result.append(
                    Case(
                        operation=operation,
                        name=f"{entries} entries of {width}, {name}",
                        arrays=functools.partial(make, fmt=fmt, entries=entries, width=width),
                        call=functools.partial(call, fmt=fmt),
                        operations=0.0,
                        bytes=moved,
                        error=functools.partial(error, fmt=fmt),
                        feed=feed,
                        note=_NOTE if entries > 64 else "one launch",
                    )
                )
    return result
