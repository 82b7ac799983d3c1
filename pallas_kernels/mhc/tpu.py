"""The boundary between two sub-layers on a TPU: one pass over the streams.

A tile of rows is read once, in columns: each is updated, written, mixed and added to the statistics. The mixed row
stays in VMEM for its norm. The statistics come with rows on lanes, so that the Sinkhorn steps work on whole registers.

Streams are seen as ``[rows, C · d]``; between two boundaries that follow each other no copy is needed for it.
VMEM asked for with four bfloat16 streams of 5120: 37 MiB.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import backend
from pallas_kernels.mhc import xla
from pallas_kernels.mhc.types import STATISTICS_EPS, Boundary, Coefficients, HyperConnection, Update
from pallas_kernels.tiling import pad_axis
from pallas_kernels.tpu.rounding import round_to

LANES, SUBLANES = 128, 8
# Rows of a tile: they are lanes of the statistics.
_ROWS = LANES
# Channels of each stream that are in registers together.
_CHANNELS = 512
_MAX_VMEM = 56 * 2**20


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
    """Why these arguments are not for this kernel; None if they are."""
    copies, width = streams.shape[-2:]
    if streams.dtype not in (jnp.bfloat16, jnp.float32):
        return f"streams are {streams.dtype}"
    if width % LANES:
        return f"{width} channels are not a multiple of {LANES}"
    if copies * (2 + copies) % SUBLANES:
        return f"{copies} streams make {copies * (2 + copies)} coefficients, no whole tiles"
    if streams.size == 0:
        return "no rows"
    if _vmem(copies, width, streams.dtype) > _MAX_VMEM:
        return f"{_ROWS} rows of {copies} × {width} {streams.dtype} do not fit VMEM"
    return None


def _vmem(copies: int, width: int, dtype: jnp.dtype) -> int:
    """Bytes: double-buffered streams in and out, y and x, fn; the mixed row; what the columns need."""
    values = _ROWS * (2 * copies + 2) * width * jnp.dtype(dtype).itemsize
    return 2 * values + _ROWS * width * 4 + copies * (2 + copies) * copies * width * 4 + 8 * 2**20


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
    """See :func:`pallas_kernels.mhc.mhc`."""
    return _differentiable(norm_eps, eps, iterations, streams, mix, connection, norm_weight, update)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiable(norm_eps, eps, iterations, streams, mix, connection, norm_weight, update) -> Boundary:
    return _boundary(norm_eps, eps, iterations, streams, mix, connection, norm_weight, update)


def _save(norm_eps, eps, iterations, *arrays):
    return _boundary(norm_eps, eps, iterations, *arrays), arrays


def _backward(norm_eps, eps, iterations, arrays, cotangent):
    run = functools.partial(xla.mhc, norm_eps=norm_eps, eps=eps, iterations=iterations)
    return jax.vjp(run, *arrays)[1](cotangent)


_differentiable.defvjp(_save, _backward)


def _boundary(
    norm_eps: float,
    eps: float,
    iterations: int,
    streams: jax.Array,
    mix: jax.Array,
    connection: HyperConnection,
    norm_weight: jax.Array,
    update: Update | None,
) -> Boundary:
    *leading, copies, width = streams.shape
    rows = streams.size // (copies * width)
    padding = max(_ROWS - rows, 0)

    def flat(x: jax.Array, last: int) -> jax.Array:
        return pad_axis(x.reshape(rows, last), 0, padding)

    def row_block(last: int) -> pl.BlockSpec:
        return pl.BlockSpec((_ROWS, last), lambda i: (i, 0))

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda i: (0, 0))

    count = (2 + copies) * copies
    operands = [flat(streams, copies * width), flat(mix.astype(jnp.float32), copies), connection.fn]
    operands += [norm_weight.astype(jnp.float32)[None]]
    scale = jnp.concatenate(
        [jnp.broadcast_to(connection.scale[i], (n,)) for i, n in enumerate((copies, copies, copies**2))]
    )
    operands += [scale[:, None], connection.base[:, None]]
    specs = [row_block(copies * width), row_block(copies), whole(count, copies * width), whole(1, width)]
    specs += [whole(count, 1), whole(count, 1)]
    if update is not None:
        operands += [flat(update.y.astype(streams.dtype), width), flat(update.post, copies)]
        operands += [flat(update.comb, copies**2)]
        specs += [row_block(width), row_block(copies), row_block(copies**2)]

    total, tiles = rows + padding, pl.cdiv(rows, _ROWS)
    out_shape = [
        jax.ShapeDtypeStruct((total, width), streams.dtype),
        jax.ShapeDtypeStruct((count, tiles * _ROWS), jnp.float32),
    ]
    out_specs = [row_block(width), pl.BlockSpec((count, _ROWS), lambda i: (0, i))]
    if update is not None:
        out_shape.append(jax.ShapeDtypeStruct((total, copies * width), streams.dtype))
        out_specs.append(row_block(copies * width))
    x, numbers, *updated = pl.pallas_call(
        functools.partial(
            _kernel, copies=copies, updates=update is not None, norm_eps=norm_eps, eps=eps, iterations=iterations
        ),
        grid=(tiles,),
        in_specs=specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM((_ROWS, width), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=_vmem(copies, width, streams.dtype)
        ),
        interpret=backend.interpreted(),
        name="mhc",
    )(*operands)

    numbers = numbers[:, :rows].T
    pre, post, comb = jnp.split(numbers, [copies, 2 * copies], axis=-1)
    coefficients = Coefficients(
        pre.reshape(*leading, copies), post.reshape(*leading, copies), comb.reshape(*leading, copies, copies)
    )
    after = updated[0][:rows].reshape(streams.shape) if updated else streams
    return Boundary(after, x[:rows].reshape(*leading, width), coefficients)


def _kernel(streams, mix, fn, norm_weight, scale, base, *refs, copies: int, updates: bool, norm_eps, eps, iterations):
    if updates:
        y, post, comb, x, numbers, updated, mixed = refs
    else:
        x, numbers, mixed = refs
    width = mixed.shape[1]
    step = next(n for n in range(min(_CHANNELS, width), 0, -LANES) if width % n == 0)

    def column(stream: int, i) -> pl.Slice:
        return pl.ds(pl.multiple_of(stream * width + i * step, LANES), step)

    def some(i, sums):
        products, squares, mixed_squares = sums
        here = column(0, i)
        h = [streams[:, column(c, i)].astype(jnp.float32) for c in range(copies)]
        if updates:
            added = y[:, here].astype(jnp.float32)
            kept = [
                sum(comb[:, c * copies + j : c * copies + j + 1] * h[c] for c in range(copies)) for j in range(copies)
            ]
            h = [round_to(post[:, j : j + 1] * added + kept[j], updated.dtype) for j in range(copies)]
            for j in range(copies):
                updated[:, column(j, i)] = h[j]
            h = [v.astype(jnp.float32) for v in h]
        row = sum(mix[:, c : c + 1] * h[c] for c in range(copies))
        row = round_to(row, x.dtype).astype(jnp.float32)
        mixed[:, here] = row
        for c in range(copies):
            products += lax.dot_general(
                fn[:, column(c, i)],
                h[c],
                (((1,), (1,)), ((), ())),
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
            squares += jnp.sum(h[c] * h[c], axis=1, keepdims=True)
        return products, squares, mixed_squares + jnp.sum(row * row, axis=1, keepdims=True)

    zero = jnp.zeros((_ROWS, 1), jnp.float32)
    start = jnp.zeros((fn.shape[0], _ROWS), jnp.float32), zero, zero
    products, squares, mixed_squares = lax.fori_loop(0, width // step, some, start)

    inverse = lax.rsqrt(mixed_squares / width + norm_eps)

    def normalise(i, _):
        here = column(0, i)
        x[:, here] = round_to(mixed[:, here] * inverse * norm_weight[:, here], x.dtype)
        return 0

    lax.fori_loop(0, width // step, normalise, 0)

    inverse = lax.rsqrt(squares / (copies * width) + STATISTICS_EPS)
    on_lanes = jnp.transpose(jnp.broadcast_to(inverse, (_ROWS, LANES)))[:1]
    m = products * on_lanes * scale[...] + base[...]
    numbers[:copies] = jax.nn.sigmoid(m[:copies]) + eps
    numbers[copies : 2 * copies] = 2 * jax.nn.sigmoid(m[copies : 2 * copies])
    logits = [m[(2 + i) * copies : (3 + i) * copies] for i in range(copies)]
    for i, row in enumerate(_sinkhorn(logits, iterations, eps)):
        numbers[(2 + i) * copies : (3 + i) * copies] = row


def _sinkhorn(logits: list[jax.Array], iterations: int, eps: float) -> list[jax.Array]:
    """As :func:`pallas_kernels.mhc.xla.sinkhorn`, of rows ``comb[i]`` that are ``[C, rows]`` each."""

    def over_columns(comb):
        total = sum(comb) + eps
        return tuple(row / total for row in comb)

    def step(_, comb):
        return over_columns(tuple(row / (jnp.sum(row, axis=0, keepdims=True) + eps) for row in comb))

    comb = tuple(jnp.exp(row - jnp.max(row, axis=0, keepdims=True)) for row in logits)
    comb = over_columns(tuple(row / jnp.sum(row, axis=0, keepdims=True) + eps for row in comb))
    return lax.fori_loop(0, iterations - 1, step, comb)
