"""Shapes to be timed: packing and unpacking 65,536 entries of width 512, and what a decode step writes."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark import pytorch
from pallas_kernels.benchmark.case import Case
from pallas_kernels.formats import E2M1_MAX, E4M3_MAX, FP4_E4M3, FP4_E8M0, FP8_E8M0, BlockFormat, Packed
from pallas_kernels.paged_memory import append, gather

PAGE_ENTRIES = 64
FORMATS = {"FP4_E4M3": FP4_E4M3, "FP4_E8M0": FP4_E8M0, "FP8_E8M0": FP8_E8M0}
_NOTE = (
    "target: 70 % of the copy's bandwidth, which is measured on 4 GiB; a copy as small as this reaches 80 % of that. "
    "FP4 append takes 15 instructions a value besides. Next: fewer of them for E2M1's rounding and the addresses"
)
_TORCH_NOTE = "rounds, packs and unpacks by its own operations, in float32 on the way in, in bfloat16 on the way out"


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


def _torch_append(arrays: dict[str, Any], fmt: BlockFormat):
    torch = importlib.import_module("torch")
    # Arrays do not change.
    pool = Packed(*pytorch.tensors(arrays["pool"])).map(torch.clone)
    table, start = (tensor.long() for tensor in pytorch.tensors((arrays["page_table"], arrays["start"])))
    values = pytorch.tensors(arrays["values"])
    offset = torch.arange(values.shape[1], device=values.device)
    # A value belongs below a bound that it equals; where the even code is the one above, the bound is just below.
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros_like(bounds[1::2]))

    def run() -> Packed:
        rows = pytorch.rows(table, start[:, None] + offset, PAGE_ENTRIES).flatten()
        for leaf, new in zip(pool, _torch_encode(values, fmt, bounds), strict=True):
            leaf.flatten(0, 1).index_copy_(0, rows, new.flatten(0, 1))
        return pool

    return run


def _torch_gather(arrays: dict[str, Any], fmt: BlockFormat):
    torch = importlib.import_module("torch")
    pool = Packed(*pytorch.tensors(arrays["pool"])).map(lambda leaf: leaf.flatten(0, 1))
    table, indices = (tensor.long() for tensor in pytorch.tensors((arrays["page_table"], arrays["indices"])))
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.bfloat16, device=table.device)
    e2m1 = torch.cat([e2m1, -e2m1])
    byte = torch.arange(256, device=table.device)
    pairs = torch.stack([e2m1[byte % 16], e2m1[byte // 16]], dim=-1)

    def run():
        rows = pytorch.rows(table, indices, PAGE_ENTRIES)
        payload, scales = pool.map(lambda leaf: leaf[rows])
        if fmt.element == "e2m1":
            values = pairs[payload.int()].flatten(-2)
        else:
            values = payload.view(torch.float8_e4m3fn).to(torch.bfloat16)
        step = _torch_scales(scales, fmt).to(torch.bfloat16)
        return (values.unflatten(-1, (-1, fmt.block)) * step[..., None]).flatten(-2)

    return run


def _torch_scales(scales, fmt: BlockFormat):
    """float32 values of scales; a power of two by its exponent's bits."""
    torch = importlib.import_module("torch")
    if fmt.scale == "e4m3":
        return scales.view(torch.float8_e4m3fn).float()
    return (scales.int() << 23).view(torch.float32)


def _torch_encode(values, fmt: BlockFormat, bounds) -> Packed:
    """As :meth:`BlockFormat.encode`; E2M1 codes by the bounds between their values ``[7]``."""
    torch = importlib.import_module("torch")
    limit = E2M1_MAX if fmt.element == "e2m1" else E4M3_MAX
    blocks = values.float().unflatten(-1, (-1, fmt.block))
    ratio = blocks.abs().amax(dim=-1).clamp(min=fmt.floor) / limit
    if fmt.scale == "e4m3":
        scales = ratio.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        bits = ratio.view(torch.int32)
        scales = ((bits >> 23) + (bits & 0x7FFFFF != 0)).to(torch.uint8)
    scaled = (blocks / _torch_scales(scales, fmt)[..., None]).clamp(-limit, limit).flatten(-2)
    if fmt.element == "e4m3":
        return Packed(scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales)
    codes = torch.bucketize(scaled.abs(), bounds, out_int32=True) | (torch.signbit(scaled).int() << 3)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return Packed((low | (high << 4)).to(torch.uint8), scales)


def cases() -> list[Case]:
    result = []
    for name, fmt in FORMATS.items():
        for entries in (65536, 64):
            width = 512
            packed = entries * fmt.entry_bytes(width)
            moved = float(2 * width * entries + packed)
            for operation, make, call, error, feed, torch in (
                ("paged_append", _append_arrays, _append, _append_error, _append_feed, _torch_append),
                ("paged_gather", _gather_arrays, _gather, _gather_error, None, _torch_gather),
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
                        torch=functools.partial(torch, fmt=fmt),
                        torch_note=_TORCH_NOTE,
                        feed=feed,
                        note=_NOTE if entries > 64 else "one launch",
                    )
                )
    return result
