"""Hyper-connections on Hopper in Pallas-Triton: streams, products, coefficients.

The first kernel holds a token's columns: it updates the streams, mixes, normalises and squares in one pass, so that
nothing but the product with ``fn`` needs them again. That product is too narrow (24 outputs) for Triton to hide its
loads behind: inside the first kernel it took four times as long as all the rest. So it follows, from many tokens on as
a matrix product of XLA, which reads the streams once more (3C + 2 values a column, not 2C + 2); for few tokens as a
kernel that splits the columns among processors. The last kernel makes the coefficients: in XLA every step of the
Sinkhorn loop is launches of its own.

The product is as exact as float32's: bfloat16 streams times the three bfloat16 pieces of a float32, on the matrix
units, with float32 sums.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import interpreted
from pallas_kernels.mhc import xla
from pallas_kernels.mhc.types import STATISTICS_EPS, Boundary, Coefficients, HyperConnection, Update
from pallas_kernels.products import narrow

# Columns that a program of the streams takes at once: 16 bytes a thread of its four warps.
_COLUMNS = 1024
# Widest row whose mixed values stay in registers until the norm is known.
_WIDEST = 8192
# Up to so many tokens the product is a kernel; a tile of it has the fewest rows that matrix units take.
_FEW_TOKENS, _TOKENS = 256, 16
# Columns of a step of it, and programs that keep the 132 processors of an H200 busy.
_STEP, _PROGRAMS = 128, 132
# Parts of sums that a program of the coefficients holds at once.
_PARTS = 128


class _Static(NamedTuple):
    norm_eps: float
    eps: float
    iterations: int
    interpret: bool


def unsupported(
    streams: jax.Array,
    mix: jax.Array,
    connection: HyperConnection,
    norm_weight: jax.Array,
    update: Update | None = None,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> str | None:
    """Why the kernels do not run these arguments; None if they do."""
    del mix, connection, norm_weight, norm_eps, eps, iterations
    copies, width = streams.shape[-2:]
    if copies not in (2, 4):
        return f"{copies} streams, not 2 or 4"
    if copies * width % _STEP or width > _WIDEST:
        return f"{copies} streams of width {width}: not whole steps of {_STEP}, or wider than {_WIDEST}"
    if streams.dtype not in (jnp.bfloat16, jnp.float32):
        return f"streams are {streams.dtype}"
    if update is not None and update.y.dtype != streams.dtype:
        return f"y is {update.y.dtype}, streams are {streams.dtype}"
    if streams.size == 0:
        return f"streams are empty: {streams.shape}"
    # Offsets are 32-bit integers.
    if streams.size >= 2**31:
        return f"streams have {streams.size} values"
    return None


def mhc(
    streams: jax.Array,
    mix: jax.Array,
    connection: HyperConnection,
    norm_weight: jax.Array,
    update: Update | None = None,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> Boundary:
    """See :func:`pallas_kernels.mhc.mhc`; derivatives are those of the XLA back end."""
    lead = streams.shape[:-2]
    dims = len(lead)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[dims:]), (streams, mix, update))
    out = _boundary(_Static(norm_eps, eps, iterations, interpreted()), *rows, connection, norm_weight)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _boundary(static, streams, mix, update, connection, norm_weight) -> Boundary:
    new, x, square = _streams(streams, mix, update, norm_weight, static)
    sums = _products(new, connection.fn, static.interpret)
    return Boundary(new, x, _coefficients(sums, square, connection, streams.shape[1], static))


def _forward(static, *args):
    return _boundary(static, *args), args


def _backward(static, args, cotangents):
    def function(streams, mix, update, connection, norm_weight):
        return xla.mhc(
            streams,
            mix,
            connection,
            norm_weight,
            update,
            norm_eps=static.norm_eps,
            eps=static.eps,
            iterations=static.iterations,
        )

    return jax.vjp(function, *args)[1](cotangents)


_boundary.defvjp(_forward, _backward)


def _streams(
    streams: jax.Array, mix: jax.Array, update: Update | None, norm_weight: jax.Array, static: _Static
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Updated streams ``[tokens, C, d]``, normalised x ``[tokens, d]`` and Σ h'² ``[tokens]``."""
    tokens, copies, width = streams.shape
    columns = min(_COLUMNS, pl.next_power_of_2(width))
    # Triton's casts round; where XLA interprets the kernel it may skip one that is widened again.
    rounded = narrow if static.interpret else lambda x, dtype: x.astype(dtype)
    names = (
        ["streams", "mix", "weight"] + (["y", "post", "comb", "new"] if update is not None else []) + ["x", "square"]
    )
    shapes = {
        "new": jax.ShapeDtypeStruct(streams.shape, streams.dtype),
        "x": jax.ShapeDtypeStruct((tokens, width), streams.dtype),
        "square": jax.ShapeDtypeStruct((tokens,), jnp.float32),
    }

    def kernel(*refs):
        ref = dict(zip(names, refs, strict=True))
        token = pl.program_id(0)
        mixes = [ref["mix"][token, c] for c in range(copies)]
        if update is not None:
            post = [ref["post"][token, c] for c in range(copies)]
            comb = [[ref["comb"][token, i, j] for j in range(copies)] for i in range(copies)]
        square_h = square_x = jnp.zeros(columns, jnp.float32)
        mixed = []
        for first in range(0, width, columns):
            column = first + jnp.arange(columns)
            there = column < width

            def read(name: str, *index, column=column, there=there) -> jax.Array:
                return plt.load(ref[name].at[(token, *index, column)], mask=there, other=0)

            h = [read("streams", c) for c in range(copies)]
            if update is not None:
                wide, y = [s.astype(jnp.float32) for s in h], read("y").astype(jnp.float32)
                h = [
                    rounded(post[j] * y + sum(comb[c][j] * wide[c] for c in range(copies)), streams.dtype)
                    for j in range(copies)
                ]
                for c in range(copies):
                    plt.store(ref["new"].at[token, c, column], h[c], mask=there)
            wide = [s.astype(jnp.float32) for s in h]
            x = rounded(sum(m * w for m, w in zip(mixes, wide, strict=True)), streams.dtype).astype(jnp.float32)
            mixed.append(x)
            square_h += sum(jnp.square(w) for w in wide)
            square_x += jnp.square(x)
        ref["square"][token] = jnp.sum(square_h)
        inverse = lax.rsqrt(jnp.sum(square_x) / width + static.norm_eps)
        for i, x in enumerate(mixed):
            column = i * columns + jnp.arange(columns)
            weight = plt.load(ref["weight"].at[column], mask=column < width, other=0).astype(jnp.float32)
            normal = (x * inverse * weight).astype(streams.dtype)
            plt.store(ref["x"].at[token, column], normal, mask=column < width)

    outputs = [shapes[name] for name in names if name in shapes]
    results = pl.pallas_call(
        kernel,
        grid=(tokens,),
        out_shape=outputs,
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=static.interpret,
        name="mhc_streams",
    )(streams, mix, norm_weight, *(update or ()))
    return (streams, *results) if update is None else tuple(results)


