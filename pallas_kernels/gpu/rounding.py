"""Rounding rows to FP8, a scale for each 32 values, in one launch: XLA takes four (maximum, scale, codes, values)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import backend
from pallas_kernels.formats import FP8_E8M0

# Values of a program: 8 for each thread of four warps.
_VALUES = 1024


def round_blocks(blocks: jax.Array) -> jax.Array:
    """``FP8_E8M0.round`` of float32 ``[blocks, 32]``, inside a kernel."""
    return round_under(blocks, jnp.max(jnp.abs(blocks), axis=-1)[:, None])


def round_under(x: jax.Array, top: jax.Array) -> jax.Array:
    """``FP8_E8M0.round`` of float32 values, inside a kernel; ``top``: largest magnitudes of their blocks, broadcast."""
    top = jnp.maximum(top, FP8_E8M0.floor)
    # The smallest power of two ≥ top / 448, with 448 = 1.75 · 2⁸: no division, which is not exact everywhere.
    bits = lax.bitcast_convert_type(top, jnp.int32)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).astype(jnp.int32)
    up = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    down = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    return (x * down).astype(jnp.float8_e4m3fn).astype(jnp.float32) * up


def round_rows(x: jax.Array) -> jax.Array:
    """``FP8_E8M0.round(x)`` of ``[rows, width]`` bfloat16, where the width is a multiple of 32.

    Raises:
      ValueError: it is not.
    """
    rows, width = x.shape
    block = FP8_E8M0.block
    if width % block:
        raise ValueError(f"rows of {width} values are not whole blocks of {block}")
    # The largest power of two that divides the width: tiles are powers of two, and no block is cut.
    step = min(width & -width, _VALUES)

    def body(x_ref, out_ref):
        values = round_blocks(x_ref[...].reshape(step // block, block).astype(jnp.float32))
        out_ref[...] = values.astype(x.dtype).reshape(1, step)

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows, width // step),
        in_specs=[pl.BlockSpec((1, step), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((1, step), lambda i, j: (i, j)),
        compiler_params=plgpu.CompilerParams(num_warps=max(step // 256, 1), num_stages=1),
        interpret=backend.interpreted(),
        name="round_rows",
    )(x)
