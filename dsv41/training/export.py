"""From masters to a checkpoint in the public layout: what training rounded in passing is now stored rounded."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv41.checkpoint import (
    CheckpointReader,
    abstract_parameters,
    checkpoint_layout,
    copy_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from dsv41.checkpoint.placement import ParameterTree, Path, flatten_tree, parameter_place, unflatten_tree
from dsv41.checkpoint.safetensors_io import NUMPY_DTYPES, SHARD_BYTES
from dsv41.config import ModelConfig
from dsv41.declared import abstract_variables, padded_leaves
from dsv41.layers.dspark import Drafter
from dsv41.loading import TOKEN_MAP_FILE
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.tokens.tokenizer import TOKENIZER_FILE
from dsv41.training.placement import as_declared
from pallas_kernels.block_linear.weights import encode_blocks
from pallas_kernels.formats import FP4_E8M0, FP8_E8M0


def packed_parameters(module: Model | Drafter, params: ParameterTree) -> ParameterTree:
    """Masters as the checkpoint of the module's configuration stores them: codes and scales, or floats.

    They are rounded to the dtype that training computes with first, as training did: so a packed model multiplies by
    the very values that training under the full policy multiplied by.

    Args:
      module: the trained model or drafter.
      params: its masters, wherever they lie.
    """
    config = module.settings.config
    stored = flatten_tree(abstract_variables(type(module)(Settings.default(config))))
    floats = flatten_tree(plain_parameters(module, params))

    @jax.jit
    def encode(floats: dict[Path, jax.Array]) -> dict[Path, jax.Array]:
        leaves = {}
        for path, value in floats.items():
            scale = (*path[:-1], "scale")
            if scale not in stored:
                leaves[path] = value.astype(stored[path].dtype)
            else:
                leaves[path], leaves[scale] = _encode(value, stored[scale].shape)
        return leaves

    return unflatten_tree(encode(floats))


def plain_parameters(module: Model | Drafter, params: ParameterTree) -> ParameterTree:
    """Masters in the dtypes that training computes with, without the rows that a mesh puts behind a table's own."""
    rows = padded_leaves(module)
    floats = flatten_tree(as_declared(module, params))
    return unflatten_tree({path: value[: rows[path]] if path in rows else value for path, value in floats.items()})


def _encode(matrix: jax.Array, scales: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of a matrix ``[…, out, in]`` whose scales have this shape."""
    if scales[-2] != matrix.shape[-2]:
        return encode_blocks(matrix)
    if matrix.ndim > 2:  # of experts
        return tuple(FP4_E8M0.encode(matrix))
    codes, scale = FP8_E8M0.encode(matrix)
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scale


def export_checkpoint(
    directory: str | pathlib.Path,
    model: Model,
    params: ParameterTree,
    drafter: Drafter | None = None,
    drafter_params: ParameterTree | None = None,
    plain: bool = False,
    shard_bytes: int = SHARD_BYTES,
    vision: pathlib.Path | None = None,
) -> None:
    """Writes a trained model as a public checkpoint.

    Args:
      directory: must not exist, or be empty; it appears only when complete.
      params: masters; those of the drafter as its own tree. Without one the checkpoint has no drafter.
      plain: True writes floats whatever the configuration says, to measure what packing costs.
      shard_bytes: see :func:`~dsv41.checkpoint.save_checkpoint`.
      vision: directory of a checkpoint whose vision part, which is not trained, goes along to the bit if there is one.

    Raises:
      CheckpointError: see :func:`~dsv41.checkpoint.save_checkpoint`; or the vision part does not fit.
    """
    pack = plain_parameters if plain else packed_parameters
    tree = pack(model, params)
    if drafter is not None:
        tree = tree | {"dspark": pack(drafter, drafter_params)}
    config = model.settings.config
    if vision is not None:
        tree = tree | _vision_parameters(vision, config)
    config = dataclasses.replace(config, quantization=None) if plain else config
    save_checkpoint(tree, config, directory, shard_bytes)


def _vision_parameters(directory: pathlib.Path, config: ModelConfig) -> ParameterTree:
    """A checkpoint's vision part, leaves in the dtypes that they are stored in; empty if it has none."""
    layout = {name: spec for name, spec in checkpoint_layout(config).items() if spec.part == "vision"}
    stored = {}
    if any(directory.glob("*.safetensors")):
        reader = CheckpointReader(directory)
        stored = {name: spec for name, spec in reader.specs().items() if name in layout}
    if not stored:
        return {}
    target = flatten_tree(abstract_parameters(config, parts=["vision"]))
    for name, (dtype, _) in stored.items():
        path = parameter_place(config, name).path
        # Blocks share leaves, so they get the wider dtype of theirs.
        wide = jnp.promote_types(target[path].dtype, NUMPY_DTYPES[dtype])
        target[path] = jax.ShapeDtypeStruct(target[path].shape, wide)
    return load_checkpoint(reader, config, unflatten_tree(target))


def export_drafter(
    directory: str | pathlib.Path, source: pathlib.Path, drafter: Drafter, params: ParameterTree
) -> None:
    """Writes the checkpoint in ``source`` with another drafter; all else of it is the same to the bit.

    Args:
      directory: must not exist, or be empty; it appears only when complete.
      params: the drafter's masters.

    Raises:
      CheckpointError: the directory holds something, or the source is no checkpoint.
    """
    config = drafter.settings.config
    copy_checkpoint(_Redrafted(CheckpointReader(source), config, packed_parameters(drafter, params)), config, directory)


class _Redrafted:
    """A checkpoint with the drafter of a parameter tree; a :class:`~dsv41.checkpoint.TensorSource`."""

    def __init__(self, source: CheckpointReader, config: ModelConfig, drafter: ParameterTree) -> None:
        layout = {name: spec for name, spec in checkpoint_layout(config).items() if spec.part == "dspark"}
        leaves = flatten_tree({"dspark": drafter})
        self._source, self._drafter, self._specs = source, {}, {}
        for name, spec in layout.items():
            place = parameter_place(config, name)
            value = np.asarray(leaves[place.path])[place.index]
            dtype = {"float32": "F32", "bfloat16": "BF16"}.get(value.dtype.name, spec.dtype)
            self._drafter[name], self._specs[name] = value, (dtype, value.shape)

    def specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return self._source.specs() | self._specs

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        return self._drafter[name][rows or ...] if name in self._drafter else self._source.read(name, rows)


def copy_vocabulary(source: pathlib.Path, directory: pathlib.Path) -> None:
    """Puts the vocabulary of one checkpoint beside another: its tokenizer and token map, where it has them."""
    for name in (TOKENIZER_FILE, TOKEN_MAP_FILE):
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