def _products(streams: jax.Array, fn: jax.Array, interpret: bool) -> jax.Array:
    """Parts ``[tokens, parts, (2+C)·C]`` of flat(h)·fnᵀ."""
    tokens, outputs = streams.shape[0], fn.shape[0]
    flat = streams.reshape(tokens, -1)
    if tokens <= _FEW_TOKENS:
        return _few_products(flat, fn, interpret)
    if streams.dtype == jnp.float32:
        return jnp.einsum("ti,oi->to", flat, fn, precision=lax.Precision.HIGHEST)[:, None]
    pieces = jnp.concatenate(_pieces(fn))
    sums = jnp.einsum("ti,oi->to", flat, pieces, preferred_element_type=jnp.float32)
    return sums.reshape(tokens, -1, outputs)


def _few_products(flat: jax.Array, fn: jax.Array, interpret: bool) -> jax.Array:
    tokens, total = flat.shape
    outputs, steps, tiles = fn.shape[0], total // _STEP, pl.cdiv(tokens, _TOKENS)
    padded = max(pl.next_power_of_2(outputs), 16)
    divisors = [n for n in range(1, min(steps, _PARTS) + 1) if steps % n == 0]
    parts = next((n for n in divisors if n * tiles >= _PROGRAMS), divisors[-1])

    def kernel(flat_ref, fn_ref, sums_ref):
        part = pl.program_id(1)
        token, output = pl.program_id(0) * _TOKENS + jnp.arange(_TOKENS), jnp.arange(padded)
        here, real = (token < tokens)[:, None], (output < outputs)[:, None]

        def step(i, sums):
            column = ((part * (steps // parts) + i) * _STEP + jnp.arange(_STEP))[None, :]
            h = plt.load(flat_ref.at[token[:, None], column], mask=here, other=0)
            return _add_product(sums, h, plt.load(fn_ref.at[output[:, None], column], mask=real, other=0))

        sums = lax.fori_loop(0, steps // parts, step, jnp.zeros((_TOKENS, padded), jnp.float32))
        at = (token[:, None], part, output[None, :])
        plt.store(sums_ref.at[at], sums, mask=here & (output < outputs)[None, :])

    return pl.pallas_call(
        kernel,
        grid=(tiles, parts),
        out_shape=jax.ShapeDtypeStruct((tokens, parts, outputs), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="mhc_products",
    )(flat, fn)


def _pieces(x: jax.Array) -> list[jax.Array]:
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


def _add_product(total: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """total + a·bᵀ for a ``[m, k]`` and b ``[n, k]``; pairs of pieces that float32 cannot show are left out."""
    for i, left in enumerate(_pieces(a)):
        for j, right in enumerate(_pieces(b)):
            if i + j < 3:
                total += jnp.dot(left, right.T, preferred_element_type=jnp.float32)
    return total


def _coefficients(
    sums: jax.Array, square: jax.Array, connection: HyperConnection, copies: int, static: _Static
) -> Coefficients:
    """Coefficients of ``[tokens]`` from the parts of the products and Σ h'²."""
    tokens, parts, _ = sums.shape
    count = connection.fn.shape[1]
    padded = pl.next_power_of_2(parts)
    # One token a program where tokens are few, else enough that a program has work for its warps.
    tile = 1 if tokens <= _FEW_TOKENS else max(min(_PARTS // padded, 8), 1)

    def kernel(sums_ref, square_ref, base_ref, scale_ref, pre_ref, post_ref, comb_ref):
        token = pl.program_id(0) * tile + jnp.arange(tile)
        here = token < tokens
        part = jnp.arange(padded)
        copy = jnp.arange(copies)
        inverse = lax.rsqrt(plt.load(square_ref.at[token], mask=here, other=0) / count + STATISTICS_EPS)

        def products(row: jax.Array, scale: int) -> jax.Array:
            """Scaled products of the rows ``[1, ...]`` of fn: ``[tile, ...]``."""
            ones = (1,) * (row.ndim - 1)
            parts_axis, tokens_axis = part.reshape(padded, 1, *ones), token.reshape(1, tile, *ones)
            index = [jnp.broadcast_to(i, (padded, tile, *row.shape[1:])) for i in (tokens_axis, parts_axis, row[None])]
            mask = (parts_axis < parts) & (tokens_axis < tokens) & (row[None] >= 0)
            values = plt.load(sums_ref.at[tuple(index)], mask=mask, other=0)
            m = jnp.sum(values, axis=0) * inverse.reshape(tile, *ones)
            return m * scale_ref[scale] + plt.load(base_ref.at[row])

        at = (token[:, None], copy[None, :])
        plt.store(pre_ref.at[at], _sigmoid(products(copy[None, :], 0)) + static.eps, mask=here[:, None])
        plt.store(post_ref.at[at], 2 * _sigmoid(products(copies + copy[None, :], 1)), mask=here[:, None])

        i, j = copy[None, :, None], copy[None, None, :]
        comb = products(2 * copies + copies * i + j, 2)
        comb = jnp.exp(comb - jnp.max(comb, axis=2)[:, :, None])
        comb = comb / jnp.sum(comb, axis=2)[:, :, None] + static.eps
        comb = comb / (jnp.sum(comb, axis=1)[:, None, :] + static.eps)

        def balance(_, comb):
            comb = comb / (jnp.sum(comb, axis=2)[:, :, None] + static.eps)
            return comb / (jnp.sum(comb, axis=1)[:, None, :] + static.eps)

        comb = lax.fori_loop(0, static.iterations - 1, balance, comb)
        plt.store(comb_ref.at[token[:, None, None], i, j], comb, mask=here[:, None, None])

    def float32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((tokens, *shape), jnp.float32)

    return Coefficients(
        *pl.pallas_call(
            kernel,
            grid=(pl.cdiv(tokens, tile),),
            out_shape=[float32(copies), float32(copies), float32(copies, copies)],
            compiler_params=plt.CompilerParams(num_warps=1 if tile == 1 else 4),
            interpret=static.interpret,
            name="mhc_coefficients",
        )(sums, square, connection.base, connection.scale)
    )


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))
