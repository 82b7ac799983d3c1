"""Engines that tests share: compiled once a session, as compiling is most of what they cost."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import numpy as np
import pytest

from dsv41.checkpoint import RandomSource
from dsv41.checkpoint.save import copy_checkpoint
from dsv41.config import ModelConfig, load_config
from dsv41.defaults import default_config
from dsv41.inference.engine import Engine, EngineOptions
from dsv41.inference.prefill import PrefillOptions
from dsv41.sharding.parallel import SINGLE, Parallel

GOLDEN = pathlib.Path(__file__).parent / "data" / "golden"
DEFAULT_OPTIONS = EngineOptions(max_batch=4, max_length=256, deterministic=True)
SMALL_OPTIONS = EngineOptions(max_batch=2, prefill=PrefillOptions(chunk_sizes=(16,)), deterministic=True)
NANO_FLAGS = ("--deterministic", "--batch", "1", "--chunk", "64", "--max-length", "128")
NANO_OPTIONS = EngineOptions(
    max_batch=1, max_length=128, prefill=PrefillOptions(chunk_sizes=(16, 64)), deterministic=True
)
"""With which the embedded model runs by every command and from Python, so that all find the same compiled steps."""

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


ENGINE_LAYOUT = {
    "num_hidden_layers": 3,
    "compress_ratios": (2, 1, 1, 0),
    "kv_source_layer_ids": (0, 1),
    "index_source_layer_ids": (0, 1, 2),
    "candidate_source_layer_id": 1,
    "engram_layer_ids": (0,),
    "dspark_target_layer_ids": (1, 2),
}
"""The changes to mini8's text configuration that leave every kind of state in few layers: as encoder a Full layer with
an Engram, as decoder one with a candidate pool and a Reindex layer; and the drafter."""


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory) -> pathlib.Path:
    """A quantised checkpoint whose vocabulary is not the packaged one: mini8's sizes, fewer layers, random weights."""
    mini8 = GOLDEN / "mini8"
    config = load_config(mini8 / "fp8")
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, **ENGINE_LAYOUT))
    directory = tmp_path_factory.mktemp("checkpoint") / "small"
    copy_checkpoint(RandomSource(config, 0), config, directory)
    np.save(directory / "token_map.npy", np.load(mini8 / "token_map.npy"))
    return directory


@pytest.fixture(scope="session")
def drafting_engine(small_checkpoint) -> Engine:
    """The small checkpoint with three drafts a step."""
    return Engine.from_checkpoint(small_checkpoint, dataclasses.replace(SMALL_OPTIONS, speculative=3))


@pytest.fixture(scope="session")
def small_engine(drafting_engine) -> Engine:
    """The small checkpoint without drafts; the same weights."""
    return with_options(drafting_engine, speculative=None)


def with_options(engine: Engine, **options) -> Engine:
    """Another engine over the same weights and drafter."""
    options = dataclasses.replace(engine.options, **options)
    return Engine(engine.model, engine.variables, engine.tokenizer, options, engine._load_pictures, engine._drafter)
