"""What a run begins with: masters from an earlier run, from a checkpoint, or drawn."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Literal

import jax
import numpy as np

from dsv41.checkpoint import CheckpointError, CheckpointReader, checkpoint_layout
from dsv41.checkpoint.placement import ParameterTree
from dsv41.declared import abstract_variables, padded_leaves
from dsv41.layers.dspark import Drafter
from dsv41.loading import checkpoint_token_map, checkpoint_variables, load_drafter, token_map_on_devices
from dsv41.model import Model
from dsv41.tokens.tokenizer import Tokenizer
from dsv41.training.checkpoints import restore_parameters
from dsv41.training.initial import initial_parameters
from dsv41.training.update import masters


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """``model``: what is trained, and how its backward pass spends memory.

    Attributes:
      directory: a checkpoint in the public layout; without weights, only ``config.json`` and ``tokenizer.json``, they
        are drawn.
      start: directory of an earlier run with the same model: its newest parameters are trained on, in full precision.
        None: the checkpoint's.
      seed: of drawn weights.
      remat: what a backward pass keeps of a layer, see :data:`dsv41.settings.REMAT`.
    """

    directory: pathlib.Path
    start: pathlib.Path | None = None
    seed: int = 0
    remat: Literal["nothing", "choices", "products"] = "choices"

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed: {self.seed} is below 0")


def first_masters(source: ModelSource, model: Model, tokenizer: Tokenizer) -> tuple[ParameterTree, Any]:
    """The backbone's masters, and its constants.

    Raises:
      CheckpointError: neither run nor checkpoint has such a model's parameters.
    """
    if source.start is None and _has_weights(source.directory):
        variables = checkpoint_variables(model, source.directory, tokenizer)
        return masters(variables["params"]), variables["constants"]
    constants = {
        "token_map": token_map_on_devices(
            model, checkpoint_token_map(model.settings.config, source.directory, tokenizer)
        )
    }
    if source.start is not None:
        return restore_parameters(source.start, _float32(model), padded_leaves(model)), constants
    return initial_parameters(model, source.seed), constants


def first_draft_masters(source: ModelSource, drafter: Drafter) -> ParameterTree:
    """The drafter's masters: the earlier run's, the checkpoint's if it has a drafter, or drawn."""
    if source.start is not None:
        return restore_parameters(source.start, _float32(drafter))
    if _has_weights(source.directory):
        reader = CheckpointReader(source.directory)
        layout, stored = checkpoint_layout(drafter.settings.config), reader.specs()
        if any(spec.part == "dspark" and name in stored for name, spec in layout.items()):
            return masters(load_drafter(drafter, reader)["params"])
    return initial_parameters(drafter, source.seed)


def require_weights(source: ModelSource) -> None:
    """
    Raises:
      CheckpointError: the directory has no weights, which a drafter is trained to imitate.
    """
    if not _has_weights(source.directory):
        raise CheckpointError(f"{source.directory}: no weights; a drafter is trained on a backbone that is there")


def _has_weights(directory: pathlib.Path) -> bool:
    return any(directory.glob("*.safetensors"))


def _float32(module: Model | Drafter) -> ParameterTree:
    def wide(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=leaf.sharding)

    return jax.tree.map(wide, abstract_variables(module))
