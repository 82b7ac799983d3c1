"""Product of a few rows with a float8 matrix on Hopper GPUs (Mosaic GPU).

Transposed, as the routed experts': the matrix's rows are the matrix unit's left operand, decoded on their way from
shared memory to registers, and the tokens are its columns. A matrix with few rows is cut along its contraction too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.block_linear.weights import BLOCK
from pallas_kernels.gpu import registers

# Values of a contraction step.
STEP = registers.ROW_BYTES
# Warpgroups that multiply, each 64 rows of the matrix.
_GROUPS = 2
TILE = _GROUPS * registers.ROWS
# One persistent program for each multiprocessor; with another number of them the kernel is as right, but slower.
_PROGRAMS = 132
_SHARED_BYTES = 220 * 1024
_MAX_STAGES = 8
# What memory could bring while a piece of work starts and ends, and steps that a piece has at least.
_START_BYTES, _MIN_STEPS = 32 * 1024, 4
# A decoded weight is 2^-32 times its value: E4M3's bits are moved into bfloat16's, where they are 2^-120 of their
# value, and one multiplication has to bring both that and the scale. It is exact for scales from 2^-88 to 2^39.
_EXPONENT = 88
_UNSCALE = 2.0**32

# A word's even and odd bytes. NaN codes are read as ±480.
_DECODE = """{
.reg .b32 even, odd, sign;
shl.b32 even, $2, 4;
shr.b32 odd, $2, 4;
and.b32 even, even, 0x07F007F0;
and.b32 odd, odd, 0x07F007F0;
shl.b32 sign, $2, 8;
and.b32 sign, sign, 0x80008000;
or.b32 even, even, sign;
and.b32 sign, $2, 0x80008000;
or.b32 odd, odd, sign;
mul.rn.bf16x2 $0, even, $3;
mul.rn.bf16x2 $1, odd, $3;
}"""


def place(k: jax.Array) -> jax.Array:
    """Where the kernel contracts channel ``k``: steps stay, inside a step a thread's operands lie in whole words.

    Thread c of four holds 32 consecutive values, 8 words of 4; a matrix instruction takes one word of each thread.
    """
    thread, word, high, odd = k // 32 % 4, k // 4 % 8, k // 2 % 2, k % 2
    return k // STEP * STEP + 16 * word + 8 * odd + 2 * thread + high


def pieces(out: int, width: int, rows: int) -> int:
    """Into how many pieces to cut the contraction so that all programs have about the same work."""
    tiles, steps = out // TILE, width // STEP

    def cost(parts: int) -> float:
        sums = 0 if parts == 1 else 8 * parts * rows * out / _PROGRAMS  # float32, written and read
        return -(-tiles * parts // _PROGRAMS) * (-(-steps // parts) * TILE * STEP + _START_BYTES) + sums

    return min(range(1, max(steps // _MIN_STEPS, 1) + 1), key=cost)


def product(x: jax.Array, weight: jax.Array, scale: jax.Array, rows: int, groups: int = 1) -> jax.Array:
    """Multiplies rows with a matrix.

    Args:
      x: ``[rows rounded up to a multiple of 8, groups · in]`` bfloat16, channels in the order of :func:`place`.
      weight: ``[out, in]`` uint8 bytes of E4M3.
      scale: ``[out/32, in/32]`` uint8.
      rows: rows that are wanted (static).
      groups: equal parts of the matrix's rows, whole tiles, each for its own part of x (static).

    Returns:
      ``[rows, out]`` bfloat16.
    """
    padded, (out, width) = x.shape[0], weight.shape
    parts = pieces(out, width, rows)
    tiles, steps = out // TILE, width // STEP
    items = tiles * parts
    stages = min(_SHARED_BYTES // (TILE * STEP + padded * STEP * 2), _MAX_STAGES)
    dtype = jnp.dtype(jnp.float32 if parts > 1 else jnp.bfloat16)

    def body(x_ref, weight_ref, scale_ref, out_ref, w_smem, x_smem, full, empty):
        program, group = lax.axis_index("program"), lax.axis_index("group")
        mine = lax.div(items - program + _PROGRAMS - 1, jnp.int32(_PROGRAMS))

        def item(index):
            at = program + index * _PROGRAMS
            part = lax.rem(at, jnp.int32(parts))
            first = lax.div(part * steps, jnp.int32(parts))
            return lax.div(at, jnp.int32(parts)) * TILE, part, first, lax.div((part + 1) * steps, jnp.int32(parts))

        @pl.when(group == _GROUPS)
        def _copy():
            plgpu.set_max_registers(registers.COPY_REGISTERS, action="decrease")

            def one_item(index, number):
                row, _, first, end = item(index)

                def one_step(step, number):
                    slot = lax.rem(number, jnp.int32(stages))

                    @pl.when(number >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    of_x = lax.div(row, jnp.int32(out // groups)) * width + step * STEP
                    of_weight = weight_ref.at[pl.ds(row, TILE), pl.ds(step * STEP, STEP)]
                    plgpu.copy_gmem_to_smem(of_weight, w_smem.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(x_ref.at[:, pl.ds(of_x, STEP)], x_smem.at[slot], full.at[slot])
                    return number + 1

                return lax.fori_loop(first, end, one_step, number)

            lax.fori_loop(0, mine, one_item, jnp.int32(0))

        @pl.when(group < _GROUPS)
        def _compute():
            plgpu.set_max_registers(registers.compute_registers(_GROUPS), action="increase")

            def one_item(index, number):
                row, part, first, end = item(index)

                def accumulate(acc):
                    def one_step(step, carry):
                        number, scales, next_scales = carry
                        slot = lax.rem(number, jnp.int32(stages))
                        ahead = _fetch_scale(scale_ref, row, jnp.minimum(step + 2, end - 1))
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(acc, _decode(w_smem.at[slot], scales), x_smem.at[slot].transpose((1, 0)))
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[slot])
                        return number + 1, next_scales, ahead

                    # Two steps ahead: one is shorter than memory's latency.
                    scales = (_fetch_scale(scale_ref, row, jnp.minimum(first + i, end - 1)) for i in range(2))
                    start = (number, *scales)
                    after, *_ = lax.fori_loop(first, end, one_step, start)
                    return acc[...], after

                total, after = pl.run_scoped(accumulate, plgpu.ACC((registers.ROWS, padded), jnp.float32))
                here = out_ref.at[part, :, pl.ds(row, TILE)]
                registers.store_columns((total * _UNSCALE).astype(dtype), here, 0, rows)
                return after

            lax.fori_loop(0, mine, one_item, jnp.int32(0))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((parts, rows, out), dtype),
        grid=(_PROGRAMS,),
        grid_names=("program",),
        num_threads=_GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types=[
            plgpu.SMEM((stages, TILE, STEP), jnp.uint8, transforms=registers.CODES),
            plgpu.SMEM((stages, padded, STEP), jnp.bfloat16, transforms=registers.TOKENS),
            plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            plgpu.Barrier(num_barriers=stages, num_arrivals=_GROUPS),
        ],
    )
    result = kernel(x, weight, scale)
    return jnp.sum(result, axis=0).astype(jnp.bfloat16) if parts > 1 else result[0]


def _fetch_scale(scale, row, step) -> jax.Array:
    """Loads a thread's scale of a step, that of its 32 columns and of both its rows; opaque to others."""
    blocks = STEP // BLOCK
    ref = scale.at[pl.ds(lax.div(row, jnp.int32(BLOCK)), TILE // BLOCK), pl.ds(step * blocks, blocks)]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=registers.flat(1))
    def fetch(ctx, ref):
        del ctx
        first, column = registers.thread()
        block = arith.divui(first, registers.i32(BLOCK))
        at = arith.addi(arith.muli(block, registers.i32(registers.stride(ref))), column)
        byte = llvm.load(ir.IntegerType.get_signless(8), registers.offset(mgpu.utils.memref_ptr(ref), at))
        return registers.flat_array([arith.extui(ir.IntegerType.get_signless(32), byte)])

    return fetch(ref)


def _decode(codes, scales: jax.Array) -> jax.Array:
    """A warpgroup's operand of a step, ``[64, 128]`` bfloat16, from the tile ``[rows of all groups, 128]`` uint8."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(registers.CODES), registers.flat_layout(1)),
        return_type=plgpu.ShapeDtypeStruct((registers.ROWS, STEP), jnp.bfloat16, plgpu.Layout.WGMMA),
    )
    def decode(ctx, codes, scales):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        first, column = registers.thread()
        exponent = arith.addi(registers.element(scales.registers[0]), registers.i32(_EXPONENT))
        factor = arith.muli(exponent, registers.i32((1 << 7) | (1 << 23)))
        pairs = {}
        for below in range(2):
            row = arith.addi(first, registers.i32(8 * below))
            for half in range(2):
                chunk = arith.addi(arith.muli(column, registers.i32(2)), registers.i32(half))
                for i, word in enumerate(registers.four_words(codes, row, chunk)):
                    even, odd = mgpu.utils.inline_ptx(
                        _DECODE, word, factor, result_types=(i32, i32), has_side_effects=False
                    )
                    pairs[8 * half + 2 * i, below], pairs[8 * half + 2 * i + 1, below] = even, odd
        return registers.operand(pairs, STEP)

    return decode(codes, scales)
