"""Products of blocks of rows with packed experts on Hopper GPUs (Mosaic GPU).

Transposed: an expert's rows of weights are the matrix unit's left operand and the few tokens are its columns, so that a
product of 8 tokens wastes nothing. Codes go from shared memory to registers, are decoded there and multiplied from
there: the decoded matrix never exists in any memory. One warpgroup copies, the others decode and multiply.

The order of a contraction is free, so it is the one in which a thread finds all its operands in words that it loads
whole; :func:`permute` brings the tokens into it.

A matrix need not be whole tiles. Where the last contraction step reaches beyond the ends of its rows, the copies fill
in codes of 0, the tokens are 0, and scales are the row's own last ones: what lies behind could decode to infinity,
whose product with 0 is NaN. A last tile of rows that would reach beyond the matrix starts earlier and computes some
rows again, to the same values.
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

from pallas_kernels.gpu import registers

# Values of a contraction step, two in a byte.
_STEP_BYTES = registers.ROW_BYTES
STEP = 2 * _STEP_BYTES
_STEP_SCALES = STEP // 32
# A width is a multiple of it: rows of codes begin at multiples of 16 bytes and rows of scales at even ones.
_WIDTH_MULTIPLE = 64
# A tile of codes is as wide as a swizzled row and needs no tiling transform, whose tiles would have to divide a width.
_CODES = (plgpu.SwizzleTransform(registers.ROW_BYTES),)
# Rows that a warpgroup's matrix instruction takes; a warpgroup has two such tiles, of two matrices or of one.
ROWS = registers.ROWS
# One persistent program for each multiprocessor; with another number of them the kernel is as right, but slower.
_PROGRAMS = 132
# Shared memory that a program may use for its pipeline; the rest is for barriers and alignment.
_SHARED_BYTES = 220 * 1024
# A decoded weight is 2^-32 times its value: one multiplication has to bring its scale and what unpacking leaves off.
# It is exact for scales in 2^-94 .. 2^33.
_EXPONENT = registers.E2M1_EXPONENT - 32
UNSCALE = 2.0**32


def permute(x: jax.Array) -> jax.Array:
    """``[..., width]`` in the order in which the kernel contracts; width is a multiple of ``STEP``.

    Thread c of four holds 64 consecutive values of a step, 8 words of 8 codes. A word is decoded into four pairs of
    codes (i, i + 4); a matrix instruction takes two pairs of each thread.
    """
    parts = x.reshape(*x.shape[:-1], -1, 4, 8, 2, 2, 2)  # step, thread, word, half of a pair, instruction, pair
    order = (0, 2, 4, 5, 1, 3)  # step, word, instruction, pair, thread, half of a pair
    lead = x.ndim - 1
    return parts.transpose(*range(lead), *(lead + axis for axis in order)).reshape(x.shape)


def padded(width: int) -> int:
    """Columns of the tokens that matrices ``[out, width]`` take: whole steps."""
    return pl.cdiv(width, STEP) * STEP


def groups(rows: int, out: int, fused: bool) -> int:
    """Warpgroups that multiply blocks of so many rows, each with 2·64 rows of weights: of two matrices if ``fused``."""
    # More of them decode faster, but their sums have to fit into registers. Tiles of these divide the matrix.
    more = (4, 3) if rows <= 16 else ()
    return next((count for count in more if out % (count * ROWS * (1 if fused else 2)) == 0), 2)


def supports(out: int, width: int, fused: bool) -> str | None:
    """Why matrices ``[out, width]`` cannot be multiplied; None if they can."""
    least = 2 * ROWS * (1 if fused else 2)
    if out < least:
        return f"{out} rows of an expert's matrix are fewer than {least}"
    if width % _WIDTH_MULTIPLE:
        return f"{width} columns of an expert's matrix are not a multiple of {_WIDTH_MULTIPLE}"
    return None


def grouped_product(x, expert, live, first, second, weights, *, limit: float | None, rows: int):
    """Multiplies blocks of rows with their experts' matrices.

    Args:
      x: ``[blocks · rows, padded(width)]`` bfloat16, permuted, with zeros in columns that the matrices do not have;
        rows that nobody needs may hold anything.
      expert: ``[blocks]`` int32.
      live: ``[1]`` int32; blocks from this one on are not computed.
      first: codes ``[experts, out, width/2]`` and scales ``[experts, out, width/32]``, uint8; see :func:`supports`.
      second: as ``first``: the up matrix; None: one plain product with ``first``.
      weights: ``[blocks · rows]`` float32 routing weights, None without ``second``.
      limit: clamp of the SwiGLU; None without ``second``.
      rows: of a block, 8 .. 128 and a multiple of 8 (static).

    Returns:
      ``[blocks · rows, padded(out)]`` bfloat16: silu(gate) · up · weight; with one matrix ``[blocks · rows, out]``: the
      product. What lies in blocks that are not live and in columns beyond ``out`` is undefined.
    """
    fused = second is not None
    (codes_a, scales_a), (codes_b, scales_b) = first, second if fused else first
    out, width = codes_a.shape[1], codes_a.shape[2] * 2
    count = groups(rows, out, fused)
    tile = ROWS * count  # rows of one of the two matrices, or of each half of the one
    tile_out = tile if fused else 2 * tile
    tiles, steps = pl.cdiv(out, tile_out), pl.cdiv(width, STEP)
    stages = min(_SHARED_BYTES // (2 * tile * _STEP_BYTES + rows * STEP * 2), 6)
    inputs = (x, expert, live, codes_a, codes_b, scales_a, scales_b)
    inputs += (weights,) if fused else ()

    def body(x_ref, expert_ref, live_ref, a_ref, b_ref, sa_ref, sb_ref, *refs):
        weights_ref, (out_ref, w_smem, x_smem, full, empty) = refs[0], refs[len(inputs) - 7 :]
        program = lax.axis_index("program")
        group = lax.axis_index("group")
        total = live_ref[0] * tiles
        mine = lax.div(jnp.maximum(total - program + _PROGRAMS - 1, 0), jnp.int32(_PROGRAMS))

        def place(index):
            at = program + index * _PROGRAMS
            block = lax.div(at, jnp.int32(tiles))
            return block, jnp.minimum(lax.rem(at, jnp.int32(tiles)) * tile_out, out - tile_out)

        @pl.when(group == count)
        def _copy():
            plgpu.set_max_registers(registers.COPY_REGISTERS, action="decrease")

            @pl.loop(0, mine)
            def _tile(index):
                block, row = place(index)
                chosen = expert_ref[block]

                @pl.loop(0, steps)
                def _step(step):
                    number = index * steps + step
                    slot = lax.rem(number, jnp.int32(stages))

                    @pl.when(number >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    codes = pl.ds(step * _STEP_BYTES, _STEP_BYTES)
                    for i, ref in enumerate((a_ref, b_ref)):
                        start = row if fused else row + i * tile
                        plgpu.copy_gmem_to_smem(
                            ref.at[chosen, pl.ds(start, tile), codes], w_smem.at[slot, i], full.at[slot]
                        )
                    plgpu.copy_gmem_to_smem(
                        x_ref.at[pl.ds(block * rows, rows), pl.ds(step * STEP, STEP)], x_smem.at[slot], full.at[slot]
                    )

        @pl.when(group < count)
        def _compute():
            plgpu.set_max_registers(registers.compute_registers(count), action="increase")

            def fetch(chosen, row, step):
                second_row = row if fused else row + tile
                return _fetch_scales(
                    sa_ref.at[chosen, pl.ds(row, tile)], sb_ref.at[chosen, pl.ds(second_row, tile)], step
                )

            def one_tile(index, carry):
                chosen, scales = carry
                block, row = place(index)
                next_block, next_row = place(jnp.minimum(index + 1, mine - 1))
                next_chosen = expert_ref[next_block]

                def accumulate(acc_a, acc_b):
                    def one_step(step, scales):
                        number = index * steps + step
                        slot = lax.rem(number, jnp.int32(stages))
                        last = step + 1 == steps
                        ahead = fetch(
                            jnp.where(last, next_chosen, chosen),
                            jnp.where(last, next_row, row),
                            jnp.where(last, 0, step + 1),
                        )
                        plgpu.barrier_wait(full.at[slot])
                        for half in range(2):
                            tokens = x_smem.at[slot, :, pl.ds(half * (STEP // 2), STEP // 2)].transpose((1, 0))
                            for i, acc in enumerate((acc_a, acc_b)):
                                plgpu.wgmma(acc, _decode(w_smem.at[slot, i], scales, i, half), tokens)
                                # One product runs while the next operand is decoded: registers hold two.
                                plgpu.wgmma_wait(1)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[slot])
                        return ahead

                    ahead = lax.fori_loop(0, steps, one_step, scales)
                    return acc_a[...], acc_b[...], ahead

                acc = plgpu.ACC((ROWS, rows), jnp.float32)
                a, b, ahead = pl.run_scoped(accumulate, acc, acc)
                # A product is returned in bfloat16, whatever follows it.
                a, b = ((value * UNSCALE).astype(jnp.bfloat16) for value in (a, b))
                here = out_ref.at[pl.ds(block * rows, rows), pl.ds(row, tile_out)]
                if fused:
                    gate = jnp.minimum(a.astype(jnp.float32), limit)
                    up = jnp.clip(b.astype(jnp.float32), -limit, limit)
                    weight = plgpu.load(
                        weights_ref.at[pl.ds(block * rows, rows)], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
                    )
                    inner = gate / (1 + jnp.exp(-gate)) * up * lax.broadcast_in_dim(weight, up.shape, [1])
                    registers.store_columns(inner.astype(jnp.bfloat16), here, 0, rows)
                else:
                    registers.store_columns(a, here, 0, rows)
                    registers.store_columns(b, here, tile, rows)
                return next_chosen, ahead

            @pl.when(mine > 0)
            def _():
                block, row = place(0)
                chosen = expert_ref[block]
                lax.fori_loop(0, mine, one_tile, (chosen, fetch(chosen, row, jnp.int32(0))))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x.shape[0], padded(out) if fused else out), jnp.bfloat16),
        grid=(_PROGRAMS,),
        grid_names=("program",),
        num_threads=count + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types=[
            plgpu.SMEM((stages, 2, tile, _STEP_BYTES), jnp.uint8, transforms=_CODES),
            plgpu.SMEM((stages, rows, STEP), jnp.bfloat16, transforms=registers.TOKENS),
            plgpu.Barrier(num_barriers=stages, num_arrivals=3),
            plgpu.Barrier(num_barriers=stages, num_arrivals=count),
        ],
    )
    return kernel(*inputs)


def _fetch_scales(first, second, step: jax.Array) -> jax.Array:
    """Loads a thread's scales of a step: for each matrix and each of its two rows two bytes; opaque to others."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=registers.flat(4)
    )
    def fetch(ctx, *refs_and_step):
        del ctx
        *refs, step = refs_and_step
        row, place = registers.thread()
        column = arith.muli(step.registers.item(), registers.i32(_STEP_SCALES))
        column = arith.addi(column, arith.muli(place, registers.i32(2)))
        # Each reference is a tile's whole rows.
        scales = ir.MemRefType(refs[0].type).shape[-1]
        if scales % _STEP_SCALES:
            column = arith.minsi(column, registers.i32(scales - 2))
        loaded = []
        for ref in refs:
            pointer, stride = mgpu.utils.memref_ptr(ref), registers.i32(registers.stride(ref))
            for below in (0, 8):
                at = arith.addi(arith.muli(arith.addi(row, registers.i32(below)), stride), column)
                both = llvm.load(ir.IntegerType.get_signless(16), registers.offset(pointer, at), alignment=2)
                loaded.append(arith.extui(ir.IntegerType.get_signless(32), both))
        return registers.flat_array(loaded)

    return fetch(first, second, step)


