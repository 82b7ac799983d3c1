"""One shape of one operation to be timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape that the model meets, and what running it must cost.

    Attributes:
      operation: a name of :data:`pallas_kernels.backend.OPERATIONS`.
      name: the shape in words.
      arrays: fresh random arrays of the shape; the harness makes several sets so that no cache holds them all.
      call: the public function on one set; jitted by the harness.
      operations: floating-point operations of the matrix products that must be done.
      bytes: bytes that must move: every input that is needed read once, every output written once.
      error: largest error of an output against a reference in higher precision, on a sample of it, over the
        output's scale; for selections the share of wrong picks.
      torch: PyTorch's way of doing the same on the same arrays, as a user without a kernel of his own would: a function
        to be timed, with tensors where ``call`` returns arrays. What it unpacks before is not timed. None: there is no
        fair one.
      torch_note: what PyTorch's way is spared or does otherwise; the same for all cases of an operation.
      native: the hand-written kernel must run; False if XLA is what the platform is meant to take here.
      feed: where the function updates an argument in place: a set's next arguments from the set and its last result,
        ``lambda arrays, out: arrays | {"pool": out}``; what is fed is then not copied, as with donation.
      note: target, and where it is missed the reason and the next idea.
    """

    operation: str
    name: str
    arrays: Callable[[np.random.Generator], dict[str, Any]]
    call: Callable[[dict[str, Any]], Any]
    operations: float
    bytes: float
    error: Callable[[dict[str, Any], Any], float]
    torch: Callable[[dict[str, Any]], Callable[[], Any]] | None = None
    torch_note: str = ""
    native: bool = True
    feed: Callable[[dict[str, Any], Any], dict[str, Any]] | None = None
    note: str = ""


def output_bytes(tree: Any) -> int:
    """Bytes of all arrays (or their shapes) in a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
