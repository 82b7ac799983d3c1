"""Routed experts on a TPU: rows sorted by expert and padded to blocks, each block one product with its own matrix.

Two kernels, gate with up and down, and the rounding of what lies between left to XLA. A kernel's grid has the tiles of
a matrix outside and the blocks inside: consecutive blocks of one expert share its tile, which is fetched and decoded
once for all of them, in VMEM. A block's expert comes from a table in SMEM; the blocks that no row needs, at the end,
repeat the last one's and so fetch nothing. E2M1 is decoded by integer arithmetic in 32-bit lanes, even columns and odd
ones to two halves of a matrix; the rows come in that order of columns as well.

VMEM asked for at 5120 × 2304 and 128 rows a block: 34 MiB for gate and up, 16 MiB for down.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import backend
from pallas_kernels.expert_matmul import xla
from pallas_kernels.expert_matmul.weights import ExpertWeights
from pallas_kernels.formats import FP4_E8M0, Format
from pallas_kernels.products import rounded
from pallas_kernels.tiling import pad_axis
from pallas_kernels.tpu import unpack
from pallas_kernels.tpu.rounding import round_to

LANES = 128
# Rows of a block: at least a tile of bfloat16, at most enough to pay for fetching a matrix.
_MIN_ROWS, _MAX_ROWS = 16, 128
# Rows of a matrix that one step fetches, and those of them that are decoded at once.
_TILE, _DECODED = 512, 128
# Choices that are compared with each other.
_CHUNK = 256

Matrices = tuple[ExpertWeights, ExpertWeights, ExpertWeights]


def unsupported(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w1: ExpertWeights,
    w3: ExpertWeights,
    w2: ExpertWeights,
    *,
    layer: jax.Array | None = None,
    limit: float,
    activation_fmt: Format,
) -> str | None:
    """Why these arguments are not for this kernel; None if they are."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"rows are {x.dtype}"
    if w1.scale is None and w1.weight.dtype != x.dtype:
        return f"matrices are {w1.weight.dtype}, rows {x.dtype}"
    for name, width in (("hidden size", x.shape[-1]), ("inner size", w1.weight.shape[-2])):
        if width % LANES:
            return f"{name} {width} is not a multiple of {LANES}"
    if x.shape[0] == 0:
        return "no rows"
    return None


def expert_matmul(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w1: ExpertWeights,
    w3: ExpertWeights,
    w2: ExpertWeights,
    *,
    layer: jax.Array | None = None,
    limit: float,
    activation_fmt: Format,
) -> jax.Array:
    """See :func:`pallas_kernels.expert_matmul.expert_matmul`."""
    if layer is not None:  # the experts of all layers are one long list, of which this layer's are a part
        layers, experts = w1.weight.shape[:2]
        real = (expert_ids >= 0) & (expert_ids < experts)
        expert_ids = jnp.where(real, layer * experts + expert_ids, layers * experts)
        w1, w3, w2 = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (w1, w3, w2))
    return _differentiable(limit, activation_fmt, x, expert_ids, expert_weights, (w1, w3, w2))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(limit: float, fmt: Format, x: jax.Array, ids: jax.Array, weights: jax.Array, matrices: Matrices):
    return _forward(limit, fmt, x, ids, weights, matrices)


def _save(limit, fmt, x, ids, weights, matrices):
    return _forward(limit, fmt, x, ids, weights, matrices), (x, ids, weights, matrices)


def _backward(limit, fmt, saved, dy):
    x, ids, weights, matrices = saved

    def run(x, weights, matrices):
        return xla.expert_matmul(x, ids, weights, *matrices, limit=limit, activation_fmt=fmt)

    if matrices[0].scale is None:
        dx, dweights, dmatrices = jax.vjp(run, x, weights, matrices)[1](dy)
        return dx, None, dweights, dmatrices
    dx, dweights = jax.vjp(lambda x, weights: run(x, weights, matrices), x, weights)[1](dy)
    return dx, None, dweights, None


_differentiable.defvjp(_save, _backward)


