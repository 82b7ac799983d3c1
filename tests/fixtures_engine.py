"""Engines that tests share: compiled once a session, as compiling is most of what they cost."""

from __future__ import annotations

import pathlib

import pytest

from dsv41.defaults import default_config
from dsv41.inference.engine import Engine, EngineOptions
from dsv41.inference.prefill import PrefillOptions

GOLDEN = pathlib.Path(__file__).parent / "data" / "golden"
DEFAULT_OPTIONS = EngineOptions(max_batch=4, max_length=256, deterministic=True)
MINI8_OPTIONS = EngineOptions(max_batch=2, prefill=PrefillOptions(chunk_sizes=(16,)), deterministic=True)


@pytest.fixture(scope="session")
def default_engine() -> Engine:
    """The small configuration with random weights."""
    return Engine.random(default_config(), DEFAULT_OPTIONS)


@pytest.fixture(scope="session")
def mini8_engine() -> Engine:
    """A quantised checkpoint whose vocabulary is not the packaged one."""
    return Engine.from_checkpoint(GOLDEN / "mini8" / "fp8", MINI8_OPTIONS)
