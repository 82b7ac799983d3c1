"""Routed experts in three ways: each row's own, every expert on every row, or blocks of rows that share one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tiling
from pallas_kernels.expert_matmul.weights import ExpertWeights, decode_weights
from pallas_kernels.formats import Format
from pallas_kernels.products import einsum, narrow, rounded

# Rows of a block: few enough that a lightly used expert wastes little, enough to pay for decoding its matrices.
_MIN_ROWS, _MAX_ROWS = 8, 128

Matrices = tuple[ExpertWeights, ExpertWeights, ExpertWeights]


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
    if layer is not None:  # XLA fuses the slice into what reads it, or copies one layer
        w1, w3, w2 = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, layer, keepdims=False), (w1, w3, w2))
    (rows, k), (experts, inner, _) = expert_ids.shape, w1.weight.shape
    ids = jnp.where((expert_ids >= 0) & (expert_ids < experts), expert_ids, experts)
    # A row without experts may hold anything; zeroed, its NaN cannot reach a weight's gradient either.
    x = rounded(activation_fmt, jnp.where(jnp.any(ids < experts, axis=-1, keepdims=True), x, 0))

    # Fewer choices than experts: read the chosen ones only, each for its one row.
    if rows * k < experts and 3 * rows * k * inner * x.shape[-1] * 4 <= tiling.TEMPORARY_BYTES:
        return _gathered(x, ids, expert_weights, (w1, w3, w2), limit, activation_fmt)

    # With few experts a row's own are a good part of all, and a few large products beat many small ones; but then
    # all experts' matrices and inner rows exist at once, so they must be small as well. Rows that fill blocks are
    # better off in them: on a CPU the two are equal at 32 an expert, at 128 blocks are twice as fast.
    dense_bytes = experts * max(inner, x.shape[-1]) * max(inner, rows) * 4
    few_rows = 2 * rows * k <= experts * _MAX_ROWS
    if experts <= 4 * k and few_rows and dense_bytes <= tiling.TEMPORARY_BYTES:
        return _dense(x, ids, expert_weights, (w1, w3, w2), limit, activation_fmt)
    return _blocked(limit, activation_fmt, x, ids, expert_weights, (w1, w3, w2))


def _expert(x: jax.Array, weight: jax.Array, matrices: Matrices, limit: float, fmt: Format) -> jax.Array:
    """One expert on rounded rows ``[rows, hidden]`` with weights ``[rows]``; float32."""
    w1, w3, w2 = (decode_weights(w, x.dtype) for w in matrices)

    def product(rows: jax.Array, w: jax.Array) -> jax.Array:
        return narrow(einsum("ri,oi->ro", rows, w), x.dtype).astype(jnp.float32)

    gate = jnp.minimum(product(x, w1), limit)
    up = jnp.clip(product(x, w3), -limit, limit)
    inner = narrow(jax.nn.silu(gate) * up * weight[:, None], x.dtype)
    return product(rounded(fmt, inner), w2)


def _gathered(x: jax.Array, ids: jax.Array, weights: jax.Array, matrices: Matrices, limit: float, fmt: Format):
    """One copy of an expert's matrices for each choice."""
    rows, k = ids.shape
    experts = matrices[0].weight.shape[0]
    chosen = jnp.minimum(ids, experts - 1).reshape(-1)
    own = jax.tree.map(lambda leaf: jnp.take(leaf, chosen, axis=0), matrices)
    row, weight = jnp.repeat(x, k, axis=0)[:, None], weights.reshape(-1, 1)
    out = jax.vmap(lambda r, w, m: _expert(r, w, m, limit, fmt))(row, weight, own)
    out = jnp.where((ids < experts)[..., None], out.reshape(rows, k, -1), 0)
    return jnp.sum(out, axis=1)


