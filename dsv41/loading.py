"""From a checkpoint, or from a seed, to the variables that steps take: parameters and the token map."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import PartitionSpec

from dsv41.checkpoint import (
    CheckpointError,
    CheckpointReader,
    LoadProgress,
    RandomSource,
    TensorSource,
    load_checkpoint,
    random_parameters,
)
from dsv41.config import ModelConfig
from dsv41.declared import abstract_variables, padded_leaves
from dsv41.layers.dspark import Drafter
from dsv41.model import Model
from dsv41.sharding.steps import place
from dsv41.steps.prefill import Variables
from dsv41.tokens.compression import token_map
from dsv41.tokens.tokenizer import TOKENIZER_FILE, Tokenizer, TokenizerError, load_tokenizer

TOKEN_MAP_FILE = "token_map.npy"
"""Beside a checkpoint (or one directory above it): compressed ids of a vocabulary that is not the packaged one."""


def load_variables(
    model: Model,
    source: TensorSource,
    ids: np.ndarray,
    progress: Callable[[LoadProgress], None] | None = None,
    stored: ModelConfig | None = None,
) -> Variables:
    """The variables of a model: the source's tensors, stored as the model's settings say, and the token map.

    On a mesh each process reads what its devices hold; the token map is whole on every device.

    Args:
      source: a checkpoint, or random weights in its place.
      ids: token map, int32 ``[vocab]``.
      progress: called after each slice and each tensor.
      stored: the source's own configuration where it is not the model's: a packed checkpoint for a float model.

    Raises:
      CheckpointError: the tensors do not fit the configuration; all that do not are named.
    """
    params = load_checkpoint(
        source, stored or model.settings.config, abstract_variables(model), progress, padded=padded_leaves(model)
    )
    return {"params": params, "constants": {"token_map": token_map_on_devices(model, ids)}}


def load_drafter(
    drafter: Drafter,
    source: TensorSource,
    progress: Callable[[LoadProgress], None] | None = None,
    stored: ModelConfig | None = None,
) -> Variables:
    """The variables of a drafter; arguments and errors as of :func:`load_variables`."""
    target = {"dspark": abstract_variables(drafter)}
    return {"params": load_checkpoint(source, stored or drafter.settings.config, target, progress)["dspark"]}


def random_variables(model: Model, seed: int, tokenizer: Tokenizer | None) -> Variables:
    """Random weights and a token map for them: the tokenizer's if it is the model's, else ids in order.

    Without texts there is nothing to normalise; token t then takes compressed id t modulo the compressed vocabulary.
    """
    config = model.settings.config
    ids = None if tokenizer is None else _own_token_map(config, tokenizer)
    return load_variables(model, RandomSource(config, seed), _ids_in_order(config) if ids is None else ids)


def device_random_variables(model: Model, seed: int) -> Variables:
    """Random weights drawn on the device, and ids in order: for sizes that a host would draw for hours."""
    config = model.settings.config
    params = random_parameters(config, abstract_variables(model), seed, padded_leaves(model))
    return {"params": params, "constants": {"token_map": token_map_on_devices(model, _ids_in_order(config))}}


def _ids_in_order(config: ModelConfig) -> np.ndarray:
    return np.arange(config.text.vocab_size, dtype=np.int32) % np.int32(config.text.engram_compressed_vocab_size)


def token_map_on_devices(model: Model, ids: np.ndarray) -> jax.Array:
    """A token map where the parameters are: arrays that are bound to no device would compile every step twice."""
    parallel = model.settings.parallel
    if parallel.mesh is not None:
        return place(ids, PartitionSpec(), parallel)
    return jax.device_put(ids, jax.local_devices()[0])


def checkpoint_variables(
    model: Model,
    directory: pathlib.Path,
    tokenizer: Tokenizer | None,
    progress: Callable[[LoadProgress], None] | None = None,
) -> Variables:
    """The variables of the checkpoint in ``directory``.

    The token map is computed from the tokenizer if the configuration's compressed vocabulary is what it gives, else
    read from ``token_map.npy`` in the directory or its parent.

    Raises:
      CheckpointError: see :func:`load_variables`; also a token map that is missing or does not fit.
    """
    reader = CheckpointReader(directory)
    return load_variables(model, reader, checkpoint_token_map(model.settings.config, directory, tokenizer), progress)


def model_tokenizer(config: ModelConfig, directory: pathlib.Path | None = None) -> Tokenizer | None:
    """The tokenizer of a model: the ``tokenizer.json`` of its checkpoint directory if there is one, else the packaged.

    None if there is no such file and the model's vocabulary has another size than the packaged one: such a model takes
    ids only.

    Raises:
      CheckpointError: the directory's own vocabulary cannot be read or has another size than the model's.
    """
    if directory is not None and (directory / TOKENIZER_FILE).is_file():
        try:
            tokenizer = load_tokenizer(directory)
        except TokenizerError as error:
            raise CheckpointError(str(error)) from error
        if tokenizer.vocab_size != config.text.vocab_size:
            raise CheckpointError(
                f"{directory / TOKENIZER_FILE}: {tokenizer.vocab_size} tokens where text_config.vocab_size is "
                f"{config.text.vocab_size}"
            )
        return tokenizer
    tokenizer = Tokenizer()
    return tokenizer if tokenizer.vocab_size == config.text.vocab_size else None


def checkpoint_token_map(config: ModelConfig, directory: pathlib.Path, tokenizer: Tokenizer | None) -> np.ndarray:
    """Compressed ids int32 ``[vocab]`` for a checkpoint; see :func:`checkpoint_variables`.

    Raises:
      CheckpointError: there is no map, or the file's shape, dtype or ids do not fit the configuration.
    """
    text = config.text
    ids = None if tokenizer is None else _own_token_map(config, tokenizer)
    if ids is not None:
        return ids
    for path in (directory / TOKEN_MAP_FILE, directory.absolute().parent / TOKEN_MAP_FILE):
        if path.is_file():
            break
    else:
        raise CheckpointError(
            f"{directory}: no {TOKEN_MAP_FILE} there or one directory above, and text_config.vocab_size "
            f"{text.vocab_size} with engram_compressed_vocab_size {text.engram_compressed_vocab_size} is not the "
            f"{'packaged vocabulary' if tokenizer is None else 'vocabulary of its tokenizer'}"
        )
    ids = np.load(path, allow_pickle=False)
    if ids.shape != (text.vocab_size,) or not np.issubdtype(ids.dtype, np.integer):
        raise CheckpointError(f"{path}: {ids.dtype} {list(ids.shape)} where integers [{text.vocab_size}] are needed")
    if ids.min() < 0 or ids.max() >= text.engram_compressed_vocab_size:
        raise CheckpointError(
            f"{path}: ids {ids.min()} … {ids.max()} outside 0 … {text.engram_compressed_vocab_size - 1} "
            "(text_config.engram_compressed_vocab_size)"
        )
    return ids.astype(np.int32)


def _own_token_map(config: ModelConfig, tokenizer: Tokenizer) -> np.ndarray | None:
    """The tokenizer's map if it has exactly the compressed ids that the configuration counts."""
    ids = token_map(tokenizer)
    return ids if int(ids.max()) + 1 == config.text.engram_compressed_vocab_size else None