def _decode(codes, scales: jax.Array, matrix: int, half: int) -> jax.Array:
    """A group's operand of half a step, ``[64, 128]`` bfloat16, from its tile ``[rows of all groups, 128]`` uint8."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(_CODES), registers.flat_layout(4)),
        return_type=plgpu.ShapeDtypeStruct((ROWS, STEP // 2), jnp.bfloat16, plgpu.Layout.WGMMA),
    )
    def decode(ctx, codes, scales):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        first, place = registers.thread()
        chunk = arith.addi(arith.muli(place, registers.i32(2)), registers.i32(half))
        pairs = {}
        for below in range(2):
            byte = arith.shrui(registers.element(scales.registers[2 * matrix + below]), registers.i32(8 * half))
            exponent = arith.addi(arith.andi(byte, registers.i32(255)), registers.i32(_EXPONENT))
            factor = arith.muli(exponent, registers.i32((1 << 7) | (1 << 23)))
            row = arith.addi(first, registers.i32(8 * below))
            for i, word in enumerate(registers.four_words(codes, row, chunk)):
                four = mgpu.utils.inline_ptx(
                    registers.UNPACK_E2M1, word, factor, result_types=(i32,) * 4, has_side_effects=False
                )
                pairs |= {(4 * i + j, below): pair for j, pair in enumerate(four)}
        return registers.operand(pairs, STEP // 2)

    return decode(codes, scales)
