"""The embedded small model: the official architecture with the real vocabulary, small enough for any machine."""

from __future__ import annotations

import pathlib

from dsv41.config import ModelConfig, load_config

DEFAULT_DIRECTORY = pathlib.Path(__file__).parent / "data" / "default"


def default_config() -> ModelConfig:
    """Configuration of the embedded model. It has no trained weights: what it writes is noise."""
    return load_config(DEFAULT_DIRECTORY)
