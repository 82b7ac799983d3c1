"""What the operations' tests share: calling a back end, pools with poisoned rests, the reference's data."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import backend, tiling
from pallas_kernels.formats import Format, Packed
from pallas_kernels.paged_memory import reference as paged_reference
from tests.safetensors_reader import read_safetensors

# What the unallocated slots of a page table may hold; 0 and 1 are pages that others use.
STRAY_PAGES = (-1, 0, 10**6, 1, -(2**31), 2**31 - 1, -7)


class OperationTests:
    """Base of the classes below.

    Attributes:
      backend: name of the back end under test.
      supports_gradient: whether the operation can be differentiated there.
    """

    backend: str
    supports_gradient = True

    def run(self, operation: str, arrays: dict, **static):
        """Runs the operation, compiled once for each set of shapes, static arguments and memory budget."""
        function = backend.implementation(operation, self.backend)
        return _compiled(function, arrays, tuple(static.items()), tiling.TEMPORARY_BYTES)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _compiled(function: Callable, arrays: dict, static: tuple, budget: int):
    return function(**arrays, **dict(static))


def compiled(function: Callable, arrays: dict, **static):
    """A reference, compiled once for each set of shapes and static arguments."""
    return _compiled(function, arrays, tuple(static.items()), 0)


@functools.cache
def golden() -> dict[str, np.ndarray]:
    """The reference's unit data by name."""
    return read_safetensors(pathlib.Path(__file__).parents[2] / "data/ops/ops.safetensors")


def poisoned(fmt: Format, shape: tuple[int, ...], width: int, rng: np.random.Generator) -> Packed:
    """An encoded array of shape ``[*shape, width]``: NaN wherever the format can hold one, else random codes."""
    empty = jax.eval_shape(lambda: fmt.zeros(shape, width))

    def fill(leaf: jax.ShapeDtypeStruct, is_scale: bool) -> np.ndarray:
        if leaf.dtype != jnp.uint8:
            return np.full(leaf.shape, np.nan, leaf.dtype)
        # As a power of two 255 decodes to infinity: with a zero code that is NaN.
        return np.full(leaf.shape, 255, np.uint8) if is_scale else rng.integers(0, 256, leaf.shape, np.uint8)

    return Packed(fill(empty.payload, False), None if empty.scales is None else fill(empty.scales, True))


def paged(
    rng: np.random.Generator, fmt: Format, values: np.ndarray, lengths: list[int], page_entries: int, spare: int = 2
) -> tuple[Packed, jax.Array]:
    """A pool that holds the first ``lengths`` of ``values`` ``[batch, capacity, width]``, and its page table.

    Pages are shuffled; everything that no request uses is poisoned, and the table's unused slots are stray. The pool's
    size does not depend on the lengths, so that cases of other lengths need no other programs.
    """
    batch, capacity, width = values.shape
    table_pages = -(-capacity // page_entries)
    used = [-(-length // page_entries) for length in lengths]
    order = rng.permutation(batch * table_pages + spare)
    table = np.resize(np.array(STRAY_PAGES, np.int32), (batch, table_pages))
    first = 0
    for b, count in enumerate(used):
        table[b, :count] = order[first : first + count]
        first += count
    pool = poisoned(fmt, (len(order), page_entries), width, rng)
    start, count = np.zeros(batch, np.int32), np.asarray(lengths, np.int32)
    pool = paged_reference.append(pool, fmt, table, start, count, jnp.asarray(values))
    return pool, jnp.asarray(table)


def same_bytes(a: Packed, b: Packed) -> None:
    """Equal to the bit, NaN included."""
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left).view(np.uint8), np.asarray(right).view(np.uint8))
