"""What the kernels of the hyper-connections share: exact products on matrix units, and the coefficients."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.mhc.types import STATISTICS_EPS
from pallas_kernels.products import narrow


class Static(NamedTuple):
    """What a kernel is compiled for."""

    norm_eps: float
    eps: float
    iterations: int
    interpret: bool


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array, interpret: bool) -> jax.Array:
    """a · b + c in float32, rounded once."""
    if interpret:
        return a * b + c
    return plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[jnp.broadcast_to(x, c.shape) for x in (a, b, c)],
        constraints="=r,r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(c.shape, jnp.float32)],
    )[0]


def rounded(x: jax.Array, dtype: jnp.dtype, interpret: bool) -> jax.Array:
    """float32 values rounded to ``dtype``."""
    if interpret or dtype != jnp.bfloat16:
        # Where XLA interprets the kernel it may skip a cast that is widened again.
        return narrow(x, dtype) if interpret else x.astype(dtype)
    return plt.elementwise_inline_asm(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        args=[x],
        constraints="=r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)],
    )[0]


def pieces(x: jax.Array) -> list[jax.Array]:
    """bfloat16 arrays whose sum is x: its leading 8 bits, the next 8, and what is left."""
    if x.dtype == jnp.bfloat16:
        return [x]
    pieces = []
    for _ in range(3):
        # By masking: a cast that is widened again may be dropped where the kernel is interpreted.
        piece = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000), jnp.float32)
        pieces.append(piece.astype(jnp.bfloat16))
        x = x - piece
    return pieces


def add_product(total: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """total + a·bᵀ for a ``[m, k]`` and b ``[n, k]``; pairs of pieces that float32 cannot show are left out."""
    for i, left in enumerate(pieces(a)):
        for j, right in enumerate(pieces(b)):
            if i + j < 3:
                total += jnp.dot(left, right.T, preferred_element_type=jnp.float32)
    return total


def store_coefficients(sums, inverse: jax.Array, base, scale, outputs, token: jax.Array, static: Static) -> None:
    """Writes a program's coefficients.

    Args:
      sums: reference to parts ``[tokens, parts, (2+C)·C]`` of the products with ``fn``.
      inverse: ``[tile]``, of the root of the mean square.
      base, scale, outputs: references to the connection's and to pre, post and comb.
      token: ``[tile]``, the program's.
    """
    pre, post, comb_ref = outputs
    tokens, parts, _ = sums.shape
    copies, tile = pre.shape[1], token.shape[0]
    padded = pl.next_power_of_2(parts)
    here, part, copy = token < tokens, jnp.arange(padded), jnp.arange(copies)

    def products(row: jax.Array, which: int) -> jax.Array:
        """Scaled products of the rows ``[1, ...]`` of fn: ``[tile, ...]``."""
        ones = (1,) * (row.ndim - 1)
        parts_axis, tokens_axis = part.reshape(padded, 1, *ones), token.reshape(1, tile, *ones)
        index = [jnp.broadcast_to(i, (padded, tile, *row.shape[1:])) for i in (tokens_axis, parts_axis, row[None])]
        mask = (parts_axis < parts) & (tokens_axis < tokens) & (row[None] >= 0)
        values = plt.load(sums.at[tuple(index)], mask=mask, other=0)
        m = jnp.sum(values, axis=0) * inverse.reshape(tile, *ones)
        return m * scale[which] + plt.load(base.at[row])

    at = (token[:, None], copy[None, :])
    plt.store(pre.at[at], _sigmoid(products(copy[None, :], 0)) + static.eps, mask=here[:, None])
    plt.store(post.at[at], 2 * _sigmoid(products(copies + copy[None, :], 1)), mask=here[:, None])

    i, j = copy[None, :, None], copy[None, None, :]
    comb = products(2 * copies + copies * i + j, 2)
    comb = jnp.exp(comb - jnp.max(comb, axis=2)[:, :, None])
    comb = comb * (1 / jnp.sum(comb, axis=2))[:, :, None] + static.eps
    comb = comb * (1 / (jnp.sum(comb, axis=1) + static.eps))[:, None, :]

    def balance(_, comb):
        comb = comb * (1 / (jnp.sum(comb, axis=2) + static.eps))[:, :, None]
        return comb * (1 / (jnp.sum(comb, axis=1) + static.eps))[:, None, :]

    comb = lax.fori_loop(0, static.iterations - 1, balance, comb)
    plt.store(comb_ref.at[token[:, None, None], i, j], comb, mask=here[:, None, None])


def coefficient_shapes(tokens: int, copies: int) -> list[jax.ShapeDtypeStruct]:
    """Of pre, post and comb."""
    return [jax.ShapeDtypeStruct((tokens, *shape), jnp.float32) for shape in ((copies,), (copies,), (copies, copies))]


def inverse_root(square: jax.Array, count: int, eps: float = STATISTICS_EPS) -> jax.Array:
    """1/√(mean + eps) of a sum of ``count`` squares."""
    return lax.rsqrt(square / count + eps)


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))
