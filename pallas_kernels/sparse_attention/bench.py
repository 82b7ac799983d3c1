"""The sparse attention at the official sizes: 64 heads of 512, a window of 128, 512 chosen FP4 entries."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark import pytorch
from pallas_kernels.benchmark.case import Case
from pallas_kernels.formats import FP4_E4M3, FP8_E8M0, BlockFormat, DenseFormat, Packed
from pallas_kernels.sparse_attention import reference, sparse_attention

_HEADS, _WIDTH, _WINDOW, _CHOSEN, _PAGE = 64, 512, 128, 512, 64
_BF16 = DenseFormat("bfloat16")
_SAMPLES = 4
# Of a call in PyTorch: their entries are written out, 640 KiB a query.
_TORCH_QUERIES = 1024
_TORCH_NOTE = (
    "is given entries already unpacked to bfloat16, which are gathered and written out for 1024 queries at a time, and "
    "masks nothing; logits are rounded to bfloat16"
)


def cases() -> list[Case]:
    prefill_note = "target: 300 TFLOP/s at 1024 queries and more; next: fewer instructions a value unpacked"
    decode_note = (
        "target: 60 % of the floor; one block has one query, whose tiles pass through two slots. Fetching and "
        "unpacking a tile take longer than its products, and a third of the time is a block's beginning and end; next: "
        "a shorter beginning, and the fence between fetching and reading on the reader's side"
    )
    split_note = "a query's tiles are cut among eight blocks; next: merge their sums in the kernel, not in two launches"
    window_note = "two tiles: nearly all of it is a block's beginning and end"
    return [
        _case("prefill, 1 × 4096 queries, 65536 entries", 1, 4096, 65536, note=prefill_note),
        _case("prefill, 1 × 1024 queries, 65536 entries", 1, 1024, 65536, note=prefill_note),
        _case("prefill, 1 × 4096 queries, window only", 1, 4096, 0),
        _case("prefill, 1 × 1024 queries, bfloat16 entries", 1, 1024, 65536, formats=(_BF16, _BF16)),
        _case("decode, 128 × 1 queries", 128, 1, 1024, rotated=True, note=decode_note),
        _case("decode, 64 × 4 queries", 64, 4, 1024, rotated=True, note=decode_note),
        _case("decode, 16 × 1 queries", 16, 1, 1024, rotated=True, note=split_note),
        _case("decode, 128 × 1 queries, window only", 128, 1, 0, rotated=True, note=window_note),
    ]


def _case(
    name: str,
    batch: int,
    total: int,
    entries: int,
    formats: tuple = (FP8_E8M0, FP4_E4M3),
    rotated: bool = False,
    note: str = "",
) -> Case:
    """``entries`` of the pool for each request; 0: no pool."""
    local_fmt, pool_fmt = formats
    static = {
        "local_fmt": local_fmt,
        "pool_fmt": pool_fmt,
        "window": _WINDOW,
        "scale": _WIDTH**-0.5,
        "probability_dtype": jnp.dtype(jnp.bfloat16),
    }
    seen = _WINDOW + (_CHOSEN if entries else 0)
    queries = batch * total
    chosen_rows = min(batch * entries, queries * _CHOSEN)
    moved = 2 * queries * _HEADS * _WIDTH * 2 + batch * (_WINDOW + total) * local_fmt.entry_bytes(_WIDTH)
    moved += chosen_rows * pool_fmt.entry_bytes(_WIDTH) + (queries * _CHOSEN * 4 if entries else 0)
    return Case(
        operation="sparse_attention",
        name=name,
        arrays=functools.partial(_arrays, batch, total, entries, formats, rotated),
        call=lambda arrays: sparse_attention(**arrays, **static),
        operations=4.0 * queries * _HEADS * seen * _WIDTH,
        bytes=float(moved),
        error=functools.partial(_error, static),
        torch=functools.partial(_torch, static),
        torch_note=_TORCH_NOTE,
        note=note,
    )


def _arrays(
    batch: int, total: int, entries: int, formats: tuple, rotated: bool, rng: np.random.Generator
) -> dict[str, jax.Array | Packed | None]:
    keys = iter(jax.random.split(jax.random.key(int(rng.integers(2**31))), 10))
    pages = -(-entries // _PAGE)
    arrays = {
        "queries": jax.random.normal(next(keys), (batch, total, _HEADS, _WIDTH), jnp.bfloat16),
        "local": _entries(formats[0], (batch, _WINDOW + total), next(keys)),
        "local_valid": jnp.ones((batch, _WINDOW + total), bool),
        "pool": None,
        "page_table": None,
        "indices": None,
        "sink": jax.random.normal(next(keys), (_HEADS,)),
    }
    if rotated:
        arrays["rotation"] = jax.random.randint(next(keys), (batch,), 0, _WINDOW + total)
    if entries:
        arrays["pool"] = _entries(formats[1], (batch * pages, _PAGE), next(keys))
        arrays["page_table"] = jax.random.permutation(next(keys), batch * pages).reshape(batch, pages).astype(jnp.int32)
        arrays["indices"] = jax.random.randint(next(keys), (batch, total, _CHOSEN), 0, entries)
    return arrays


def _entries(fmt: BlockFormat | DenseFormat, shape: tuple[int, ...], key: jax.Array) -> Packed:
    """Random entries of about 1, made packed: float32 ones of a whole pool would be eight times as large."""
    if isinstance(fmt, DenseFormat):
        return Packed(jax.random.normal(key, (*shape, _WIDTH), fmt.dtype), None)
    first, second = jax.random.split(key)
    if fmt == FP8_E8M0:
        return jax.jit(fmt.encode)(jax.random.normal(first, (*shape, _WIDTH)))
    payload = jax.random.bits(first, (*shape, fmt.payload_width(_WIDTH)), jnp.uint8)
    # E4M3 from 0.25 to 0.94.
    scales = jax.random.randint(second, (*shape, fmt.scale_width(_WIDTH)), 0x28, 0x38).astype(jnp.uint8)
    return Packed(payload, scales)


def _error(static: dict, arrays: dict, out: jax.Array) -> float:
    """Largest error of a few queries over their largest value."""
    batch, total = out.shape[:2]
    largest = scale = 0.0
    exact = static | {"probability_dtype": jnp.dtype(jnp.float32)}
    for n in range(_SAMPLES):
        b, s = n * (batch - 1) // (_SAMPLES - 1), n * (total - 1) // (_SAMPLES - 1)
        one = {name: arrays[name] for name in ("pool", "sink")}
        one |= {name: arrays[name] if arrays[name] is None else arrays[name][b : b + 1] for name in ("page_table",)}
        # A rotated window is seen as a whole, another one from its query on.
        first, last = (0, total) if "rotation" in arrays else (s, s + 1)
        one["queries"] = arrays["queries"][b : b + 1, first:last].astype(jnp.float32)
        one["local"] = arrays["local"].map(lambda leaf, b=b, i=first, j=last: leaf[b : b + 1, i : _WINDOW + j])
        one["local_valid"] = arrays["local_valid"][b : b + 1, first : _WINDOW + last]
        one["indices"] = None if arrays["indices"] is None else arrays["indices"][b : b + 1, first:last]
        if "rotation" in arrays:
            one["rotation"] = arrays["rotation"][b : b + 1]
        wanted = np.asarray(_reference(one, tuple(exact.items())))
        got = np.asarray(out[b : b + 1, first:last].astype(jnp.float32))
        largest, scale = max(largest, float(np.abs(got - wanted).max())), max(scale, float(np.abs(wanted).max()))
    return largest / scale


@functools.partial(jax.jit, static_argnums=1)
def _reference(arrays: dict, static: tuple) -> jax.Array:
    return reference.sparse_attention(**arrays, **dict(static))


def _torch(static: dict, arrays: dict):
    """Gather, product, softmax with a column for the sink, product. All entries are valid here: none is masked."""
    torch = importlib.import_module("torch")
    local = pytorch.unpacked(arrays["local"], static["local_fmt"])
    queries, sink = pytorch.tensors((arrays["queries"], arrays["sink"]))
    batch, total = queries.shape[:2]
    if arrays["pool"] is not None:
        pool = pytorch.unpacked(arrays["pool"], static["pool_fmt"]).flatten(0, 1)
        page_table, indices = (tensor.long() for tensor in pytorch.tensors((arrays["page_table"], arrays["indices"])))
    if "rotation" in arrays:
        rotation = pytorch.tensors(arrays["rotation"]).long()
        requests = torch.arange(batch, device=local.device)[:, None]
        columns = torch.arange(local.shape[1], device=local.device)

    def entries(windows, first, last):
        seen = windows[:, first:last]
        if arrays["pool"] is None:
            return seen
        picked = pool[pytorch.rows(page_table, indices[:, first:last], _PAGE)]
        return torch.cat([seen, picked], dim=2)

    def run():
        ordered = local[requests, (columns + rotation[:, None]) % len(columns)] if "rotation" in arrays else local
        windows = ordered.unfold(1, _WINDOW, 1)[:, 1:].mT  # [batch, query, window, width], a view
        out = torch.empty_like(queries)
        step = max(1, _TORCH_QUERIES // batch)
        for first in range(0, total, step):
            last = min(first + step, total)
            keys = entries(windows, first, last)
            logits = (queries[:, first:last] @ keys.mT).float() * static["scale"]
            with_sink = torch.cat([logits, sink.expand(*logits.shape[:2], -1)[..., None]], dim=-1)
            p = torch.softmax(with_sink, dim=-1)[..., :-1].to(keys.dtype)
            out[:, first:last] = p @ keys
        return out

    return run
