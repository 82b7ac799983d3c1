"""The golden checkpoints, and what tests of checkpoints compare them by."""

from __future__ import annotations

import pathlib

import numpy as np

from dsv41.checkpoint import CheckpointReader
from dsv41.checkpoint.placement import flatten_tree
from dsv41.config import ModelConfig, load_config

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "data" / "golden"
OFFICIAL = ROOT / "configs" / "deepseek-v4.1-flash"
MODELS = ("mini8", "tiny40")


def quantized_config(model: str) -> ModelConfig:
    return load_config(GOLDEN / model / "fp8")


def float_config(model: str) -> ModelConfig:
    return load_config(GOLDEN / model / "f32")


def golden_reader(model: str) -> CheckpointReader:
    return CheckpointReader(GOLDEN / model / "fp8")


def bits(array) -> bytes:
    return np.ascontiguousarray(np.asarray(array)).tobytes()


def assert_same_tree(a, b) -> None:
    a, b = flatten_tree(a), flatten_tree(b)
    assert a.keys() == b.keys()
    for path, leaf in a.items():
        assert leaf.dtype == b[path].dtype, path
        assert leaf.shape == b[path].shape, path
        assert bits(leaf) == bits(b[path]), path


class Edited:
    """A source with some headers changed, removed or added; counts the reads."""

    def __init__(self, source, **changes) -> None:
        self.source, self.changes, self.reads = source, changes, 0

    def specs(self):
        specs = self.source.specs() | self.changes.get("put", {})
        return {name: spec for name, spec in specs.items() if name not in self.changes.get("drop", ())}

    def read(self, name, rows=None):
        self.reads += 1
        return self.source.read(name, rows)
