"""Reading and writing safetensors files by slices.

The header is parsed here because the public reader for numpy refuses BF16 and the 8-bit floats, and because a
slice must cost only its own bytes. Files are little-endian: 8 bytes of header length, a JSON header with dtype,
shape and byte range of each tensor, then the data.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import shutil
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np

NUMPY_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}
"""How each stored dtype is held in memory. Scales and packed codes are bytes, not numbers."""

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_HEADER_LIMIT = 100_000_000


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not fit; the message names file, tensor and value."""


class TensorSource(Protocol):
    """Anything that tensors can be read from by rows."""

    def specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Stored dtype and shape of every tensor, without reading any."""
        ...

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Rows ``rows.start`` to ``rows.stop`` of a tensor (None: all of it), ``[rows, ...]``."""
        ...


def check_rows(name: str, shape: tuple[int, ...], rows: slice | None) -> tuple[int, int]:
    """First and last-plus-one row of a request.

    Raises:
      CheckpointError: the slice has a step or does not lie inside the tensor's leading axis.
    """
    length = shape[0] if shape else 1
    if rows is None:
        return 0, length
    start = 0 if rows.start is None else rows.start
    stop = length if rows.stop is None else rows.stop
    if rows.step not in (None, 1) or not shape or not 0 <= start <= stop <= length:
        raise CheckpointError(f"{name}: rows {rows} of a tensor of shape {list(shape)}")
    return start, stop


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: ``offset`` is its first byte in the file, ``dtype`` a key of :data:`NUMPY_DTYPES`."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def _no_duplicates(file: pathlib.Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            raise CheckpointError(f"{file}: {next(n for n in names if names.count(n) > 1)!r} occurs twice")
        return result

    return check


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(file: pathlib.Path, name: str, fields: Any, start: int, size: int) -> StoredTensor:
    """Checks one header entry; ``start`` is where the file's data begins, ``size`` the file's size."""
    try:
        dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file}: {name}: header entry {fields!r} is not a tensor description") from error
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise CheckpointError(f"{file}: {name}: dtype {dtype!r} is none of {', '.join(NUMPY_DTYPES)}")
    if not isinstance(shape, list) or not all(map(_is_count, [*shape, begin, end])):
        raise CheckpointError(f"{file}: {name}: shape {shape!r} or byte range {[begin, end]!r} is malformed")
    nbytes = math.prod(shape) * NUMPY_DTYPES[dtype].itemsize
    if end - begin != nbytes:
        raise CheckpointError(f"{file}: {name}: byte range {[begin, end]} for {nbytes} bytes of {dtype} {shape}")
    if start + end > size:
        raise CheckpointError(f"{file}: {name}: ends at byte {start + end}, the file is truncated at {size}")
    return StoredTensor(file, dtype, tuple(shape), start + begin)


def read_header(file: pathlib.Path) -> dict[str, StoredTensor]:
    """The tensors of one file, by name.

    Raises:
      CheckpointError: the file is too short, its header malformed, or a tensor's bytes are not all there.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{file}: {size} bytes are no safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if length > _HEADER_LIMIT:
            raise CheckpointError(f"{file}: header length {length} exceeds {_HEADER_LIMIT}; no safetensors file")
        if 8 + length > size:
            raise CheckpointError(f"{file}: header of {length} bytes, the file is truncated at {size}")
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates(file))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file}: header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: header is {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    return {name: _entry(file, name, fields, 8 + length, size) for name, fields in header.items()}


def _read_index(directory: pathlib.Path) -> dict[str, StoredTensor]:
    index = directory / INDEX_FILE
    try:
        data = json.loads(index.read_text(), object_pairs_hook=_no_duplicates(index))
        weight_map: dict[str, str] = data["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: no JSON object with a weight_map ({error!r})") from error
    entries: dict[str, StoredTensor] = {}
    for shard in shards:
        if not isinstance(shard, str) or pathlib.PurePath(shard).name != shard:
            raise CheckpointError(f"{index}: shard {shard!r} is not a plain file name")
        file = directory / shard
        if not file.is_file():
            raise CheckpointError(f"{index}: shard {shard} is not there")
        for name, entry in read_header(file).items():
            if name in entries:
                raise CheckpointError(f"{file}: {name}: also in {entries[name].file.name}")
            if weight_map.get(name) != shard:
                raise CheckpointError(f"{file}: {name}: the index puts it in {weight_map.get(name)!r}")
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries:
            raise CheckpointError(f"{directory / shard}: {name}: listed in the index but absent from the shard")
    return entries


def read_tensors(file: str | pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors of one safetensors file, by name, in the dtypes of :data:`NUMPY_DTYPES`.

    Raises:
      CheckpointError: see :func:`read_header`.
    """
    return {name: _read_entry(name, entry, None) for name, entry in read_header(pathlib.Path(file)).items()}


