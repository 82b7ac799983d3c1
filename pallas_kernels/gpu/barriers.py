"""Barriers in shared memory among the warpgroups of a block, one arrival a warp: for Mosaic GPU kernels (PTX).

With Pallas's own every thread arrives: 128 updates of one word after each other, each time a tile is handed on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

_WARPS = 4  # of a warpgroup
_SCALAR = plgpu.Layout.WG_STRIDED((128,), 1)  # a number in every thread's register


def scratch(count: int):
    """Shared memory of so many barriers."""
    return plgpu.SMEM((count, 2), jnp.int32)


def initialise(barriers, arrivals: int) -> None:
    """One thread of the block sets barriers ``[n, 2]`` up; the others must be synchronised with it before use.

    Args:
      barriers: reference of :func:`scratch`.
      arrivals: warpgroups that arrive at each (static).
    """
    count = barriers.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def start(ctx, barriers):
        del ctx
        lines = ["mov.u32 x, %tid.x;", "setp.eq.u32 is, x, 0;"]
        lines += [f"@is mbarrier.init.shared::cta.b64 [$0 + {8 * i}], {_WARPS * arrivals};" for i in range(count)]
        _inline(lines, _address(barriers))

    start(barriers)


def arrive(barrier, *, with_tile: bool = False) -> None:
    """A warpgroup's arrival; what its threads wrote before is seen by those that wait.

    Args:
      barrier: reference to one barrier, ``[2]``.
      with_tile: matrix units read what was written (static).
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def tell(ctx, barrier):
        del ctx
        lines = [
            *(["fence.proxy.async.shared::cta;"] if with_tile else []),
            "mov.u32 x, %tid.x;",
            "and.b32 x, x, 31;",
            "setp.eq.u32 is, x, 0;",
            "bar.warp.sync 0xffffffff;",
            "@is mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];",
        ]
        _inline(lines, _address(barrier))

    tell(barrier)


def wait(barrier, use: jax.Array, *, first_free: bool = False) -> None:
    """Waits for the arrivals.

    Args:
      barrier: reference to one barrier, ``[2]``.
      use: int32, how often it was waited for before.
      first_free: the first time there is nothing to wait for; then ``use`` counts it too.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
    def hold(ctx, barrier, use):
        del ctx
        register = use.registers.flat[0]
        lines = [
            "and.b32 x, $1, 1;",
            *(["xor.b32 x, x, 1;"] if first_free else []),
            "WAITING:",
            "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 is, [$0], x;",
            "@!is bra WAITING;",
        ]
        _inline(lines, _address(barrier), llvm.bitcast(ir.IntegerType.get_signless(32), register))

    hold(barrier, plgpu.layout_cast(jnp.full(128, use, jnp.int32), _SCALAR))


def _inline(lines: list[str], *operands: ir.Value) -> None:
    mgpu.utils.inline_ptx("\n".join(["{", ".reg .pred is; .reg .b32 x;", *lines, "}"]), *operands)


def _address(ref) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))
