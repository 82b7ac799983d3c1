"""The index selection at the official sizes: 32 heads of 128, 512 entries, 2048 blocks of 8, FP4 keys."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.benchmark import pytorch
from pallas_kernels.benchmark.case import Case
from pallas_kernels.formats import FP4_E8M0, Packed
from pallas_kernels.index_select import BlockSelection, Selection, index_reselect, index_select

_HEADS, _WIDTH, _PAGE, _TOP_K = 32, 128, 64, 512
_BLOCKS = BlockSelection(size=8, count=2048)
_SAMPLES = 4
# Scores of float32 sums in another order differ by less: an entry this close to the last one chosen is no wrong pick.
_CLOSE = 1e-5
# Products that are there at once in PyTorch: 0.5 GB of them, 1 GB weighted.
_TORCH_PRODUCTS = 2**28
_TORCH_NOTE = (
    "is given keys already unpacked to bfloat16; its products are rounded to bfloat16, weighted and summed in float32, "
    "for as many queries at a time as have 2²⁸ of them"
)


def cases() -> list[Case]:
    million = 2**20
    decode = (
        "target: three times the time to read the keys. The top-k's kernels follow each other on 8 rows; the scores' "
        "unpacking and sums are some 260 instructions for 16 keys of a warp. Next: fewer of them, such as one "
        "conversion for several codes"
    )
    prefill = (
        "target: near the matrix rate. The sum over heads takes half as many cycles as its product and only the other "
        "warpgroup's product hides it, and a tile of 48 queries is too few rows for the selection to fill the chip. "
        "Next: selecting the last tile's rows beside the next tile's scores"
    )
    reselect = (
        "Every query reads keys of its own, 32 columns of a product; ids are sorted first, since ties go to the lower "
        "entry (that part was not measured). Next: instead of the sort, a selection that compares entries where scores "
        "are equal"
    )
    return [
        _select("decode, 8 × 1 query, 1M entries", 8, 1, million, None, decode),
        _select("decode with blocks, 8 × 1 query, 1M entries", 8, 1, million, _BLOCKS, decode),
        _select("verify, 8 × 6 queries, 128K entries", 8, 6, 2**17, None),
        _select("prefill, 1 × 1024 queries, 256K entries", 1, 1024, 2**18, None, prefill),
        _select("prefill with blocks, 1 × 1024 queries, 256K entries", 1, 1024, 2**18, _BLOCKS),
        _reselect("decode, 8 × 1 query, 2048 blocks of 1M entries", 8, 1, million),
        _reselect("prefill, 1 × 1024 queries, 2048 blocks of 256K entries", 1, 1024, 2**18, reselect),
    ]


def _operations(batch: int, total: int, scored: int) -> float:
    return 2.0 * batch * total * scored * _HEADS * _WIDTH


def _query_bytes(batch: int, total: int) -> float:
    return batch * total * (_HEADS * (2 * _WIDTH + 4) + 4.0 * _TOP_K)


def _select(name: str, batch: int, total: int, entries: int, blocks: BlockSelection | None, note: str = "") -> Case:
    moved = batch * entries * FP4_E8M0.entry_bytes(_WIDTH) + _query_bytes(batch, total)
    return Case(
        operation="index_select",
        name=name,
        arrays=functools.partial(_arrays, batch, total, entries),
        call=lambda a: index_select(*_common(a), a["visible"], _TOP_K, blocks),
        operations=_operations(batch, total, entries),
        bytes=moved + (0 if blocks is None else 4.0 * batch * total * blocks.count),
        error=_wrong_entries,
        torch=functools.partial(_torch_select, blocks),
        torch_note=_TORCH_NOTE,
        note=note,
    )


def _reselect(name: str, batch: int, total: int, entries: int, note: str = "") -> Case:
    scored = _BLOCKS.count * _BLOCKS.size
    moved = min(batch * total * scored, batch * entries) * FP4_E8M0.entry_bytes(_WIDTH) + _query_bytes(batch, total)
    return Case(
        operation="index_reselect",
        name=name,
        arrays=functools.partial(_arrays, batch, total, entries, with_blocks=True),
        call=lambda a: index_reselect(*_common(a), a["visible"], a["block_ids"], _BLOCKS.size, _TOP_K),
        operations=_operations(batch, total, scored),
        bytes=moved + 4.0 * batch * total * _BLOCKS.count,
        error=_wrong_entries,
        torch=_torch_reselect,
        torch_note=_TORCH_NOTE,
        note=note,
    )


def _common(arrays: dict[str, Any]) -> tuple:
    return arrays["queries"], arrays["weights"], arrays["pool"], FP4_E8M0, arrays["page_table"]


@functools.partial(jax.jit, static_argnames=("batch", "total", "entries", "with_blocks"))
def _random(key: jax.Array, batch: int, total: int, entries: int, with_blocks: bool) -> dict[str, Any]:
    keys = jax.random.split(key, 6)
    pages = batch * entries // _PAGE
    arrays = {
        "queries": FP4_E8M0.round(jax.random.normal(keys[0], (batch, total, _HEADS, _WIDTH), jnp.bfloat16)),
        "weights": jax.random.normal(keys[1], (batch, total, _HEADS)) * (_HEADS * _WIDTH) ** -0.5,
        # Made packed: floats of a whole pool would be eight times as large.
        "pool": Packed(
            jax.random.bits(keys[2], (pages, _PAGE, FP4_E8M0.payload_width(_WIDTH)), jnp.uint8),
            jax.random.randint(keys[3], (pages, _PAGE, FP4_E8M0.scale_width(_WIDTH)), 125, 128).astype(jnp.uint8),
        ),
        "page_table": jax.random.permutation(keys[4], pages).reshape(batch, -1).astype(jnp.int32),
        "visible": jnp.full((batch, total), entries - total + 1, jnp.int32) + jnp.arange(total, dtype=jnp.int32),
    }
    if with_blocks:
        # Distinct, in no order: a random one of each few neighbours, shuffled alike for all queries.
        few = entries // _BLOCKS.size // _BLOCKS.count
        ids = jax.random.randint(keys[5], (batch, total, _BLOCKS.count), 0, few) + few * jnp.arange(_BLOCKS.count)
        arrays["block_ids"] = jax.random.permutation(keys[5], ids, axis=-1).astype(jnp.int32)
    return arrays


def _arrays(batch: int, total: int, entries: int, rng: np.random.Generator, with_blocks: bool = False) -> dict:
    return _random(jax.random.key(int(rng.integers(2**31))), batch, total, entries, with_blocks)


@jax.jit
def _scores(queries: jax.Array, weights: jax.Array, payload: jax.Array, scales: jax.Array, table: jax.Array):
    """One query's scores ``[entries]`` in float32."""
    keys = FP4_E8M0.decode(Packed(payload[table], scales[table])).reshape(-1, _WIDTH)
    products = jnp.matmul(keys, queries.astype(jnp.float32).T, precision=lax.Precision.HIGHEST)
    return jnp.sum(jax.nn.relu(products) * weights, axis=-1)


