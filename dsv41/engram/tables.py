"""Engram's tables as things of their own: one interface, whichever memory holds the rows.

| table | rows lie in | a look-up |
| --- | --- | --- |
| :class:`DeviceTable` | one device's memory | a gather there |
| :class:`ShardedTable` | the devices of a mesh axis, by rows | each device gathers its own rows; a sum joins them |
| :class:`PinnedTable` | pinned host memory | a gather on the host, its result sent to the device |
| :class:`~dsv41.engram.mapped.MappedTable` | the checkpoint's file | the rows' pages read, their bytes sent |

Rows are kept as the checkpoint stores them: FP8 bytes with E8M0 scales, or plain floats without; never decoded here.
"""

from __future__ import annotations

import functools
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import compute_on as _compute_on
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from pallas_kernels.formats import Packed

PINNED = "pinned_host"
"""JAX's name of the memory that a device reads without help of the host's processor."""

# 0.11 gives the older release's compute_on2 the plain name.
_run_on = getattr(_compute_on, "compute_on2", None) or _compute_on.compute_on


class EngramTable(Protocol):
    """The table of one Engram layer.

    Attributes:
      rows: rows that the table has.
      row_bytes: bytes of one row, scales included.
    """

    rows: int
    row_bytes: int

    def lookup(self, ids: np.ndarray) -> Packed:
        """The rows of ids, int32 ``[...]``: leaves ``[..., width']`` on the device; may be called from any thread.

        Raises:
          IndexError: an id that is no row of the table.
        """
        ...


def check_ids(ids: np.ndarray, rows: int) -> None:
    """Refuses ids that are no rows: on a device they would be clamped or wrapped in silence.

    Raises:
      IndexError: names the first such id, and the rows that there are.
    """
    outside = (ids < 0) | (ids >= rows)
    if outside.any():
        raise IndexError(f"Engram row {int(ids[outside][0])} of a table of {rows} rows")


def bytes_of_row(table: Packed) -> int:
    """Bytes of one row of leaves ``[rows, width']``."""
    return sum(leaf.shape[1] * leaf.dtype.itemsize for leaf in table if leaf is not None)


class DeviceTable:
    """A table in the memory of one device.

    Args:
      table: leaves ``[rows, width']``, committed to the device.
    """

    def __init__(self, table: Packed) -> None:
        self.rows, self.row_bytes = table.payload.shape[0], bytes_of_row(table)
        self._table = table

    def lookup(self, ids: np.ndarray) -> Packed:
        """See :meth:`EngramTable.lookup`; a gather in the device's queue, so the call returns at once."""
        check_ids(ids, self.rows)
        return _gather(self._table, jax.device_put(ids.astype(np.int32), self._table.payload.sharding))


@jax.jit
def _gather(table: Packed, ids: jax.Array) -> Packed:
    return table.map(lambda leaf: leaf.at[ids].get(mode="promise_in_bounds"))


class ShardedTable:
    """A table whose rows are spread over a mesh axis. The result lies on every device of the mesh.

    Args:
      table: leaves ``[padded rows, width']``, sharded over ``axis``; rows from ``rows`` on are padding, up to a
        multiple of the axis.
      rows: rows of the table itself.
    """

    def __init__(self, table: Packed, rows: int, mesh: Mesh, axis: str) -> None:
        self.rows, self.row_bytes = rows, bytes_of_row(table)
        self._table, self._everywhere = table, NamedSharding(mesh, PartitionSpec())
        split = PartitionSpec(axis)
        in_specs = (table.map(lambda _: split), PartitionSpec())
        out_specs = table.map(lambda _: PartitionSpec())
        own = functools.partial(_own_rows, axis=axis)
        self._lookup = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

    def lookup(self, ids: np.ndarray) -> Packed:
        """See :meth:`EngramTable.lookup`; only rows travel between the devices."""
        check_ids(ids, self.rows)
        return self._lookup(self._table, jax.device_put(ids.astype(np.int32), self._everywhere))


def _own_rows(table: Packed, ids: jax.Array, axis: str) -> Packed:
    """The rows of all devices from each one's share ``[rows of a device, width']``."""
    share = table.payload.shape[0]
    local = ids - lax.axis_index(axis) * share
    own = (local >= 0) & (local < share)

    def join(leaf: jax.Array) -> jax.Array:
        rows = leaf.at[jnp.where(own, local, 0)].get(mode="promise_in_bounds")
        # Summed as integers, of which all but one are zero: a sum of floats would lose −0 and the bits of NaN.
        bits = rows if rows.dtype == jnp.uint8 else lax.bitcast_convert_type(rows, f"uint{8 * rows.dtype.itemsize}")
        joined = lax.psum(jnp.where(own[..., None], bits, 0), axis)
        return joined if rows.dtype == jnp.uint8 else lax.bitcast_convert_type(joined, rows.dtype)

    return table.map(join)


class PinnedTable:
    """A table in the pinned host memory of one device.

    Args:
      table: leaves ``[rows, width']`` in that memory (see :func:`pinned_memory`).
      device: receives the rows.
    """

    def __init__(self, table: Packed, device: jax.Device) -> None:
        self.rows, self.row_bytes = table.payload.shape[0], bytes_of_row(table)
        self._table, self._ids = table, pinned_memory(device)
        self._lookup = jax.jit(_gather_on_host, out_shardings=SingleDeviceSharding(device))

    def lookup(self, ids: np.ndarray) -> Packed:
        """See :meth:`EngramTable.lookup`; only the rows travel to the device."""
        check_ids(ids, self.rows)
        return self._lookup(self._table, jax.device_put(ids.astype(np.int32), self._ids))


def pinned_memory(device: jax.Device) -> SingleDeviceSharding:
    """The pinned host memory of a device, as a sharding.

    Raises:
      ValueError: the back end has no such memory.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if PINNED not in kinds:
        raise ValueError(f"back end {device.platform!r} has no {PINNED!r} memory, only {kinds}")
    return SingleDeviceSharding(device, memory_kind=PINNED)


def _gather_on_host(table: Packed, ids: jax.Array) -> Packed:
    # The plain primitive: indexing would bring in constants, which lie in device memory and cannot meet the table.
    dimensions = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))

    def rows(leaf: jax.Array, flat: jax.Array) -> jax.Array:
        mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return lax.gather(leaf, flat[:, None], dimensions, (1, leaf.shape[1]), mode=mode)

    gather = _run_on(
        lambda table, flat: table.map(lambda leaf: rows(leaf, flat)),
        compute_type="device_host",
        out_memory_spaces=jax.memory.Space.Host,
    )
    found = jax.device_put(gather(table, ids.reshape(-1)), jax.memory.Space.Device)
    return found.map(lambda leaf: leaf.reshape(*ids.shape, leaf.shape[-1]))
