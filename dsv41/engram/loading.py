"""From a tensor source to the Engram tables of a model, in the memory that the caller wants."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dsv41.checkpoint import SLICE_BYTES, CheckpointError, CheckpointReader, TensorSource
from dsv41.checkpoint.safetensors_io import NUMPY_DTYPES
from dsv41.config import ModelConfig
from dsv41.engram.mapped import MappedTable, Placement
from dsv41.engram.tables import DeviceTable, EngramTable, PinnedTable, ShardedTable, pinned_memory
from pallas_kernels.formats import FP8_E8M0, Packed

TableKind = Literal["device", "pinned", "mapped"]
TABLE_KINDS: tuple[TableKind, ...] = ("device", "pinned", "mapped")

Tables = dict[int, EngramTable]
"""By Engram layer."""


def open_tables(kind: TableKind, source: TensorSource, config: ModelConfig, device: jax.Device) -> Tables:
    """The tables of all Engram layers for one device.

    Args:
      kind: where the rows lie: in the memory of the device, in pinned host memory, or in the checkpoint's file.
      source: the checkpoint, or (in memory only) random weights in its place.
      device: receives the rows that are looked up.

    Raises:
      CheckpointError: a table is missing, or not as the configuration says; "mapped" of what is no file.
      ValueError: an unknown kind, or a back end without pinned memory.
    """
    if kind not in TABLE_KINDS:
        raise ValueError(f"Engram table kind {kind!r} is none of {', '.join(TABLE_KINDS)}")
    return {layer: _open(kind, source, config, layer, device) for layer in config.text.engram_layer_ids}


def _open(kind: TableKind, source: TensorSource, config: ModelConfig, layer: int, device: jax.Device) -> EngramTable:
    if kind == "mapped":
        return mapped_table(source, config, layer, device)
    rows, names = _names(source, config, layer)
    if kind == "pinned":
        memory = pinned_memory(device)
        return PinnedTable(_packed(_gathered(source, name, rows, memory) for name in names), device)
    memory = SingleDeviceSharding(device)
    return DeviceTable(_packed(_placed(source, name, rows, memory) for name in names))


def mapped_table(source: TensorSource, config: ModelConfig, layer: int, placement: Placement) -> MappedTable:
    """The table of a layer in its file; ``placement`` receives the rows. Errors as of :func:`open_tables`."""
    _, names = _names(source, config, layer)
    if not isinstance(source, CheckpointReader):
        raise CheckpointError(f"{names[0]}: only the table of a checkpoint on disk can be mapped")
    tensors = [source.locate(name) for name in names]
    return MappedTable(tensors[0], tensors[1] if len(tensors) > 1 else None, placement)


def sharded_table(source: TensorSource, config: ModelConfig, layer: int, mesh: Mesh, axis: str) -> ShardedTable:
    """The table of a layer, its rows spread over a mesh axis. Errors as of :func:`open_tables`."""
    rows, names = _names(source, config, layer)
    devices = mesh.shape[axis]
    padded = -(-rows // devices) * devices
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    return ShardedTable(_packed(_placed(source, name, padded, sharding) for name in names), rows, mesh, axis)


def _names(source: TensorSource, config: ModelConfig, layer: int) -> tuple[int, list[str]]:
    """Rows of a layer's table, and the names of its tensors: the weight, and where it is FP8 the scale."""
    text, found = config.text, source.specs()
    rows = text.engram_num_embeddings[text.engram_layer_ids.index(layer)]
    weight, scale = (f"layers.{layer}.engram.embed.{part}" for part in ("weight", "scale"))
    if weight not in found:
        raise CheckpointError(f"{weight}: not in the source")
    dtype, shape = found[weight]
    if dtype not in ("F8_E4M3", "F32", "BF16") or shape != (rows, text.engram_head_dim):
        raise CheckpointError(
            f"{weight}: {dtype} {list(shape)} where floats or F8_E4M3 [{rows}, {text.engram_head_dim}] are needed"
        )
    if dtype != "F8_E4M3":
        return rows, [weight]
    wanted = ("F8_E8M0", (rows, FP8_E8M0.scale_width(text.engram_head_dim)))
    if found.get(scale) != wanted:
        raise CheckpointError(f"{scale}: {found.get(scale)} in the source where {wanted} is needed")
    return rows, [weight, scale]


def _packed(leaves: Iterable[jax.Array]) -> Packed:
    payload, *scales = leaves
    return Packed(payload, scales[0] if scales else None)


def _held_dtype(dtype: str) -> np.dtype:
    """8-bit floats are held as bytes: only the model decodes them."""
    return np.dtype(np.uint8) if dtype == "F8_E4M3" else NUMPY_DTYPES[dtype]


def _placed(source: TensorSource, name: str, rows: int, sharding: jax.sharding.Sharding) -> jax.Array:
    """A tensor padded to ``rows`` rows on devices, copied by slices into the place of each."""
    stored, (live, width) = source.specs()[name]
    dtype, shape = _held_dtype(stored), (rows, width)
    count = max(1, SLICE_BYTES // (width * dtype.itemsize))
    shards = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        first, last, _ = index[0].indices(rows)
        memory = SingleDeviceSharding(device)
        shard = jnp.zeros((last - first, width), dtype, device=memory)
        for start in range(first, min(last, live), count):
            piece = source.read(name, slice(start, min(start + count, last, live))).view(dtype)
            shard = _update(shard, jax.device_put(piece, memory), np.int32(start - first))
            # Transfers are asynchronous: without the wait many slices would be held on the host at once.
            shard.block_until_ready()
        shards.append(shard)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


@functools.partial(jax.jit, donate_argnums=0)
def _update(shard: jax.Array, piece: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(shard, piece, (start, jnp.zeros_like(start)))


def _gathered(source: TensorSource, name: str, rows: int, memory: SingleDeviceSharding) -> jax.Array:
    """A tensor in host memory. It is no operand of a program, so it goes there whole, from a copy of its size."""
    stored, (_, width) = source.specs()[name]
    whole = np.empty((rows, width), _held_dtype(stored))
    count = max(1, SLICE_BYTES // (width * whole.itemsize))
    for start in range(0, rows, count):
        stop = min(start + count, rows)
        whole[start:stop] = source.read(name, slice(start, stop)).view(whole.dtype)
    return jax.device_put(whole, memory, may_alias=False)