def _dense(x: jax.Array, ids: jax.Array, weights: jax.Array, matrices: Matrices, limit: float, fmt: Format):
    """Every expert on every row, the rows that did not choose it masked."""
    chosen = ids == jnp.arange(matrices[0].weight.shape[0])[:, None, None]
    weight = jnp.sum(jnp.where(chosen, weights, 0), axis=-1)
    experts = weight.shape[0]
    # The rows are copied for every expert: seeing that they are the same, XLA would make one product of all experts
    # and transpose all their matrices for it in every call.
    copies = lax.optimization_barrier(jnp.broadcast_to(x, (experts, *x.shape)))
    out = jax.vmap(lambda r, w, m: _expert(r, w, m, limit, fmt))(copies, weight, matrices)
    out = jnp.where(jnp.any(chosen, axis=-1)[..., None], out, 0)
    return sum(out[e] for e in range(experts))


class _Block(NamedTuple):
    """Up to ``rows_per_block`` rows of one expert.

    Attributes:
      live: scalar bool; False for blocks that no row needed.
      expert: scalar int32.
      row: ``[rows_per_block]`` int32 rows of x; the number of rows where the block has none.
      choice: ``[rows_per_block]`` int32: which of the row's experts this is.
    """

    live: jax.Array
    expert: jax.Array
    row: jax.Array
    choice: jax.Array


