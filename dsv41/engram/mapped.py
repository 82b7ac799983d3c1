"""The Engram table that stays in the checkpoint's file: mapped into memory, read by rows, never as a whole."""

from __future__ import annotations

import math
import mmap

import jax
import numpy as np

from dsv41.checkpoint.safetensors_io import NUMPY_DTYPES, StoredTensor
from dsv41.engram.tables import bytes_of_row, check_ids
from pallas_kernels.formats import Packed

Placement = jax.Device | jax.sharding.Sharding


class MappedTable:
    """A table in a file. Addresses are 64-bit throughout: a table's bytes exceed 2³² many times over.

    Args:
      weight: the rows, ``[rows, width]``: "F8_E4M3" with scales, or plain floats.
      scale: their scales, "F8_E8M0" ``[rows, width / block]``; None without.
      placement: the device or devices that receive the rows.
    """

    def __init__(self, weight: StoredTensor, scale: StoredTensor | None, placement: Placement) -> None:
        self._payload = _Rows(weight)
        self._scales = None if scale is None else _Rows(scale)
        arrays = Packed(self._payload.array, None if self._scales is None else self._scales.array)
        self.rows, self.row_bytes = weight.shape[0], bytes_of_row(arrays)
        self._placement = placement

    def lookup(self, ids: np.ndarray) -> Packed:
        """See :meth:`~dsv41.engram.tables.EngramTable.lookup`; returns when the rows are read and on their way."""
        check_ids(ids, self.rows)
        parts = [part for part in (self._payload, self._scales) if part is not None]
        for part in parts:
            part.will_need(ids)
        # Fresh arrays for every call: the device may still be reading, or on a CPU be using, those of the last one.
        found = jax.device_put([part.take(ids) for part in parts], self._placement)
        return Packed(found[0], found[1] if len(found) > 1 else None)


class _Rows:
    """One mapped tensor ``[rows, width']``."""

    def __init__(self, tensor: StoredTensor) -> None:
        with tensor.file.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            # Rows lie at hashed places: the neighbours that the system would read along are never wanted.
            self._map.madvise(mmap.MADV_RANDOM)
        # 8-bit floats are bytes here; only the model decodes them.
        dtype = np.dtype(np.uint8) if tensor.dtype == "F8_E4M3" else NUMPY_DTYPES[tensor.dtype]
        flat = np.frombuffer(self._map, dtype, math.prod(tensor.shape), tensor.offset)
        self.array = flat.reshape(tensor.shape)
        self._offset, self._row_bytes = tensor.offset, self.array.shape[1] * dtype.itemsize

    def will_need(self, ids: np.ndarray) -> None:
        """Asks for all pages at once, so that the disk works on many; :meth:`take` would fault on one by one."""
        if not hasattr(mmap, "MADV_WILLNEED"):
            return
        first = self._offset + ids.reshape(-1).astype(np.int64) * self._row_bytes
        pages = np.unique(np.concatenate([first, first + self._row_bytes - 1]) // mmap.PAGESIZE)
        for page in pages.tolist():
            self._map.madvise(mmap.MADV_WILLNEED, page * mmap.PAGESIZE, mmap.PAGESIZE)

    def take(self, ids: np.ndarray) -> np.ndarray:
        """A copy of rows, ``[..., width']``."""
        return self.array[ids.astype(np.int64)]