def _wrong_entries(arrays: dict[str, Any], out: Selection | tuple[jax.Array, jax.Array]) -> float:
    """Share of a few queries' entries whose score is below that of the last that should have been chosen."""
    indices = np.asarray(out[0])
    batch, total = indices.shape[:2]
    wrong = 0
    for n in range(_SAMPLES):
        b, s = n * (batch - 1) // (_SAMPLES - 1), n * (total - 1) // (_SAMPLES - 1)
        pool = arrays["pool"]
        scores = _scores(
            arrays["queries"][b, s], arrays["weights"][b, s], pool.payload, pool.scales, arrays["page_table"][b]
        )
        scores = np.array(scores)
        scores[int(arrays["visible"][b, s]) :] = -np.inf
        if "block_ids" in arrays:
            inside = np.zeros(scores.size // _BLOCKS.size, bool)
            inside[np.asarray(arrays["block_ids"][b, s])] = True
            scores[~np.repeat(inside, _BLOCKS.size)] = -np.inf
        last = np.partition(scores, -_TOP_K)[-_TOP_K]
        chosen = indices[b, s]
        good = (chosen >= 0) & (scores[chosen] >= last - _CLOSE * np.abs(scores[np.isfinite(scores)]).max())
        wrong += _TOP_K - np.unique(chosen[good]).size
    return wrong / (_SAMPLES * _TOP_K)


def _torch_inputs(arrays: dict[str, Any]) -> tuple:
    """Queries, weights, keys ``[pages, page, width]``, table ``[batch, pages]`` and visible entries as tensors."""
    keys = pytorch.unpacked(arrays["pool"], FP4_E8M0)
    queries, weights, table, visible = pytorch.tensors(
        tuple(arrays[name] for name in ("queries", "weights", "page_table", "visible"))
    )
    return queries, weights, keys, table.long(), visible


def _torch_tiles(queries, entries: int) -> list[slice]:
    """Slices of the query axis of ``[batch, query, heads, width]``."""
    batch, total, heads = queries.shape[:3]
    step = max(1, _TORCH_PRODUCTS // (batch * heads * entries))
    return [slice(first, first + step) for first in range(0, total, step)]


def _torch_scores(products, weights):
    """``[batch, query, heads, entries]`` bfloat16, overwritten, to ``[batch, query, entries]`` float32."""
    return (products.relu_() * weights[..., None]).sum(dim=2)


def _torch_select(blocks: BlockSelection | None, arrays: dict[str, Any]):
    """The keys of all pages, their scores, the best."""
    torch = importlib.import_module("torch")
    queries, weights, pool, page_table, visible = _torch_inputs(arrays)
    entry = torch.arange(page_table.shape[1] * _PAGE, device=pool.device)
    tiles = _torch_tiles(queries, len(entry))

    def run():
        keys = pool[page_table].flatten(1, 2)
        parts = []
        for tile in tiles:
            # One product a request: its keys serve all its queries.
            products = (queries[:, tile].flatten(1, 2) @ keys.mT).unflatten(1, (-1, _HEADS))
            parts.append(_torch_scores(products, weights[:, tile]))
        scores = torch.cat(parts, dim=1).masked_fill_(entry >= visible[..., None], -torch.inf)
        values, indices = torch.topk(scores, _TOP_K)
        return Selection(indices, values, *(() if blocks is None else _torch_blocks(scores, visible, blocks)))

    return run


def _torch_blocks(scores, visible, blocks: BlockSelection) -> tuple:
    """The best blocks by their largest score, the newest entry's first, and those scores."""
    torch = importlib.import_module("torch")
    best = scores.unflatten(-1, (-1, blocks.size)).amax(dim=-1)
    newest = (visible.long() - 1) // blocks.size
    chosen = torch.topk(best.scatter(-1, newest[..., None], torch.inf), blocks.count).indices
    return chosen, best.gather(-1, chosen)


def _torch_reselect(arrays: dict[str, Any]):
    """A copy of each query's candidates, their scores, the best. A block lies within a page."""
    torch = importlib.import_module("torch")
    queries, weights, pool, page_table, visible = _torch_inputs(arrays)
    block_ids = pytorch.tensors(arrays["block_ids"]).long()
    pool = pool.view(-1, _BLOCKS.size, _WIDTH)
    inside = torch.arange(_BLOCKS.size, device=pool.device)
    tiles = _torch_tiles(queries, _BLOCKS.count * _BLOCKS.size)

    def run():
        parts = []
        for tile in tiles:
            keys = pool[pytorch.rows(page_table, block_ids[:, tile], _PAGE // _BLOCKS.size)].flatten(2, 3)
            parts.append(_torch_scores(queries[:, tile] @ keys.mT, weights[:, tile]))
        entries = (block_ids[..., None] * _BLOCKS.size + inside).flatten(2)
        scores = torch.cat(parts, dim=1).masked_fill_(entries >= visible[..., None], -torch.inf)
        values, chosen = torch.topk(scores, _TOP_K)
        return entries.gather(-1, chosen), values

    return run