def _blocks(ids: jax.Array, experts: int) -> _Block:
    """The rows sorted by expert and cut into blocks, stacked on a leading axis of static length."""
    rows, k = ids.shape
    pairs = rows * k
    size = min(max(1 << (pairs // experts).bit_length(), _MIN_ROWS), _MAX_ROWS)
    order = jnp.argsort(ids.reshape(-1), stable=True)
    count = jnp.bincount(ids.reshape(-1), length=experts + 1)[:experts]
    first_pair = jnp.cumsum(count) - count
    end_block = jnp.cumsum(-(-count // size))
    # Every expert that is used may end in one unfilled block.
    block = jnp.arange(min(pairs, pairs // size + min(experts, pairs)), dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(end_block, block, side="right"), experts - 1).astype(jnp.int32)
    live = block < end_block[-1]
    block_in_expert = block - (end_block - -(-count // size))[expert]
    rank = block_in_expert[:, None] * size + jnp.arange(size)
    pair = order[jnp.minimum(first_pair[expert][:, None] + rank, pairs - 1)]
    has_row = live[:, None] & (rank < count[expert][:, None])
    return _Block(live, expert, jnp.where(has_row, pair // k, rows).astype(jnp.int32), (pair % k).astype(jnp.int32))


def _groups(blocks: _Block, x: jax.Array, matrices: Matrices, together: bool) -> _Block:
    """Blocks ``[steps, blocks of a step, ...]``; dead ones fill the last step.

    Args:
      together: as many blocks a step as its temporaries allow. Else one, as with packed matrices: to decode an expert
        costs more than a step.
    """
    count, size = blocks.row.shape
    inner, hidden = matrices[0].weight.shape[-2:]
    block_bytes = 4 * (3 * inner * hidden + size * (2 * hidden + 3 * inner))
    most = max(tiling.TEMPORARY_BYTES // block_bytes, 1) if together and matrices[0].scale is None else 1
    steps = -(-count // most)
    group = -(-count // steps)
    surplus = steps * group - count
    fill = _Block(live=False, expert=matrices[0].weight.shape[0] - 1, row=x.shape[0], choice=0)
    padded = (tiling.pad_axis(leaf, 0, surplus, value) for leaf, value in zip(blocks, fill, strict=True))
    return _Block(*(leaf.reshape(steps, group, *leaf.shape[1:]) for leaf in padded))


def _run_group(
    rows: jax.Array, weight: jax.Array, matrices: Matrices, group: _Block, limit: float, fmt: Format
) -> jax.Array:
    """Blocks' outputs ``[blocks, rows_per_block, hidden]``, float32."""

    def run(rows: jax.Array, weight: jax.Array, matrices: Matrices) -> jax.Array:
        return jax.vmap(lambda r, w, m: _expert(r, w, m, limit, fmt))(rows, weight, matrices)

    if group.live.shape[0] > 1:
        return run(rows, weight, matrices)
    # A block without rows is skipped: decoding an expert for nothing costs as much as using it.
    nothing = jnp.zeros(rows.shape, jnp.float32)
    return lax.cond(group.live[0], run, lambda *_: nothing, rows, weight, matrices)


def _inputs(x: jax.Array, weights: jax.Array, matrices: Matrices, group: _Block):
    """Rows, weights and matrices of some blocks; zeros where they have no row."""
    rows = x.at[group.row].get(mode="fill", fill_value=0)
    weight = weights.at[group.row, group.choice].get(mode="fill", fill_value=0)
    own = jax.tree.map(lambda leaf: jnp.take(leaf, group.expert, axis=0, mode="clip"), matrices)
    return rows, weight, own


def _by_platform(f: Callable, *args):
    """``f(*args, together)``: a launch costs a GPU more than a block; a CPU gains by passing dead blocks over."""
    return lax.platform_dependent(
        *args, cpu=functools.partial(f, together=False), default=functools.partial(f, together=True)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _blocked(
    limit: float, fmt: Format, x: jax.Array, ids: jax.Array, weights: jax.Array, matrices: Matrices
) -> jax.Array:
    """Some blocks after the others; a block has a copy of one expert's matrices."""
    return _by_platform(functools.partial(_outputs, limit, fmt), x, ids, weights, matrices)


def _outputs(
    limit: float, fmt: Format, x: jax.Array, ids: jax.Array, weights: jax.Array, matrices: Matrices, together: bool
) -> jax.Array:
    def step(y: jax.Array, group: _Block):
        out = _run_group(*_inputs(x, weights, matrices, group), group, limit, fmt)
        return y.at[group.row].add(out, mode="drop"), None

    start = jnp.zeros(x.shape, jnp.float32)
    return lax.scan(step, start, _groups(_blocks(ids, matrices[0].weight.shape[0]), x, matrices, together))[0]


def _blocked_forward(limit, fmt, x, ids, weights, matrices):
    return _blocked(limit, fmt, x, ids, weights, matrices), (x, ids, weights, matrices)


def _blocked_backward(limit, fmt, saved, dy):
    dx, dweights, dmatrices = _by_platform(functools.partial(_gradients, limit, fmt), *saved, dy)
    return dx, None, dweights, dmatrices


def _gradients(limit, fmt, x, ids, weights, matrices, dy, together):
    # Written out because a scan's own transpose adds a whole stack of experts, nearly all zeros, for every step.
    experts = matrices[0].weight.shape[0]
    packed = matrices[0].scale is not None

    def step(sums, group: _Block):
        dx, dweights, dmatrices = sums
        rows, weight, own = _inputs(x, weights, matrices, group)
        dout = dy.at[group.row].get(mode="fill", fill_value=0)
        if packed:
            pull = jax.vjp(lambda r, w: _run_group(r, w, own, group, limit, fmt), rows, weight)[1]
        else:
            pull = jax.vjp(lambda r, w, m: _run_group(r, w, m, group, limit, fmt), rows, weight, own)[1]
        drows, dweight, *done = pull(dout)
        dx = dx.at[group.row].add(drows.astype(dx.dtype), mode="drop")
        dweights = dweights.at[group.row, group.choice].add(dweight, mode="drop")
        # Blocks without rows are dropped, not added as zeros: an expert's NaN times zero is NaN.
        expert = jnp.where(group.live, group.expert, experts)

        def add(total: jax.Array, new: jax.Array) -> jax.Array:
            return total.at[expert].add(new.astype(total.dtype), mode="drop", indices_are_sorted=True)

        return (dx, dweights, jax.tree.map(add, dmatrices, *done) if done else None), None

    def zeros(leaf: jax.Array) -> jax.Array:
        return jnp.zeros(leaf.shape, jnp.float32)

    start = (zeros(x), zeros(weights), None if packed else jax.tree.map(zeros, matrices))
    dx, dweights, dmatrices = lax.scan(step, start, _groups(_blocks(ids, experts), x, matrices, together))[0]
    if not packed:
        dmatrices = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), dmatrices, matrices)
    return dx.astype(x.dtype), dweights.astype(weights.dtype), dmatrices


_blocked.defvjp(_blocked_forward, _blocked_backward)
