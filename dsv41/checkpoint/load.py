"""From a tensor source to arrays in place: by slices, straight to the devices that hold them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv41.checkpoint.decode import decode_rows
from dsv41.checkpoint.layout import STORAGE_BYTES, TensorSpec, quantized_layout
from dsv41.checkpoint.placement import ParameterTree, Path, Place, flatten_tree, parameter_place, unflatten_tree
from dsv41.checkpoint.safetensors_io import NUMPY_DTYPES, CheckpointError, TensorSource
from dsv41.config import ModelConfig

SLICE_BYTES = 256 * 2**20
_SHOWN_PROBLEMS = 20
_FLOATS = ("F32", "BF16")


@dataclasses.dataclass(frozen=True)
class LoadProgress:
    """State of a load, handed to the caller's callback after each slice.

    Attributes:
      tensors: source tensors finished.
      total_tensors: source tensors that the target needs.
      bytes_read: bytes read from the source so far.
      peak_host_bytes: most bytes of host memory held for one slice so far, conversions included.
    """

    tensors: int
    total_tensors: int
    bytes_read: int
    peak_host_bytes: int


@dataclasses.dataclass(frozen=True)
class _Part:
    """One source tensor of a leaf. ``decoded``: it is multiplied out with its scales on the way."""

    spec: TensorSpec
    place: Place
    decoded: bool


def _describe(dtype: object, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


class _Checker:
    """Compares headers with the target and collects whatever does not fit."""

    def __init__(
        self, source: TensorSource, config: ModelConfig, target: ParameterTree, padded: Collection[Path]
    ) -> None:
        self.found, self.padded = source.specs(), padded
        self.layout = quantized_layout(config)
        self.places = {name: parameter_place(config, name) for name in self.layout}
        self.leaves = flatten_tree(target)
        self.problems: list[str] = []

    def parts(self) -> dict[Path, list[_Part]]:
        """The source tensors of every leaf of the target.

        Raises:
          CheckpointError: lists what does not fit, up to a number of problems, and their count.
        """
        parts: dict[Path, list[_Part]] = {path: [] for path in self.leaves}
        present = {path[0] for path in self.leaves}
        for name in self.found:
            if name not in self.layout:
                self.problems.append(f"unexpected: {name}: not a tensor of this configuration")
        for name, spec in self.layout.items():
            place = self.places[name]
            if place.path[0] not in present:
                continue
            if place.path not in self.leaves:
                # A scale has no place of its own where the target wants its matrix decoded.
                weight = self.found.get(name.removesuffix("scale") + "weight", ("", ()))[0]
                decoded = spec.dtype == "F8_E8M0" and (*place.path[:-1], "weight") in self.leaves
                if name in self.found and not decoded:
                    self.problems.append(f"unexpected: {name}: the target has no {'/'.join(place.path)}")
                elif name in self.found and weight in _FLOATS:
                    self.problems.append(f"unexpected: {name}: scales beside a weight stored as {weight}")
                continue
            decoded = self._check(spec, place)
            parts[place.path].append(_Part(spec, place, decoded))
        for path, leaf in self.leaves.items():
            if not parts[path]:
                self.problems.append(f"unexpected: {'/'.join(path)}: no tensor of this configuration belongs there")
                continue
            self._check_leaf_shape(path, leaf.shape, parts[path][0])
        if self.problems:
            shown = "\n  ".join(self.problems[:_SHOWN_PROBLEMS])
            more = len(self.problems) - _SHOWN_PROBLEMS
            tail = f"\n  … and {more} more" if more > 0 else ""
            raise CheckpointError(f"{len(self.problems)} problem(s) with the checkpoint:\n  {shown}{tail}")
        return parts

    def _check_leaf_shape(self, path: Path, shape: tuple[int, ...], part: _Part) -> None:
        spec, place = part.spec, part.place
        wanted = (*place.stack, *(spec.shape if self._keeps_codes(place.path) else spec.value_shape))
        if path in self.padded and len(shape) == len(wanted):
            axis = len(place.stack)
            wanted = (*wanted[:axis], max(wanted[axis], shape[axis]), *wanted[axis + 1 :])
        if tuple(shape) != wanted:
            self.problems.append(f"shape: {'/'.join(path)}: target {list(shape)}, configuration {list(wanted)}")

    def _keeps_codes(self, path: Path) -> bool:
        return path[-1] == "scale" or (*path[:-1], "scale") in self.leaves

    def _check(self, spec: TensorSpec, place: Place) -> bool:
        """Checks one tensor against its leaf; returns whether it is decoded on the way."""
        name, leaf = spec.name, self.leaves[place.path]
        if name not in self.found:
            weight = name.removesuffix("scale") + "weight"
            stored = self.found.get(weight, (None, ()))[0] if spec.dtype == "F8_E8M0" else None
            if stored in _FLOATS:
                self.problems.append(f"unscaled: {weight}: {stored} without {name}, the target wants codes and scales")
            else:
                self.problems.append(f"missing: {name}: {_describe(spec.dtype, spec.shape)}")
            return False
        dtype, shape = self.found[name]
        codes = dtype not in _FLOATS
        wanted_shape = spec.shape if codes else spec.value_shape
        if dtype != spec.dtype and (codes or (spec.dtype not in _FLOATS and spec.block is None)):
            self.problems.append(f"dtype: {name}: {dtype} in the source, {spec.dtype} in the layout")
            return False
        if shape != wanted_shape:
            self.problems.append(f"shape: {name}: {list(shape)} in the source, {list(wanted_shape)} in the layout")
            return False
        if self._keeps_codes(place.path):
            # Floats in the source: reported once, at the scale that is not there.
            if codes and leaf.dtype != NUMPY_DTYPES[dtype]:
                self.problems.append(f"dtype: {name}: {dtype} is held as {NUMPY_DTYPES[dtype]}, target {leaf.dtype}")
            return False
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.dtype(leaf.dtype).itemsize < 2:
            self.problems.append(f"dtype: {name}: target {leaf.dtype} without a scale is no float of 16 bits or more")
        if codes:
            self._check_scale(spec)
        return codes

    def _check_scale(self, spec: TensorSpec) -> None:
        assert spec.scale_name is not None
        scale = self.layout[spec.scale_name]
        found = self.found.get(scale.name)
        if found is None:
            self.problems.append(f"missing: {scale.name}: the scales of {spec.dtype} {spec.name}")
        elif found != (scale.dtype, scale.shape):
            self.problems.append(
                f"dtype or shape: {scale.name}: {_describe(*found)} in the source, "
                f"{_describe(scale.dtype, scale.shape)} in the layout"
            )


@functools.partial(jax.jit, donate_argnums=0)
def _update(buffer: jax.Array, piece: jax.Array, start: tuple[jax.Array, ...]) -> jax.Array:
    return lax.dynamic_update_slice(buffer, piece, start)


Box = tuple[tuple[int, int], ...]
"""First and last-plus-one index on each axis of a leaf."""


class _HostShard:
    """A device's share of a small leaf, or of one that stays in host memory, gathered on the host and sent once."""

    def __init__(self, memory: jax.sharding.SingleDeviceSharding, box: Box, dtype: np.dtype) -> None:
        self.memory, self.box = memory, box
        # Zeros: rows of a padded leaf that no tensor has stay as they are.
        self._array = np.zeros([stop - start for start, stop in box], dtype)

    def put(self, piece: np.ndarray, start: tuple[int, ...]) -> None:
        self._array[tuple(slice(a, a + n) for a, n in zip(start, piece.shape, strict=True))] = piece

    def finish(self) -> jax.Array:
        # Without the copy a CPU device would go on using this very memory.
        return jax.device_put(self._array, self.memory, may_alias=False)


