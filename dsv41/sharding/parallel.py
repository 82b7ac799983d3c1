"""What a module inside a sharded step knows of the mesh: sizes of its own part, and the collectives that join parts.

Steps run as one program a device (``jax.shard_map``), since the kernels cannot be divided by a compiler. A module
asks by *logical* axis; the rule table says which mesh axes that means. Where none of them is larger than 1, as on one
device, every method returns its argument: there is one implementation of a layer, not one for each kind of machine.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dsv41.sharding.rules import DEFAULT_RULES, part_shape, partition

# Rows of a table that a device holds at once for all that ask.
_ROWS_BYTES = 2**26


@dataclasses.dataclass(frozen=True)
class Parallel:
    """The axes and rules of a mesh, hashable.

    Attributes:
      axes: sizes of mesh axes; those that are missing have size 1.
      rules: mesh axes of each logical axis, outermost first.
      mesh: the devices; None where only sizes matter.
      dispatch: how rows reach their experts, one of :data:`~dsv41.sharding.rules.DISPATCHES`.
    """

    axes: tuple[tuple[str, int], ...] = ()
    rules: tuple[tuple[str, tuple[str, ...]], ...] = tuple(DEFAULT_RULES.items())
    mesh: Mesh | None = None
    dispatch: str = "auto"

    @classmethod
    def of(
        cls,
        axes: Mapping[str, int],
        rules: Mapping[str, tuple[str, ...]],
        mesh: Mesh | None = None,
        dispatch: str = "auto",
    ) -> Parallel:
        """From mappings."""
        return cls(tuple(axes.items()), tuple(rules.items()), mesh, dispatch)

    def places(self, logical: str) -> tuple[str, ...]:
        """The mesh axes, larger than 1, that a logical axis is divided over."""
        sizes = dict(self.axes)
        return tuple(axis for axis in dict(self.rules)[logical] if sizes.get(axis, 1) > 1)

    def divided(self, places: str | Sequence[str] | None) -> int:
        """Into how many parts these mesh axes divide."""
        sizes = dict(self.axes)
        return math.prod(sizes.get(axis, 1) for axis in ((places,) if isinstance(places, str) else places or ()))

    def parts(self, logical: str) -> int:
        """Into how many parts a logical axis is divided."""
        return self.divided(self.places(logical))

    def part(self, logical: str, size: int) -> int:
        """Size of one part of an axis of this whole size, which the parts divide."""
        return size // self.parts(logical)

    def spec(self, *logical: str | None) -> PartitionSpec:
        """The partition of an array with these leading logical axes."""
        return PartitionSpec(*(name and (self.places(name) or None) for name in logical))

    def partition(self, what: str, logical: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
        """See :func:`~dsv41.sharding.rules.partition`."""
        return partition(what, logical, shape, dict(self.axes), dict(self.rules))

    def shape(self, what: str, logical: Sequence[str | None], shape: Sequence[int]) -> tuple[int, ...]:
        """One device's part of an array, rounded up; arguments and errors as of :meth:`partition`."""
        return part_shape(shape, self.partition(what, logical, shape), dict(self.axes))

    def index(self, logical: str) -> jax.Array:
        """Which part this device has, int32."""
        places = self.places(logical)
        return lax.axis_index(places) if places else jnp.int32(0)

    def sum(self, x: jax.Array, logical: str) -> jax.Array:
        """The sum over the parts of a logical axis, on each of them."""
        places = self.places(logical)
        return lax.psum(x, places) if places else x

    def rows(self, table: jax.Array, ids: jax.Array, logical: str, spread: Sequence[str] = ()) -> jax.Array:
        """Rows of a table that is divided along its first axis, to the bit.

        Args:
          table: this device's part ``[rows of a part, ...]``.
          ids: int32 ``[batch, ...]``, rows of the whole table; many are looked up in turns, by their second axis.
          logical: the axis that the table's rows are divided over.
          spread: mesh axes along which ids differ; along others every device asks for the same rows.
        """
        places = self.places(logical)
        if not places:
            return table[ids]
        # Along axes that do not divide the table, every device has what it asks for.
        spread = tuple(axis for axis in spread if axis in places)
        found = ids.size * self.divided(spread) * math.prod(table.shape[1:]) * table.dtype.itemsize
        queries = ids.shape[1] if ids.ndim > 1 else 1
        tiles = next((n for n in range(1, queries) if queries % n == 0 and found <= n * _ROWS_BYTES), queries)
        if tiles == 1:
            return self._rows(table, ids, logical, spread)
        # Every device finds the rows of all for a while: not of a whole chunk at once.
        some = ids.reshape(ids.shape[0], tiles, -1, *ids.shape[2:])
        rows = lax.map(lambda part: self._rows(table, part, logical, spread), jnp.moveaxis(some, 1, 0))
        return jnp.moveaxis(rows, 0, 1).reshape(*ids.shape, *table.shape[1:])

    def _rows(self, table: jax.Array, ids: jax.Array, logical: str, spread: tuple[str, ...]) -> jax.Array:
        asked = lax.all_gather(ids, spread, axis=0, tiled=True) if spread else ids
        local = asked - self.index(logical) * table.shape[0]
        own = (local >= 0) & (local < table.shape[0])
        found = table[jnp.where(own, local, 0)]
        rest = tuple(axis for axis in self.places(logical) if axis not in spread)
        return _sum_rows(spread, rest, found, jnp.expand_dims(own, tuple(range(own.ndim, found.ndim))))

    def gather(self, x: jax.Array, logical: str, axis: int) -> jax.Array:
        """The parts of an array along ``axis``, joined in order, on each of them."""
        places = self.places(logical)
        return lax.all_gather(x, places, axis=axis % x.ndim, tiled=True) if places else x


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _sum_rows(scattered: tuple[str, ...], rest: tuple[str, ...], found: jax.Array, own: jax.Array) -> jax.Array:
    """Rows ``[batch, ...]`` of which each device has its own, joined to the bit; in parts along ``scattered``.

    Summed as integers, of which all but one are zero: a sum of floats would lose −0 and the bits of NaN. The derivative
    is that of the sum of floats.
    """
    bits = found if found.dtype == jnp.uint8 else lax.bitcast_convert_type(found, _unsigned(found.dtype))
    bits = _over(scattered, rest, jnp.where(own, bits, 0))
    return bits if found.dtype == jnp.uint8 else lax.bitcast_convert_type(bits, found.dtype)


@_sum_rows.defjvp
def _sum_rows_jvp(scattered, rest, primals, tangents):
    found, own = primals
    out = _sum_rows(scattered, rest, found, own)
    if tangents[0].dtype == jax.dtypes.float0:
        return out, np.zeros(out.shape, jax.dtypes.float0)
    return out, _over(scattered, rest, jnp.where(own, tangents[0], 0))


def _over(scattered: tuple[str, ...], rest: tuple[str, ...], x: jax.Array) -> jax.Array:
    if scattered:
        x = lax.psum_scatter(x, scattered, scatter_dimension=0, tiled=True)
    return lax.psum(x, rest) if rest else x


def _unsigned(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


SINGLE = Parallel()
"""One device."""
