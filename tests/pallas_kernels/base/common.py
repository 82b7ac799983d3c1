"""What the operations' tests share: calling a back end, pools with poisoned rests, the reference's data."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import backend
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
        """Traces and runs the operation anew, so that settings of this moment hold."""
        function = backend.implementation(operation, self.backend)
        return jax.jit(lambda arrays: function(**arrays, **static))(arrays)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _compiled(function: Callable, arrays: dict, static: tuple):
    return function(**arrays, **dict(static))


def compiled(function: Callable, arrays: dict, **static):
    """A reference, compiled once for each set of shapes."""
    return _compiled(function, arrays, tuple(static.items()))


@functools.cache
def golden() -> dict[str, np.ndarray]:
    """The reference's unit data by name."""
    return read_safetensors(pathlib.Path(__file__).parents[2] / "data/ops/ops.safetensors")


def poison(packed: Packed, rng: np.random.Generator) -> Packed:
    """NaN wherever the format can hold one, random codes elsewhere."""

    def fill(leaf: jax.Array, is_scale: bool) -> jax.Array:
        if leaf.dtype != jnp.uint8:
            return jnp.full(leaf.shape, jnp.nan, leaf.dtype)
        # As a scale 255 decodes to infinity: with a zero code that is NaN.
        return jnp.full(leaf.shape, 255, jnp.uint8) if is_scale else jnp.asarray(rng.integers(0, 256, leaf.shape), "u1")

    return Packed(fill(packed.payload, False), None if packed.scales is None else fill(packed.scales, True))


def paged(
    rng: np.random.Generator, fmt: Format, values: np.ndarray, lengths: list[int], page_entries: int, spare: int = 2
) -> tuple[Packed, jax.Array]:
    """A pool that holds the first ``lengths`` of ``values`` ``[batch, capacity, width]``, and its page table.

    Pages are shuffled; everything that no request uses is poisoned, and the table's unused slots are stray.
    """
    batch, capacity, width = values.shape
    table_pages = -(-capacity // page_entries)
    used = [-(-length // page_entries) for length in lengths]
    order = rng.permutation(sum(used) + spare)
    table = np.resize(np.array(STRAY_PAGES, np.int32), (batch, table_pages))
    first = 0
    for b, count in enumerate(used):
        table[b, :count] = order[first : first + count]
        first += count
    pool = poison(fmt.zeros((len(order), page_entries), width), rng)
    start, count = jnp.zeros(batch, jnp.int32), jnp.asarray(lengths, jnp.int32)
    pool = paged_reference.append(pool, fmt, jnp.asarray(table), start, count, jnp.asarray(values))
    return pool, jnp.asarray(table)


def same_bytes(a: Packed, b: Packed) -> None:
    """Equal to the bit, NaN included."""
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left).view(np.uint8), np.asarray(right).view(np.uint8))