class _DeviceShard:
    """A device's share of a large leaf: a buffer on the device into which slices are written in place."""

    def __init__(self, memory: jax.sharding.SingleDeviceSharding, box: Box, dtype: np.dtype) -> None:
        self.memory, self.box = memory, box
        self._buffer = jnp.zeros([stop - start for start, stop in box], dtype, device=memory)

    def put(self, piece: np.ndarray, start: tuple[int, ...]) -> None:
        on_device = jax.device_put(piece, self.memory)
        self._buffer = _update(self._buffer, on_device, tuple(np.int32(a) for a in start))
        # Transfers are asynchronous: without the wait many slices would be held on the host at once.
        self._buffer.block_until_ready()

    def finish(self) -> jax.Array:
        return self._buffer


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


class _Loader:
    def __init__(
        self,
        source: TensorSource,
        layout: dict[str, TensorSpec],
        slice_bytes: int,
        total_tensors: int,
        progress: Callable[[LoadProgress], None] | None,
    ) -> None:
        self.source, self.layout, self.found = source, layout, source.specs()
        self.slice_bytes, self.progress = slice_bytes, progress
        self.state = LoadProgress(0, total_tensors, 0, 0)

    def leaf(self, target: jax.ShapeDtypeStruct, parts: list[_Part]) -> jax.Array:
        sharding = target.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shape, dtype = tuple(target.shape), np.dtype(target.dtype)
        boxes = {
            device: _box(index, shape) for device, index in sharding.addressable_devices_indices_map(shape).items()
        }
        local = sum(math.prod(b - a for a, b in box) for box in boxes.values()) * dtype.itemsize
        # Half of the allowance for a leaf gathered on the host, half for the slice on its way into it.
        small = local <= self.slice_bytes // 2
        # Other memories of a device (pinned host memory) are no operands of a program: their leaves go there whole.
        elsewhere = any(sharding.memory_kind not in (None, device.default_memory().kind) for device in boxes)
        kind = _HostShard if small or elsewhere else _DeviceShard
        memory = functools.partial(jax.sharding.SingleDeviceSharding, memory_kind=sharding.memory_kind)
        shards = [kind(memory(device), box, dtype) for device, box in boxes.items()]
        held = local if kind is _HostShard else 0
        for part in parts:
            for rows in self._row_slices(part, shards, dtype, self.slice_bytes // (2 if small else 1)):
                self._copy(part, rows, shards, dtype, held)
            self._report(tensors=1)
        arrays = [shard.finish() for shard in shards]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)

    def _row_slices(
        self, part: _Part, shards: list[_HostShard] | list[_DeviceShard], dtype: np.dtype, allowance: int
    ) -> Iterator[tuple[int, int]]:
        """Row ranges of a tensor that cover what the local shards hold, each within the allowance."""
        axis = len(part.place.index)
        ranges = [shard.box[axis] for shard in shards if _holds(shard.box, part.place.index)]
        if not ranges:
            return
        stored, shape = self.found[part.spec.name]
        stored_row = math.prod(shape[1:]) * STORAGE_BYTES[stored]
        values = math.prod(part.spec.value_shape[1:] if part.decoded else shape[1:])
        # What is alive at once for a row: as read; float32 values and their steps; in the target's dtype; a column cut.
        row = stored_row + (5 * values if part.decoded else 0) + 2 * values * dtype.itemsize
        count = max(1, allowance // row)
        if part.spec.block is not None and count > part.spec.block[0]:
            count -= count % part.spec.block[0]
        # A padded leaf is longer than its tensor, and the last devices may hold padding only.
        first, last = min(a for a, _ in ranges), min(max(b for _, b in ranges), shape[0])
        for start in range(first, last, count):
            yield start, min(start + count, last)

    def _copy(
        self,
        part: _Part,
        rows: tuple[int, int],
        shards: list[_HostShard] | list[_DeviceShard],
        dtype: np.dtype,
        held: int,
    ) -> None:
        index = part.place.index
        axis = len(index)
        takers = []
        for shard in shards:
            low, high = max(rows[0], shard.box[axis][0]), min(rows[1], shard.box[axis][1])
            if _holds(shard.box, index) and low < high:
                takers.append((shard, low, high))
        if not takers:
            return
        first, last = min(low for _, low, _ in takers), max(high for _, _, high in takers)
        values, read_bytes, peak = self._read(part, slice(first, last), dtype)
        for shard, low, high in takers:
            box = shard.box
            cut = (slice(low - first, high - first), *(slice(a, b) for a, b in box[axis + 1 :]))
            piece = np.ascontiguousarray(values[cut])
            if not np.shares_memory(piece, values):
                peak = max(peak, values.nbytes + piece.nbytes)
            start = (*(i - a for i, (a, _) in zip(index, box, strict=False)), low - box[axis][0])
            start += (0,) * (len(box) - len(start))
            shard.put(piece.reshape((1,) * axis + piece.shape), start)
        self._report(read_bytes=read_bytes, peak=held + peak)

    def _read(self, part: _Part, rows: slice, dtype: np.dtype) -> tuple[np.ndarray, int, int]:
        """Rows in the leaf's dtype, the bytes read for them, and the most bytes held meanwhile."""
        spec = part.spec
        raw = self.source.read(spec.name, rows)
        if not part.decoded:
            values = raw.astype(dtype, copy=False)
            return values, raw.nbytes, raw.nbytes + (0 if values is raw else values.nbytes)
        assert spec.block is not None
        assert spec.scale_name is not None
        tall = spec.block[0]
        scales = self.source.read(spec.scale_name, slice(rows.start // tall, -(-rows.stop // tall)))
        decoded = decode_rows(spec, raw, scales, rows.start % tall)
        values = decoded.astype(dtype, copy=False)
        read = raw.nbytes + scales.nbytes
        return values, read, read + decoded.nbytes + (0 if values is decoded else values.nbytes)

    def _report(self, tensors: int = 0, read_bytes: int = 0, peak: int = 0) -> None:
        state = self.state
        self.state = LoadProgress(
            state.tensors + tensors,
            state.total_tensors,
            state.bytes_read + read_bytes,
            max(state.peak_host_bytes, peak),
        )
        if self.progress is not None:
            self.progress(self.state)


def _holds(box: Box, index: tuple[int, ...]) -> bool:
    """Whether a share of a leaf includes the tensor at ``index`` of the stacked axes."""
    return all(a <= i < b for i, (a, b) in zip(index, box, strict=False))


def load_checkpoint(
    source: TensorSource,
    config: ModelConfig,
    target: ParameterTree,
    progress: Callable[[LoadProgress], None] | None = None,
    slice_bytes: int = SLICE_BYTES,
    padded: Collection[Path] = (),
) -> ParameterTree:
    """Reads the tensors of a parameter tree, each process only the rows that its devices hold.

    A leaf ``weight`` beside a leaf ``scale`` takes the stored codes as they are. A float ``weight`` without
    ``scale`` takes values: of a quantised tensor the exact product with its scales, of a float tensor its values,
    either rounded to the leaf's dtype if that is narrower.

    Args:
      source: a :class:`~dsv41.checkpoint.safetensors_io.CheckpointReader` or another source of public tensors.
      config: the model; its layout says which tensors there are, the target which storage is wanted.
      target: nested dict of ``jax.ShapeDtypeStruct``, with or without sharding (without: the first local device).
        It may lack whole top-level entries (``vision``, ``dspark``, ``engram_table_1`` …), whose tensors are then not
        read.
      progress: called after each slice and each tensor.
      slice_bytes: bound on the host memory for data in flight, conversions included (at least one row is held). A leaf
        whose sharding names host memory is gathered there whole before it is handed over.
      padded: leaves that may have more rows than their tensors, so that the parts of a mesh are equal
        (:func:`dsv41.declared.padded_leaves`). The rows behind are zeros.

    Returns:
      The tree with arrays in place of the target's leaves.

    Raises:
      CheckpointError: before any data is read, with all that does not fit: tensors missing, unexpected, of the wrong
        shape or dtype, or unscaled where the target wants codes.
    """
    parts = _Checker(source, config, target, padded).parts()
    total = sum(map(len, parts.values()))
    loader = _Loader(source, quantized_layout(config), slice_bytes, total, progress)
    leaves = flatten_tree(target)
    return unflatten_tree({path: loader.leaf(leaf, parts[path]) for path, leaf in leaves.items()})
