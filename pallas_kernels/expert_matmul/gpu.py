"""Routed experts on Hopper GPUs: rows sorted into blocks of one expert, two grouped products (Mosaic GPU).

Mosaic GPU and not Pallas-Triton, for its matrix instructions that take decoded weights from registers and its copies
of whole tiles. Sorting and rounding are three small Pallas-Triton launches, the sum over experts is XLA's.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_matmul import gpu_place, gpu_product, xla
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
    (experts, inner), hidden = w1.weight.shape[-3:-1], x.shape[-1]
    size = block_rows(expert_ids.size, experts)
    slots = gpu_place.block_count(expert_ids.size, experts, size) * size
    width = gpu_product.padded(max(inner, hidden))
    if slots * width >= 2**31:
        return f"{slots} slots of {width} values are more than an int32 can count"
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
    size = block_rows(ids.size, experts)
    placed = gpu_place.place_tokens(x, ids, weights, layer, experts=experts, size=size, fmt=fmt)
    product = functools.partial(gpu_product.grouped_product, expert=placed.expert, live=placed.live, rows=size)
    inner = product(placed.tokens, first=w1, second=w3, weights=placed.weight, limit=limit)
    inner = gpu_place.place_inner(inner, placed.slot, w1.weight.shape[-2], fmt)
    out = product(inner, first=w2, second=None, weights=None, limit=None)

    y = jnp.zeros(x.shape, jnp.float32)
    for choice in range(ids.shape[1]):
        # A choice after the other: all at once would be a float32 array of every row and choice.
        slot = placed.slot[:, choice]
        mine = out[jnp.maximum(slot, 0)].astype(jnp.float32)
        y += jnp.where(slot[:, None] >= 0, mine, 0)
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
