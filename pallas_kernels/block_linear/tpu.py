"""Dense linear map on a TPU: float8 weights decoded tile by tile in VMEM, products in the activations' dtype.

The grid has the tiles of the weight outside and those of the rows inside: a weight is fetched and decoded once, however
many rows there are. Bytes are decoded by integer arithmetic in 32-bit lanes, as older chips have no float8; a tile's
scales are spread over its columns by a product with zeros and ones, and over its rows by broadcasting.

VMEM asked for: 46 MiB at 8192 inputs in bfloat16, 22 MiB at 5120 and 64 rows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import backend
from pallas_kernels.block_linear import xla
from pallas_kernels.block_linear.weights import BLOCK, decode_blocks
from pallas_kernels.formats import Format, e8m0_decode
from pallas_kernels.products import rounded
from pallas_kernels.tiling import pad_axis
from pallas_kernels.tpu import unpack
from pallas_kernels.tpu.rounding import round_to

LANES = 128
# Outputs of a tile: a multiple of 256, whose 8 rows of scales are a whole tile of float32.
_OUTPUTS, _WHOLE_SCALES = 512, 8 * BLOCK
# Rows of a tile.
_ROWS = 256
_MAX_INPUTS = 16384


def unsupported(
    x: jax.Array, weight: jax.Array, scale: jax.Array | None, *, activation_fmt: Format, groups: int = 1
) -> str | None:
    """Why these arguments are not for this kernel; None if they are."""
    if scale is None:
        return f"the weight is plain {weight.dtype}"
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"inputs are {x.dtype}"
    out, width = weight.shape
    if width % LANES or width > _MAX_INPUTS:
        return f"{width} inputs are not a multiple of {LANES} up to {_MAX_INPUTS}"
    if out % (groups * LANES) or (groups > 1 and out // groups % _tile(out // groups)):
        return f"{out} outputs in {groups} groups are no whole tiles"
    if x.size == 0:
        return "no rows"
    return None


def _tile(out: int) -> int:
    """Outputs of a tile: all of a few, else as many as leave least of the last tile empty."""
    if out <= _WHOLE_SCALES:
        return out
    return min(range(_OUTPUTS, 0, -_WHOLE_SCALES), key=lambda t: -out % t)


def block_linear(
    x: jax.Array, weight: jax.Array, scale: jax.Array | None, *, activation_fmt: Format, groups: int = 1
) -> jax.Array:
    """See :func:`pallas_kernels.block_linear.block_linear`."""
    jax.eval_shape(lambda: decode_blocks(weight, scale, x.dtype))  # Refuses scales that do not fit.
    return _differentiable(activation_fmt, groups, x, weight, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(fmt: Format, groups: int, x: jax.Array, weight: jax.Array, scale: jax.Array | None) -> jax.Array:
    rows = rounded(fmt, x).reshape(-1, x.shape[-1])
    return _product(rows, weight, scale, groups).reshape(*x.shape[:-1], weight.shape[0])


def _save(fmt, groups, x, weight, scale):
    return _differentiable(fmt, groups, x, weight, scale), (x, weight, scale)


def _backward(fmt, groups, saved, dy):
    x, weight, scale = saved
    static = {"activation_fmt": fmt, "groups": groups}
    if scale is not None:
        dx = jax.vjp(lambda x: xla.block_linear(x, weight, scale, **static), x)[1](dy)[0]
        return dx, None, None
    dx, dweight = jax.vjp(lambda x, weight: xla.block_linear(x, weight, None, **static), x, weight)[1](dy)
    return dx, dweight, None


_differentiable.defvjp(_save, _backward)


def _product(x: jax.Array, weight: jax.Array, scale: jax.Array | None, groups: int) -> jax.Array:
    """``[rows, out]`` of rounded ``[rows, groups · in]``."""
    rows, (out, width) = x.shape[0], weight.shape
    tile = _tile(out // groups)
    # Without groups the last tile may be part of one: what lies beyond the weight reaches no output that is there.
    tiles = pl.cdiv(out // groups, tile)
    height = min(_ROWS, -(-rows // 16) * 16)
    x = pad_axis(x, 0, -rows % height)
    operands = [x, weight.astype(x.dtype) if scale is None else lax.bitcast_convert_type(weight, jnp.uint8)]
    specs = [
        pl.BlockSpec((height, width), lambda j, i: (i, j // tiles)),
        pl.BlockSpec((tile, width), lambda j, i: (j, 0)),
    ]
    if scale is not None:
        operands.append(e8m0_decode(scale))
        specs.append(pl.BlockSpec((tile // BLOCK, scale.shape[1]), lambda j, i: (j, 0)))
    item = x.dtype.itemsize
    vmem = 2 * (height * (width + tile) * item + tile * width * operands[1].dtype.itemsize)
    vmem += tile * width * item + 12 * BLOCK * width * 4 + 2 * height * tile * 4 + 8 * 2**20
    y = pl.pallas_call(
        _kernel,
        grid=(groups * tiles, x.shape[0] // height),
        in_specs=specs,
        out_specs=pl.BlockSpec((height, tile), lambda j, i: (i, j)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], out), x.dtype),
        scratch_shapes=[] if scale is None else [pltpu.VMEM((tile, width), x.dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem),
        interpret=backend.interpreted(),
        name="block_linear",
    )(*operands)
    return y[:rows]


def _kernel(x, weight, *refs):
    *scale, out = refs[:2] if len(refs) == 3 else refs
    decoded = refs[2] if scale else weight
    if scale:

        @pl.when(pl.program_id(1) == 0)
        def _():
            _decode(weight, scale[0], decoded)

    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    product = lax.dot_general(
        x[...], decoded[...], (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    out[...] = round_to(product, out.dtype)


def _decode(weight, scale, target) -> None:
    """E4M3 bytes ``[out, in]`` and scales ``[out/32, in/32]`` to floats, one row of blocks after another."""
    outputs, width = weight.shape
    shape = (scale.shape[1], width)
    first = lax.broadcasted_iota(jnp.int32, shape, 0) * BLOCK
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    spread = ((column >= first) & (column < first + BLOCK)).astype(jnp.bfloat16)
    # Exact: powers of two, each times one.
    steps = lax.dot_general(
        scale[...].astype(jnp.bfloat16), spread, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    for i in range(outputs // BLOCK):
        here = slice(i * BLOCK, (i + 1) * BLOCK)
        values = unpack.e4m3(weight[here, :].astype(jnp.int32)) * steps[i : i + 1]
        target[here, :] = values.astype(target.dtype)
