"""Atomic additions without ordering, for Pallas-Triton kernels.

Pallas' own atomics are acquire-release: each waits for all memory traffic before it. A sum that only later kernels read
needs no order, and the sparse attention's gradients are twice as fast without (5 ms instead of 12 on an H200). There is
no public way to ask for it, so this primitive is lowered with JAX's internal functions; where those are not as
expected, the public operation takes its place.
"""

from __future__ import annotations

import jax
from jax.experimental.pallas import triton as plgpu

try:
    from jax._src import core, tree_util
    from jax._src.lib.triton import dialect
    from jax._src.pallas.triton import lowering, primitives
    from jax._src.state import primitives as state_primitives

    _add_p = core.Primitive("relaxed_atomic_add")

    @_add_p.def_effectful_abstract_eval
    def _abstract_eval(*avals, args_tree):
        return primitives._atomic_abstract_eval(*avals, args_tree=args_tree, atomic_type=primitives.AtomicOpType.ADD)

    @lowering.register_lowering(_add_p)
    def _lowering(ctx, *args, args_tree):
        pointer, indexers, values, mask = args_tree.unflatten(args)
        *_, values_aval, mask_aval = args_tree.unflatten(ctx.avals_in)
        (indexer,) = indexers
        return lowering._atomic_rmw(
            dialect.RMWOp.FADD,
            lowering._compute_pointers_from_indices(pointer, ctx.block_infos[0], indexer),
            lowering._ensure_ir_value(values, values_aval),
            mask=lowering._ensure_ir_value(mask, mask_aval),
            semantic=dialect.MemSemantic.RELAXED,
        )

    _internal = True
except (ImportError, AttributeError):
    _internal = False


def relaxed_add(ref, index: tuple, values: jax.Array, mask: jax.Array) -> None:
    """``ref[index] += values`` where ``mask`` (of the values' shape) is True, in no particular order.

    Args:
      ref: float32.
      index: arrays that broadcast to the values' shape.
    """
    if not _internal:
        plgpu.atomic_add(ref, index, values, mask=mask)
        return
    ref, transforms = state_primitives.get_ref_and_transforms(ref, index, "relaxed_add")
    args, args_tree = tree_util.tree_flatten((ref, transforms, values, mask))
    _add_p.bind(*args, args_tree=args_tree)
