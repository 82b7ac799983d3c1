"""Hyper-connections of few tokens on Hopper in Pallas-Triton: one kernel over columns, one over rows.

The first reads tiles of tokens by columns of all streams, updates, mixes, writes, and adds to the statistics and to the
products with ``fn``. Columns are split among programs, so that one token keeps many processors busy. The second adds
the parts up, makes the coefficients and normalises x, which it reads back. For many tokens the first would be three
times slower than :mod:`~pallas_kernels.mhc.gpu_many`: Triton waits for every product, and registers are short.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.mhc.gpu_parts import (
    Static,
    add_product,
    coefficient_shapes,
    inverse_root,
    multiply_add,
    rounded,
    store_coefficients,
)
from pallas_kernels.mhc.types import Coefficients, HyperConnection, Update

# Rows of matrix instructions, of which a program takes the fewest that hold all tokens if any do.
_TILES = (16, 64)
# Columns of a step: 16 bytes a thread and row.
COLUMNS = 32
# Programs that keep the 132 processors of an H200 busy; more parts than this are slow to add up.
_PROGRAMS, _PARTS = 256, 128
# Values that a program of the second kernel holds at once.
_VALUES = 4096


def columns(
    streams: jax.Array, mix: jax.Array, update: Update | None, fn: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Updated streams, x before its norm, and parts of the statistics.

    Returns:
      streams ``[tokens, C, d]``, x ``[tokens, d]``, parts of flat(h')·fnᵀ ``[tokens, parts, rows of fn]`` and of the
      sums of squares of h' and x ``[tokens, parts, 2]``.
    """
    tokens, copies, width = streams.shape
    outputs, padded = fn.shape[0], max(pl.next_power_of_2(fn.shape[0]), 16)
    tile = next((tile for tile in _TILES if tile >= tokens), _TILES[-1])
    tiles, steps = pl.cdiv(tokens, tile), width // COLUMNS
    divisors = [n for n in range(1, min(steps, _PARTS) + 1) if steps % n == 0]
    parts = next((n for n in divisors if n * tiles >= _PROGRAMS), divisors[-1])
    names = ["streams", "mix"] + (["y", "post", "comb"] if update is not None else []) + ["fn"]
    out_names = (["new"] if update is not None else []) + ["x", "sums", "squares"]
    shapes = {
        "new": jax.ShapeDtypeStruct(streams.shape, streams.dtype),
        "x": jax.ShapeDtypeStruct((tokens, width), streams.dtype),
        "sums": jax.ShapeDtypeStruct((tokens, parts, outputs), jnp.float32),
        "squares": jax.ShapeDtypeStruct((tokens, parts, 2), jnp.float32),
    }

    def kernel(*refs):
        ref = dict(zip(names + out_names, refs, strict=True))
        part = pl.program_id(0)
        token, output = pl.program_id(1) * tile + jnp.arange(tile), jnp.arange(padded)
        here, real = token < tokens, output < outputs

        def coefficient(name: str, *index: int) -> jax.Array:
            return plt.load(ref[name].at[(token, *index)], mask=here, other=0)[:, None]

        mixes = [coefficient("mix", c) for c in range(copies)]
        if update is not None:
            post = [coefficient("post", c) for c in range(copies)]
            comb = [[coefficient("comb", i, j) for j in range(copies)] for i in range(copies)]

        def step(i, carry):
            total, square_h, square_x = carry
            column = (part * (steps // parts) + i) * COLUMNS + jnp.arange(COLUMNS)

            def at(*index: int) -> tuple:
                return (token[:, None], *index, column[None, :])

            def read(name: str, *index: int) -> jax.Array:
                return plt.load(ref[name].at[at(*index)], mask=here[:, None], other=0)

            h = [read("streams", c) for c in range(copies)]
            if update is not None:
                wide, y = [s.astype(jnp.float32) for s in h], read("y").astype(jnp.float32)
                for j in range(copies):
                    new = post[j] * y
                    for c in range(copies):
                        new = multiply_add(comb[c][j], wide[c], new, interpret)
                    h[j] = rounded(new, streams.dtype, interpret)
                    plt.store(ref["new"].at[at(j)], h[j], mask=here[:, None])
            x = squares = jnp.zeros((tile, COLUMNS), jnp.float32)
            for c in range(copies):
                wide = h[c].astype(jnp.float32)
                x = multiply_add(mixes[c], wide, x, interpret)
                squares = multiply_add(wide, wide, squares, interpret)
                weights = plt.load(
                    ref["fn"].at[output[:, None], c * width + column[None, :]], mask=real[:, None], other=0
                )
                total = add_product(total, h[c], weights)
            x = rounded(x, streams.dtype, interpret)
            plt.store(ref["x"].at[at()], x, mask=here[:, None])
            return total, square_h + _by_eights(squares), square_x + _by_eights(jnp.square(x.astype(jnp.float32)))

        zero = jnp.zeros((tile, COLUMNS // 8), jnp.float32)
        total = jnp.zeros((tile, padded), jnp.float32)
        total, square_h, square_x = lax.fori_loop(0, steps // parts, step, (total, zero, zero))
        where = here[:, None] & real[None, :]
        plt.store(ref["sums"].at[token[:, None], part, output[None, :]], total, mask=where)
        plt.store(ref["squares"].at[token, part, 0], jnp.sum(square_h, axis=1), mask=here)
        plt.store(ref["squares"].at[token, part, 1], jnp.sum(square_x, axis=1), mask=here)

    results = pl.pallas_call(
        kernel,
        grid=(parts, tiles),
        out_shape=[shapes[name] for name in out_names],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="mhc_columns",
    )(streams, mix, *(update or ()), fn)
    return (streams, *results) if update is None else tuple(results)


def _by_eights(x: jax.Array) -> jax.Array:
    """Sums over 8 columns, which one thread holds."""
    return jnp.sum(x.reshape(x.shape[0], -1, 8), axis=2)


def rows(
    x: jax.Array,
    sums: jax.Array,
    squares: jax.Array,
    connection: HyperConnection,
    norm_weight: jax.Array,
    copies: int,
    static: Static,
) -> tuple[jax.Array, Coefficients]:
    """Normalised x ``[tokens, d]`` and coefficients from the parts of :func:`columns`."""
    tokens, parts, _ = sums.shape
    width = x.shape[1]
    step = min(_VALUES, pl.next_power_of_2(width))

    def kernel(x_ref, sums_ref, squares_ref, base_ref, scale_ref, weight_ref, out_ref, *coefficient_refs):
        token, part = pl.program_id(0), jnp.arange(pl.next_power_of_2(parts))

        def square(which: int) -> jax.Array:
            return jnp.sum(plt.load(squares_ref.at[token, part, which], mask=part < parts, other=0))

        shrink = inverse_root(square(1), width, static.norm_eps)
        for first in range(0, width, step):
            column = first + jnp.arange(step)
            there = column < width
            values = plt.load(x_ref.at[token, column], mask=there, other=0).astype(jnp.float32)
            weight = plt.load(weight_ref.at[column], mask=there, other=0).astype(jnp.float32)
            plt.store(out_ref.at[token, column], (values * shrink * weight).astype(x.dtype), mask=there)
        inverse = inverse_root(square(0), copies * width)
        token = token + jnp.arange(1)
        inverse = jnp.broadcast_to(inverse, token.shape)
        store_coefficients(sums_ref, inverse, base_ref, scale_ref, coefficient_refs, token, static)

    x, *coefficients = pl.pallas_call(
        kernel,
        grid=(tokens,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), *coefficient_shapes(tokens, copies)],
        input_output_aliases={0: 0},
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=static.interpret,
        name="mhc_rows",
    )(x, sums, squares, connection.base, connection.scale, norm_weight)
    return x, Coefficients(*coefficients)
