"""From a parameter tree, or from any tensor source, to files in the public layout."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from dsv41.checkpoint.layout import TensorSpec, checkpoint_layout
from dsv41.checkpoint.load import SLICE_BYTES
from dsv41.checkpoint.placement import ParameterTree, Place, flatten_tree, parameter_place
from dsv41.checkpoint.safetensors_io import (
    NUMPY_DTYPES,
    SHARD_BYTES,
    CheckpointError,
    TensorSource,
    TensorToWrite,
    write_checkpoint,
)
from dsv41.config import ModelConfig

_SHOWN_PROBLEMS = 20


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model, in the official nesting; :func:`dsv41.config.parse_config` reads it back."""
    data = dataclasses.asdict(config)
    text = {"model_type": "deepseek_v41_text", **data.pop("text")}
    vision = {"model_type": "deepseek_v41_vision", **data.pop("vision")}
    quantization = data.pop("quantization")
    head = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", **data}
    if quantization is not None:
        head["quantization_config"] = quantization
    return {**head, "text_config": text, "vision_config": vision}


@functools.partial(jax.jit, static_argnums=2)
def cut(array: jax.Array, start: tuple[jax.Array, ...], sizes: tuple[int, ...]) -> jax.Array:
    """A box of an array, on its device, so that only the box travels; compiled once for all places of one size."""
    return lax.dynamic_slice(array, start, sizes)


def _fetch(leaf: jax.Array, place: Place, rows: tuple[int, int]) -> np.ndarray:
    """Rows of the tensor at ``place``, gathered from the shards of a leaf; ``[rows, ...]``."""
    wanted = [(i, i + 1) for i in place.index] + [rows] + [(0, n) for n in leaf.shape[len(place.index) + 1 :]]
    out = np.empty([b - a for a, b in wanted], leaf.dtype)
    for shard in leaf.addressable_shards:
        if shard.replica_id:
            continue
        box = [s.indices(n)[:2] for s, n in zip(shard.index, leaf.shape, strict=True)]
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, box, strict=True)]
        if any(low >= high for low, high in common):
            continue
        start = tuple(np.int32(low - c) for (low, _), (c, _) in zip(common, box, strict=True))
        sizes = tuple(high - low for low, high in common)
        if shard.device.platform == "cpu":  # numpy sees the array's own memory
            piece = np.asarray(shard.data)[tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))]
        else:
            piece = np.asarray(cut(shard.data, start, sizes))
        out[tuple(slice(low - a, high - a) for (low, high), (a, _) in zip(common, wanted, strict=True))] = piece
    return out.reshape(out.shape[len(place.index) :])


def _row_slices(shape: Sequence[int], itemsize: int, slice_bytes: int) -> Iterator[tuple[int, int]]:
    count = max(1, slice_bytes // max(1, math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], count):
        yield start, min(start + count, shape[0])


def _stored_dtype(spec: TensorSpec, leaf: jax.Array) -> str | None:
    """How a leaf's numbers are stored; None if they cannot stand for this tensor."""
    if spec.dtype in ("F32", "BF16"):
        return {"float32": "F32", "bfloat16": "BF16"}.get(leaf.dtype.name)
    return spec.dtype if leaf.dtype == NUMPY_DTYPES[spec.dtype] else None


def save_checkpoint(
    params: ParameterTree,
    config: ModelConfig,
    directory: str | pathlib.Path,
    shard_bytes: int = SHARD_BYTES,
    slice_bytes: int = SLICE_BYTES,
) -> None:
    """Writes a parameter tree as a public checkpoint with its ``config.json``.

    Codes and scales are written as they are, floats in their own dtype (float32 or bfloat16).

    Args:
      params: nested dict of arrays, as :func:`dsv41.checkpoint.load.load_checkpoint` returns it. The drafter
        (``dspark``) or the vision part may be absent altogether; everything else must be there.
      config: the model. Its ``quantization`` must say what the tree holds: codes and scales, or (None) floats.
      directory: must not exist, or be empty; it appears only when complete.
      shard_bytes: largest file, unless a single tensor is larger.
      slice_bytes: bound on the host memory for the tensor rows on their way.

    Raises:
      CheckpointError: the directory holds something; leaves are missing, superfluous, of the wrong shape or dtype; or
        an array has shards on devices of another process.
    """
    leaves = flatten_tree(params)
    layout = checkpoint_layout(config)
    places = {name: parameter_place(config, name) for name in layout}
    tops = {path[0] for path in leaves}
    used = {layout[name].part for name, place in places.items() if place.path[0] in tops} | {"text"}
    problems, tensors, seen = [], [], set()
    for name, spec in layout.items():
        place = places[name]
        if spec.part not in used:
            continue
        where = "/".join(place.path)
        leaf = leaves.get(place.path)
        if leaf is None:
            problems.append(f"missing: {where} of {name}")
            continue
        dtype = _stored_dtype(spec, leaf)
        if leaf.shape != (*place.stack, *spec.shape):
            problems.append(f"shape: {where}: {list(leaf.shape)}, not {[*place.stack, *spec.shape]}")
        elif dtype is None:
            problems.append(f"dtype: {where}: {leaf.dtype} cannot be stored as {spec.dtype}")
        elif not leaf.is_fully_addressable:
            problems.append(f"shards: {where}: parts of it belong to another process")
        else:
            tensors.append(TensorToWrite(name, dtype, spec.shape, functools.partial(_pieces, leaf, place, slice_bytes)))
        seen.add(place.path)
    problems += [f"unexpected: {'/'.join(path)}: {leaves[path].dtype}" for path in leaves if path not in seen]
    if problems:
        # A stacked leaf is met once for each of its tensors.
        problems = list(dict.fromkeys(problems))
        shown = "\n  ".join(problems[:_SHOWN_PROBLEMS])
        raise CheckpointError(f"{len(problems)} problem(s) with the parameters:\n  {shown}")
    write_checkpoint(directory, tensors, config_json(config), shard_bytes)


def _pieces(leaf: jax.Array, place: Place, slice_bytes: int) -> Iterator[np.ndarray]:
    shape = leaf.shape[len(place.index) :]
    for rows in _row_slices(shape, leaf.dtype.itemsize, slice_bytes):
        yield _fetch(leaf, place, rows)


def copy_checkpoint(
    source: TensorSource,
    config: ModelConfig,
    directory: str | pathlib.Path,
    shard_bytes: int = SHARD_BYTES,
    slice_bytes: int = SLICE_BYTES,
) -> None:
    """Writes every tensor of a source to files, as it is stored: random weights, or another sharding of a checkpoint.

    Raises:
      CheckpointError: the directory holds something.
    """

    def pieces(name: str, dtype: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        for start, stop in _row_slices(shape, NUMPY_DTYPES[dtype].itemsize, slice_bytes):
            yield source.read(name, slice(start, stop))

    tensors = [
        TensorToWrite(name, dtype, shape, functools.partial(pieces, name, dtype, shape))
        for name, (dtype, shape) in source.specs().items()
    ]
    write_checkpoint(directory, tensors, config_json(config), shard_bytes)
