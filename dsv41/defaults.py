"""What comes with the package: a small model that was trained, and a smaller configuration with the real vocabulary."""

from __future__ import annotations

import pathlib

from dsv41.config import ModelConfig, load_config

_DATA = pathlib.Path(__file__).parent / "data"

NANO_DIRECTORY = _DATA / "nano"
"""The embedded model, a checkpoint in the public layout: this architecture with 12 million parameters and a vocabulary
of its own, trained on three English translations of the Bible (``configs/nano``)."""

DEFAULT_DIRECTORY = _DATA / "default"


def default_config() -> ModelConfig:
    """A small configuration with the real vocabulary and pictures, of which there are no weights: random ones write
    noise."""
    return load_config(DEFAULT_DIRECTORY)
