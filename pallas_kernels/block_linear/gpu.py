"""Dense linear map on Hopper GPUs.

Rounding is a Pallas-Triton kernel (elementwise, one launch). The product of few rows is a Mosaic GPU kernel that reads
float8 weights once and decodes them on their way to the matrix unit; many rows are worth a matrix that is decoded once,
and the product is XLA's.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import backend
from pallas_kernels.block_linear import gpu_product, xla
from pallas_kernels.block_linear.weights import BLOCK, decode_blocks
from pallas_kernels.formats import FP8_E8M0, DenseFormat, Format
from pallas_kernels.gpu.rounding import round_blocks, round_rows
from pallas_kernels.products import operand_dtype

# Beyond these rows a product takes longer than reading its weights, and the kernel's sums do not fit into registers.
MAX_ROWS = 128
# Columns of the smallest matrix instruction: rows of x.
_MIN_ROWS = 8


def unsupported(
    x: jax.Array, weight: jax.Array, scale: jax.Array | None, *, activation_fmt: Format, groups: int = 1
) -> str | None:
    """Why XLA has to run this; None if the kernel can."""
    rows, (out, width) = math.prod(x.shape[:-1]), weight.shape
    if scale is None:
        return f"the weight is {weight.dtype} without scales"
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}"
    if operand_dtype(x.dtype, activation_fmt) != jnp.bfloat16:
        return f"activations rounded to {activation_fmt} are not exact in bfloat16"
    if rows == 0:
        return "no rows"
    if out % (groups * gpu_product.TILE):
        return f"{out} rows of the weight in {groups} groups are not a multiple of {gpu_product.TILE}"
    if width % gpu_product.STEP:
        return f"{width} columns of the weight are not a multiple of {gpu_product.STEP}"
    return None


def block_linear(
    x: jax.Array, weight: jax.Array, scale: jax.Array | None, *, activation_fmt: Format, groups: int = 1
) -> jax.Array:
    """See :func:`pallas_kernels.block_linear.block_linear`; the backward pass is XLA's."""
    out, width = weight.shape
    if (scale.shape[0] * BLOCK, scale.shape[1] * BLOCK) != (out, width):
        decode_blocks(weight, scale, x.dtype)  # raises
    rows = x.reshape(-1, groups * width)
    y = (_linear if rows.shape[0] <= MAX_ROWS else _many_rows)(activation_fmt, groups, rows, weight, scale)
    return y.reshape(*x.shape[:-1], out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(fmt: Format, groups: int, x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    tokens = round_and_place(x, fmt, max(_MIN_ROWS, pl.next_power_of_2(x.shape[0])))
    return gpu_product.product(tokens, lax.bitcast_convert_type(weight, jnp.uint8), scale, x.shape[0], groups)


def _forward(fmt, groups, x, weight, scale):
    return _linear(fmt, groups, x, weight, scale), (x, weight, scale)


def _backward(fmt, groups, saved, dy):
    x, weight, scale = saved
    backward = jax.vjp(lambda x: xla.block_linear(x, weight, scale, activation_fmt=fmt, groups=groups), x)[1]
    return *backward(dy), None, None


_linear.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _many_rows(fmt: Format, groups: int, x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    x = round_rows(x) if fmt == FP8_E8M0 else fmt.round(x)
    return xla.block_linear(x, weight, scale, activation_fmt=DenseFormat(x.dtype.name), groups=groups)


_many_rows.defvjp(lambda *arguments: (_many_rows(*arguments), arguments[2:]), _backward)


def round_and_place(x: jax.Array, fmt: Format, rows: int) -> jax.Array:
    """``fmt.round(x)`` as the product takes it, in one launch where XLA would need one for each step.

    Args:
      x: ``[at most rows, width]`` bfloat16.
      rows: of the result; those that x does not have are undefined.
    """
    if fmt != FP8_E8M0:
        x = fmt.round(x)
    present, width = x.shape
    step = gpu_product.STEP

    def body(x_ref, out_ref):
        values = x_ref[...].reshape(step // BLOCK, BLOCK)
        if fmt == FP8_E8M0:
            values = round_blocks(values.astype(jnp.float32)).astype(x.dtype)
        channel = lax.broadcasted_iota(jnp.int32, values.shape, 0) * BLOCK
        channel += lax.broadcasted_iota(jnp.int32, values.shape, 1)
        plgpu.store(out_ref.at[0, gpu_product.place(channel)], values)

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((rows, width), x.dtype),
        grid=(rows, width // step),
        in_specs=[pl.BlockSpec((1, step), lambda i, j: (jnp.minimum(i, present - 1), j))],
        out_specs=pl.BlockSpec((1, step), lambda i, j: (i, j)),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=backend.interpreted(),
    )(x)
