"""Routed experts on Hopper GPUs: rows sorted into blocks of one expert, two grouped products (Mosaic GPU).

Mosaic GPU and not Pallas-Triton, for its matrix instructions that take decoded weights from registers and its copies
of whole tiles. What is cheap beside an expert's matrices is left to XLA: sorting, roundings, the sum over experts.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_matmul import gpu_product, xla
from pallas_kernels.expert_matmul.weights import ExpertWeights
from pallas_kernels.formats import Format
from pallas_kernels.products import operand_dtype

# Rows of a block: columns of the matrix instructions. An expert's matrices are read once for every block.
_MIN_ROWS, _MAX_ROWS = 8, 64

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
    """Why XLA has to run this; None if the kernel can."""
    if any(w.scale is None for w in (w1, w3, w2)):
        return f"weights are {w1.weight.dtype}, not packed"
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}"
    if operand_dtype(x.dtype, activation_fmt) != jnp.bfloat16:
        return f"activations rounded to {activation_fmt} are not exact in bfloat16"
    if 0 in x.shape or 0 in expert_ids.shape:
        return f"x {x.shape} and expert_ids {expert_ids.shape} hold nothing"
    inner, hidden = w1.weight.shape[-2], x.shape[-1]
    return gpu_product.supports(inner, hidden, fused=True) or gpu_product.supports(hidden, inner, fused=False)


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
    """See :func:`pallas_kernels.expert_matmul.expert_matmul`; the backward pass is XLA's.

    With ``layer`` the matrices are ``[layers, experts, ...]`` and are read where they lie.
    """
    return _experts(limit, activation_fmt, x, expert_ids, expert_weights, (w1, w3, w2), layer)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _experts(
    limit: float,
    fmt: Format,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    matrices: Matrices,
    layer: jax.Array | None,
) -> jax.Array:
    experts = matrices[0].weight.shape[-3]
    w1, w3, w2 = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[-2:]), matrices)
    real = (ids >= 0) & (ids < experts)
    blocks = _blocks(jnp.where(real, ids, experts), experts, block_rows(ids.size, experts))
    size = blocks.row.shape[1]
    slots = blocks.row.reshape(-1)
    expert = blocks.expert if layer is None else blocks.expert + layer * experts

    # Slots without a row hold row 0, and nobody reads what comes of them.
    tokens = gpu_product.permute(fmt.round(x))[slots]
    product = functools.partial(gpu_product.grouped_product, expert=expert, live=blocks.live, rows=size)
    weight = weights.reshape(-1)[blocks.pair.reshape(-1)]
    inner = product(tokens, first=w1, second=w3, weights=weight, limit=limit)
    out = product(gpu_product.permute(fmt.round(inner)), first=w2, second=None, weights=None, limit=None)

    y = jnp.zeros(x.shape, jnp.float32)
    for choice in range(ids.shape[1]):
        # A choice after the other: all at once would be a float32 array of every row and choice.
        mine = out[blocks.slot[:, choice]].astype(jnp.float32)
        y += jnp.where(real[:, choice, None], mine, 0)
    return y


def _forward(limit, fmt, x, ids, weights, matrices, layer):
    return _experts(limit, fmt, x, ids, weights, matrices, layer), (x, ids, weights, matrices, layer)


def _backward(limit, fmt, saved, dy):
    x, ids, weights, matrices, layer = saved
    if layer is not None:
        matrices = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, layer, keepdims=False), matrices)

    def again(x, weights):
        return xla.expert_matmul(x, ids, weights, *matrices, limit=limit, activation_fmt=fmt)

    dx, dweights = jax.vjp(again, x, weights)[1](dy)
    return dx, None, dweights, None, None


_experts.defvjp(_forward, _backward)


def block_rows(pairs: int, experts: int) -> int:
    """Rows of a block for so many (row, expert) pairs: an expert's average and half as much, as a power of two."""
    return min(max(1 << (3 * pairs // (2 * experts) - 1).bit_length(), _MIN_ROWS), _MAX_ROWS)


class _Blocks(NamedTuple):
    """Rows sorted by expert and cut into blocks; a static number of them, of which the first ones are live.

    Attributes:
      live: ``[1]`` int32, number of blocks in use.
      expert: ``[blocks]`` int32.
      row: ``[blocks, size]`` int32 rows of x; 0 where there is none.
      pair: ``[blocks, size]`` int32 places in the flat expert weights; 0 where there is none.
      slot: ``[rows, k]`` int32: the place of a pair in the flat blocks; anything in range for one without an expert.
    """

    live: jax.Array
    expert: jax.Array
    row: jax.Array
    pair: jax.Array
    slot: jax.Array


def _blocks(ids: jax.Array, experts: int, size: int) -> _Blocks:
    """``ids`` ``[rows, k]`` in 0 .. experts; the last is no expert."""
    rows, k = ids.shape
    pairs = rows * k
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    place = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    # Where each expert's pairs start among the sorted ones, and its blocks among all.
    # Comparisons of all with all: a binary search is a loop of many small launches.
    count = jnp.sum(flat[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    first_pair = jnp.cumsum(count) - count
    end_block = jnp.cumsum(-(-count // size))
    first_block = end_block - -(-count // size)

    # Every expert that is used may end in one unfilled block.
    block = jnp.arange(min(pairs, pairs // size + min(experts, pairs)), dtype=jnp.int32)
    expert = jnp.minimum(jnp.sum(end_block <= block[:, None], axis=1, dtype=jnp.int32), experts - 1)
    rank = (block - first_block[expert])[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    filled = (block < end_block[-1])[:, None] & (rank < count[expert][:, None])
    pair = jnp.where(filled, order[jnp.clip(first_pair[expert][:, None] + rank, 0, pairs - 1)], 0)

    own = jnp.minimum(flat, experts - 1)
    slot = jnp.minimum(first_block[own] * size + place - first_pair[own], block.size * size - 1)
    return _Blocks(end_block[-1:].astype(jnp.int32), expert, pair // k, pair, slot.reshape(rows, k))
