"""Engines that tests share: compiled once a session, as compiling is most of what they cost."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import pytest

from dsv41.config import ModelConfig
from dsv41.defaults import default_config
from dsv41.inference.engine import Engine, EngineOptions
from dsv41.inference.prefill import PrefillOptions
from dsv41.sharding.parallel import SINGLE, Parallel

GOLDEN = pathlib.Path(__file__).parent / "data" / "golden"
DEFAULT_OPTIONS = EngineOptions(max_batch=4, max_length=256, deterministic=True)
MINI8_OPTIONS = EngineOptions(max_batch=2, prefill=PrefillOptions(chunk_sizes=(16,)), deterministic=True)
NANO_FLAGS = ("--deterministic", "--batch", "1", "--chunk", "64", "--max-length", "128")
"""With which every command runs the embedded model, so that all find the same compiled steps."""

_random_engine = functools.cache(Engine.random)


def _engine_made_once(
    config: ModelConfig, options: EngineOptions, *, seed: int = 0, parallel: Parallel = SINGLE
) -> Engine:
    return _random_engine(config, options, seed=seed, parallel=parallel)


@pytest.fixture
def random_engines_made_once(monkeypatch):
    """Drawing the weights and reading the vocabulary is most of what a command with random weights takes."""
    monkeypatch.setattr(Engine, "random", _engine_made_once)


@pytest.fixture(scope="session")
def default_engine() -> Engine:
    """The small configuration with random weights."""
    return _engine_made_once(default_config(), DEFAULT_OPTIONS)


@pytest.fixture(scope="session")
def mini8_engine() -> Engine:
    """A quantised checkpoint whose vocabulary is not the packaged one."""
    return Engine.from_checkpoint(GOLDEN / "mini8" / "fp8", MINI8_OPTIONS)


@pytest.fixture(scope="session")
def drafting_engine() -> Engine:
    """The same checkpoint with three drafts a step."""
    return Engine.from_checkpoint(GOLDEN / "mini8" / "fp8", dataclasses.replace(MINI8_OPTIONS, speculative=3))