class CheckpointReader:
    """Reads a directory in the public layout; opening it reads headers only.

    Args:
      directory: holds ``model.safetensors.index.json`` with its shards, or one ``model.safetensors``.

    Raises:
      CheckpointError: a file is missing, truncated or malformed, or index and shards disagree.
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
        self.directory = pathlib.Path(directory)
        if (self.directory / INDEX_FILE).is_file():
            self._entries = _read_index(self.directory)
        elif (self.directory / SINGLE_FILE).is_file():
            self._entries = read_header(self.directory / SINGLE_FILE)
        else:
            raise CheckpointError(f"{self.directory}: neither {INDEX_FILE} nor {SINGLE_FILE}")

    def specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Stored dtype (safetensors name) and shape of every tensor, by name."""
        return {name: (entry.dtype, entry.shape) for name, entry in self._entries.items()}

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Reads a tensor or some of its rows; no other bytes are touched.

        Returns:
          A fresh array ``[rows, ...]`` of the dtype that :data:`NUMPY_DTYPES` gives.

        Raises:
          CheckpointError: no such tensor, rows outside it, or the file ends early.
        """
        return _read_entry(name, self.locate(name), rows)

    def locate(self, name: str) -> StoredTensor:
        """Where a tensor's bytes lie, for readers that map the file.

        Raises:
          CheckpointError: no such tensor.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.directory}: {name}: no such tensor")
        return entry


def _read_entry(name: str, entry: StoredTensor, rows: slice | None) -> np.ndarray:
    start, stop = check_rows(name, entry.shape, rows)
    shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
    out = np.empty(shape, NUMPY_DTYPES[entry.dtype])
    row_bytes = math.prod(entry.shape[1:]) * out.itemsize
    with entry.file.open("rb", buffering=0) as stream:
        stream.seek(entry.offset + start * row_bytes)
        view, done = memoryview(out.reshape(-1).view(np.uint8)), 0
        while done < out.nbytes:
            count = stream.readinto(view[done:])
            if not count:
                raise CheckpointError(f"{entry.file}: {name}: ends after {done} of {out.nbytes} bytes")
            done += count
    return out


@dataclasses.dataclass(frozen=True)
class TensorToWrite:
    """One tensor of :func:`write_checkpoint`.

    Attributes:
      name: public name.
      dtype: safetensors dtype, a key of :data:`NUMPY_DTYPES`.
      shape: stored shape.
      pieces: called once, when the tensor's turn comes; yields its rows in order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


SHARD_BYTES = 5 * 2**30


def _plan_shards(tensors: Sequence[TensorToWrite], shard_bytes: int) -> list[list[TensorToWrite]]:
    shards: list[list[TensorToWrite]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    # Wider elements first, so that every tensor of a shard is aligned to its own element.
    return [sorted(shard, key=lambda t: -NUMPY_DTYPES[t.dtype].itemsize) for shard in shards]


def _write_shard(file: pathlib.Path, tensors: Sequence[TensorToWrite]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            written = 0
            for piece in tensor.pieces():
                if piece.dtype != NUMPY_DTYPES[tensor.dtype]:
                    raise CheckpointError(f"{tensor.name}: a piece of dtype {piece.dtype} for {tensor.dtype}")
                stream.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
                written += piece.nbytes
            if written != tensor.nbytes:
                raise CheckpointError(f"{tensor.name}: {written} bytes produced for {tensor.nbytes}")
        stream.flush()
        os.fsync(stream.fileno())


def write_checkpoint(
    directory: str | pathlib.Path,
    tensors: Sequence[TensorToWrite],
    config_json: dict[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes shards, index and ``config.json``; the directory appears under its name only when complete.

    Args:
      directory: must not exist, or be empty.
      tensors: in the order in which they fill the shards; each is produced when its turn comes.
      config_json: written as ``config.json``.
      shard_bytes: largest shard, unless a single tensor is larger.

    Raises:
      CheckpointError: the directory holds something, two tensors share a name, or a tensor yields the wrong bytes.
    """
    directory = pathlib.Path(directory).absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory}: exists and is not an empty directory")
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise CheckpointError(f"{directory}: {next(n for n in names if names.count(n) > 1)} would be written twice")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        shards = _plan_shards(tensors, shard_bytes)
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write_shard(partial / file, shard)
            weight_map |= {tensor.name: file for tensor in shard}
        total = sum(tensor.nbytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (partial / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")
        (partial / "config.json").write_text(json.dumps(config_json, indent=1) + "\n")
        partial.replace(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
