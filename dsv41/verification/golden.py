"""A golden directory: a configuration, a checkpoint, and what the public reference computed with it."""

from __future__ import annotations

import functools
import pathlib

import numpy as np

from dsv41.checkpoint import CheckpointReader
from dsv41.checkpoint.safetensors_io import read_tensors
from dsv41.config import ModelConfig, load_config
from dsv41.layers.dspark import Drafter
from dsv41.loading import checkpoint_token_map, load_drafter, load_variables, model_tokenizer
from dsv41.model import Model
from dsv41.steps.prefill import Variables


class GoldenError(ValueError):
    """A golden directory that cannot be run; the message names what is missing."""


class Golden:
    """One flavour folder of golden data.

    Args:
      directory: holds ``config.json``, the checkpoint and ``expected*.safetensors``; ``token_map.npy`` lies in it
        or in its parent.
      checkpoint: where the weights are, if not there: the packed flavour holds the float one's values exactly.

    Raises:
      GoldenError: something needed is not there.
    """

    def __init__(self, directory: str | pathlib.Path, checkpoint: str | pathlib.Path | None = None) -> None:
        self.directory = pathlib.Path(directory)
        self.weights = self.directory if checkpoint is None else pathlib.Path(checkpoint)
        if not (self.directory / "config.json").is_file():
            raise GoldenError(f"{self.directory}: no config.json")
        self.config: ModelConfig = load_config(self.directory)
        if not self.sets:
            raise GoldenError(f"{self.directory}: no expected*.safetensors")

    @property
    def sets(self) -> tuple[str, ...]:
        """Names of the expected sets present: "expected", "expected_noquant", …"""
        return tuple(sorted(path.stem for path in self.directory.glob("expected*.safetensors")))

    @property
    def flavour(self) -> str:
        """ "fp8" for a quantised checkpoint, else "f32"."""
        return "f32" if self.config.quantization is None else "fp8"

    def variables(self, model: Model) -> Variables:
        """The checkpoint's weights as the model stores them, and the token map."""
        reader, stored = CheckpointReader(self.weights), load_config(self.weights)
        return load_variables(model, reader, self.token_map, stored=stored)

    def drafter_variables(self, drafter: Drafter) -> Variables:
        """The checkpoint's weights of the drafter."""
        return load_drafter(drafter, CheckpointReader(self.weights), stored=load_config(self.weights))

    @functools.cached_property
    def token_map(self) -> np.ndarray:
        """Token ids to compressed ids, int32 ``[vocab]``; lies beside the checkpoint or one directory above."""
        return checkpoint_token_map(self.config, self.directory, model_tokenizer(self.config, self.directory))

    @functools.cache  # noqa: B019 - a golden lives as long as the process that compares it
    def tensors(self, name: str) -> dict[str, np.ndarray]:
        """All tensors of one expected set, bfloat16 widened to float32."""
        tensors = read_tensors(self.directory / f"{name}.safetensors")
        return {k: v.astype(np.float32) if v.dtype.name == "bfloat16" else v for k, v in tensors.items()}

    def has(self, set_name: str) -> bool:
        return set_name in self.sets

    def prompt_length(self, case: str) -> int:
        """Prompt tokens of a case of the set "expected"."""
        return self.tensors("expected")[f"{case}.prefill.logits"].shape[1]
