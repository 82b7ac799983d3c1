"""Hyper-connections of many tokens on Hopper in Pallas-Triton: streams, products, coefficients.

The first kernel holds a token's columns: it updates the streams, mixes, normalises and squares in one pass, so that
nothing but the product with ``fn`` needs them again. That product is too narrow (24 outputs) for Triton to hide its
loads behind: inside the first kernel it took longer than all the rest. So it follows as a product of XLA, which reads
the streams once more (3C + 2 values a column, not 2C + 2). The last kernel makes the coefficients.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.mhc.gpu_parts import (
    Static,
    coefficient_shapes,
    inverse_root,
    multiply_add,
    pieces,
    rounded,
    store_coefficients,
)
from pallas_kernels.mhc.types import Coefficients, HyperConnection, Update

# Columns that a program of the streams takes at once: 16 bytes a thread of its four warps.
_COLUMNS = 1024
# Widest row whose mixed values stay in registers until the norm is known.
WIDEST = 8192
# Tokens of a warp that makes coefficients: a row of four a thread.
_COEFFICIENT_TOKENS = 8


def streams_pass(
    streams: jax.Array, mix: jax.Array, update: Update | None, norm_weight: jax.Array, static: Static
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Updated streams ``[tokens, C, d]``, normalised x ``[tokens, d]`` and Σ h'² ``[tokens]``."""
    tokens, copies, width = streams.shape
    columns = min(_COLUMNS, pl.next_power_of_2(width))
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
                h = []
                for j in range(copies):
                    new = post[j] * y
                    for c in range(copies):
                        new = multiply_add(comb[c][j], wide[c], new, static.interpret)
                    h.append(rounded(new, streams.dtype, static.interpret))
                for c in range(copies):
                    plt.store(ref["new"].at[token, c, column], h[c], mask=there)
            wide = [s.astype(jnp.float32) for s in h]
            x = jnp.zeros(columns, jnp.float32)
            for m, w in zip(mixes, wide, strict=True):
                x = multiply_add(m, w, x, static.interpret)
                square_h = multiply_add(w, w, square_h, static.interpret)
            mixed.append(rounded(x, streams.dtype, static.interpret))
            x = mixed[-1].astype(jnp.float32)
            square_x = multiply_add(x, x, square_x, static.interpret)
        ref["square"][token] = jnp.sum(square_h)
        inverse = lax.rsqrt(jnp.sum(square_x) / width + static.norm_eps)
        for i, x in enumerate(mixed):
            column = i * columns + jnp.arange(columns)
            weight = plt.load(ref["weight"].at[column], mask=column < width, other=0).astype(jnp.float32)
            normal = (x.astype(jnp.float32) * inverse * weight).astype(streams.dtype)
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


def products(streams: jax.Array, fn: jax.Array) -> jax.Array:
    """Parts ``[tokens, parts, (2+C)·C]`` of flat(h)·fnᵀ."""
    tokens, outputs = streams.shape[0], fn.shape[0]
    flat = streams.reshape(tokens, -1)
    if streams.dtype == jnp.float32:
        return jnp.einsum("ti,oi->to", flat, fn, precision=lax.Precision.HIGHEST)[:, None]
    sums = jnp.einsum("ti,oi->to", flat, jnp.concatenate(pieces(fn)), preferred_element_type=jnp.float32)
    return sums.reshape(tokens, -1, outputs)


def coefficients(
    sums: jax.Array, square: jax.Array, connection: HyperConnection, copies: int, static: Static
) -> Coefficients:
    """Coefficients of ``[tokens]`` from the parts of the products and Σ h'²."""
    tokens, count = sums.shape[0], connection.fn.shape[1]

    def kernel(sums_ref, square_ref, base_ref, scale_ref, *outputs):
        token = pl.program_id(0) * _COEFFICIENT_TOKENS + jnp.arange(_COEFFICIENT_TOKENS)
        inverse = inverse_root(plt.load(square_ref.at[token], mask=token < tokens, other=0), count)
        store_coefficients(sums_ref, inverse, base_ref, scale_ref, outputs, token, static)

    return Coefficients(
        *pl.pallas_call(
            kernel,
            grid=(pl.cdiv(tokens, _COEFFICIENT_TOKENS),),
            out_shape=coefficient_shapes(tokens, copies),
            compiler_params=plt.CompilerParams(num_warps=1),
            interpret=static.interpret,
            name="mhc_coefficients",
        )(sums, square, connection.base, connection.scale)
    )