def _forward(limit: float, fmt: Format, x: jax.Array, ids: jax.Array, weights: jax.Array, matrices: Matrices):
    w1, w3, w2 = matrices
    blocks = _blocks(ids, w1.weight.shape[0])
    packed = w1.scale is not None

    def ordered(rows: jax.Array) -> jax.Array:
        return _even_then_odd(rows) if packed else rows

    def fill(values: jax.Array) -> jax.Array:
        return values.at[blocks.pair].get(mode="fill", fill_value=0)

    def pairs(values: jax.Array) -> jax.Array:
        return values.reshape(-1)

    x_rows = ordered(rounded(fmt, x)).at[blocks.pair // ids.shape[1]].get(mode="fill", fill_value=0)
    swiglu = functools.partial(_swiglu, limit=limit)
    inner = _grouped(swiglu, blocks, x_rows, (w1, w3), fill(pairs(weights.astype(jnp.float32)))[:, None])
    out = _grouped(lambda out: out, blocks, ordered(rounded(fmt, inner)), (w2,))
    here = jnp.minimum(blocks.position, out.shape[0] - 1)
    chosen = jnp.where((blocks.position < out.shape[0])[..., None], out[here], 0)
    return jnp.sum(chosen.astype(jnp.float32), axis=1)


def _even_then_odd(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


class _Blocks(NamedTuple):
    """Where the choices of all rows lie once they are sorted by expert and padded.

    Attributes:
      expert: ``[blocks]`` int32; beyond the last block that has rows, that block's.
      live: scalar int32: blocks that have rows.
      pair: ``[blocks · rows of a block]`` int32 index into the flat choices; their number where there is none.
      position: ``[rows, k]`` int32: the reverse; beyond the end for a choice of no expert.
    """

    expert: jax.Array
    live: jax.Array
    pair: jax.Array
    position: jax.Array


def _blocks(ids: jax.Array, experts: int) -> _Blocks:
    pairs = ids.size
    size = min(max(1 << max(pairs // experts, 1).bit_length() - 1, _MIN_ROWS), _MAX_ROWS)
    # Every expert that is used may end in one unfilled block.
    total = min(pairs, pairs // size + min(experts, pairs))
    flat = jnp.where((ids >= 0) & (ids < experts), ids, experts).reshape(-1)
    rank, count = _ranks(flat, experts)
    own = -(-count // size)
    end = jnp.cumsum(own)
    live = end[-1]
    block = jnp.minimum(jnp.arange(total, dtype=jnp.int32), jnp.maximum(live - 1, 0))
    expert = jnp.minimum(jnp.searchsorted(end, block, side="right"), experts - 1).astype(jnp.int32)
    place = (end - own)[jnp.minimum(flat, experts - 1)] * size + rank
    place = jnp.where(flat < experts, place, total * size)
    pair = jnp.full(total * size, pairs, jnp.int32).at[place].set(jnp.arange(pairs, dtype=jnp.int32), mode="drop")
    return _Blocks(expert, live, pair, place.reshape(ids.shape))


def _ranks(chosen: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """How many earlier choices are of the same expert, ``[pairs]``, and how many each expert has, ``[experts]``.

    Counted in chunks, within one by comparing all pairs: a sort or a long sum takes a minute to compile.
    """
    pairs = chosen.shape[0]
    chunks = pad_axis(chosen, 0, -pairs % _CHUNK, experts).reshape(-1, _CHUNK)
    earlier = jnp.arange(_CHUNK)[:, None] > jnp.arange(_CHUNK)
    within = jnp.sum((chunks[:, :, None] == chunks[:, None, :]) & earlier, axis=-1, dtype=jnp.int32)
    held = jnp.sum(chunks[:, :, None] == jnp.arange(experts), axis=1, dtype=jnp.int32)
    before = jnp.cumsum(held, axis=0) - held
    offset = jnp.take_along_axis(before, jnp.minimum(chunks, experts - 1), axis=1)
    return (within + offset).reshape(-1)[:pairs], jnp.sum(held, axis=0)


def _swiglu(gate: jax.Array, up: jax.Array, weight: jax.Array, *, limit: float) -> jax.Array:
    gate, up = (v.astype(jnp.float32) for v in (gate, up))
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit) * weight


def _grouped(
    finish, blocks: _Blocks, x: jax.Array, matrices: Sequence[ExpertWeights], column: jax.Array | None = None
) -> jax.Array:
    """``finish`` of each block's products with its expert's matrices, ``[blocks · rows, out]`` in x's dtype.

    Args:
      finish: elementwise function of the products, and of ``column``.
      x: ``[blocks · rows, in]``; its columns even first, then odd, if the matrices are packed.
      matrices: ``[experts, out, in]`` each.
      column: ``[blocks · rows, 1]`` float32.
    """
    total, size = blocks.expert.shape[0], x.shape[0] // blocks.expert.shape[0]
    out, stored = matrices[0].weight.shape[1:]
    packed = matrices[0].scale is not None
    tile = next((t for t in range(_TILE, 0, -LANES) if out % t == 0), out)
    decoded = (tile, x.shape[1])

    def last_live(b, live):
        return jnp.minimum(b, jnp.maximum(live[0] - 1, 0))

    def row_block(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((size, width), lambda j, b, expert, live: (last_live(b, live), 0))

    operands, specs = [x], [row_block(x.shape[1])]
    for w in matrices:
        operands.append(w.weight)
        specs.append(pl.BlockSpec((None, tile, stored), lambda j, b, expert, live: (expert[b], j, 0)))
        if packed:
            # The scales of a row are fewer than lanes, so that this is how XLA stores them.
            operands.append(w.scale.transpose(0, 2, 1))
            specs.append(pl.BlockSpec((None, w.scale.shape[2], tile), lambda j, b, expert, live: (expert[b], 0, j)))
    if column is not None:
        operands.append(column)
        specs.append(row_block(1))

    item = x.dtype.itemsize
    fetched = size * (x.shape[1] + tile) * item + len(matrices) * tile * stored * matrices[0].weight.dtype.itemsize
    temporaries = 6 * min(tile, _DECODED) * x.shape[1] * 4 + (2 + len(matrices)) * size * tile * 4
    vmem = 2 * fetched + len(matrices) * tile * x.shape[1] * item + temporaries + 4 * 2**20
    return pl.pallas_call(
        functools.partial(_kernel, finish, packed, len(matrices)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(out // tile, total),
            in_specs=specs,
            out_specs=pl.BlockSpec((size, tile), lambda j, b, expert, live: (last_live(b, live), j)),
            scratch_shapes=[pltpu.VMEM(decoded, x.dtype)] * (len(matrices) if packed else 0),
        ),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], out), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=vmem),
        interpret=backend.interpreted(),
        name="expert_matmul",
    )(blocks.expert, blocks.live[None], *operands)


def _kernel(finish, packed: bool, count: int, expert, live, x, *refs):
    leaves = 2 if packed else 1
    stored, refs = refs[: count * leaves], refs[count * leaves :]
    decoded = refs[len(refs) - count :] if packed else stored
    *column, out = refs[: len(refs) - count] if packed else refs
    block = pl.program_id(1)
    is_live = block < live[0]
    if packed:
        is_new = (block == 0) | (expert[block] != expert[jnp.maximum(block - 1, 0)])

        @pl.when(is_live & is_new)
        def _():
            for weight, scale, target in zip(stored[0::2], stored[1::2], decoded, strict=True):
                _decode(weight, scale, target)

    @pl.when(is_live)
    def _():
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
        products = [
            lax.dot_general(
                x[...], w[...], (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
            for w in decoded
        ]
        out[...] = round_to(finish(*(round_to(p, x.dtype) for p in products), *(ref[...] for ref in column)), x.dtype)


def _decode(weight, scale, target) -> None:
    """Codes ``[out, in/2]`` and scales ``[in/32, out]`` to ``[out, in]``, the even columns first."""
    rows, half = weight.shape
    step = _DECODED if rows % _DECODED == 0 else rows
    shape = (scale.shape[0], half)
    bytes_a_scale = FP4_E8M0.block // 2
    first = lax.broadcasted_iota(jnp.int32, shape, 0) * bytes_a_scale
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    spread = ((column >= first) & (column < first + bytes_a_scale)).astype(jnp.bfloat16)

    def some(i, _):
        here = pl.ds(pl.multiple_of(i * step, step), step)
        powers = unpack.e8m0(scale[:, here].astype(jnp.int32)) * 0.5
        # Exact: powers of two, each times one.
        steps = lax.dot_general(
            powers.astype(jnp.bfloat16), spread, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        codes = weight[here, :].astype(jnp.int32)
        target[here, :half] = (unpack.e2m1_doubled(codes) * steps).astype(target.dtype)
        target[here, half:] = (unpack.e2m1_doubled(codes >> 4) * steps).astype(target.dtype)
        return 0

    lax.fori_loop(0, rows // step, some, 0)
