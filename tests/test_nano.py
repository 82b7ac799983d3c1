"""The embedded model: a whole checkpoint that writes words, with the recipe and the vocabulary that it came from."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from dsv41.checkpoint import CheckpointReader, checkpoint_layout
from dsv41.cli import main
from dsv41.config import load_config
from dsv41.defaults import NANO_DIRECTORY
from dsv41.layer_table import Mode, layer_table
from dsv41.training.build import TrainConfig
from dsv41.training.config import read_config
from tests.fixtures_engine import NANO_FLAGS

RECIPE = pathlib.Path(__file__).parent.parent / "configs" / "nano"
LARGEST_BYTES = 12_500_000


def test_it_is_its_recipes_model():
    assert load_config(NANO_DIRECTORY) == load_config(RECIPE)
    assert (NANO_DIRECTORY / "tokenizer.json").read_bytes() == (RECIPE / "tokenizer.json").read_bytes()


def test_it_has_every_part_of_the_architecture():
    config = load_config(NANO_DIRECTORY)
    layers = [layer.kind for layer in layer_table(config.text).layers]
    assert {kind.mode for kind in layers} == set(Mode)
    assert {kind.ratio for kind in layers} == {0, 1, 2}
    assert config.text.candidate_topk_blocks * config.text.candidate_block_size < config.text.max_position_embeddings
    assert config.quantization is not None
    wanted = {name for name, spec in checkpoint_layout(config).items() if spec.part != "vision"}
    assert set(CheckpointReader(NANO_DIRECTORY).specs()) == wanted
    assert sum(path.stat().st_size for path in NANO_DIRECTORY.iterdir()) < LARGEST_BYTES


@pytest.mark.parametrize("stage", ["pretrain", "qat", "dspark"])
def test_its_recipe_is_read_and_its_curve_is_there(stage):
    config = read_config(RECIPE / f"{stage}.toml", TrainConfig)
    lines = [json.loads(line) for line in (RECIPE / "logs" / stage / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == config.trainer.steps
    assert not any(line["skipped"] for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_it_writes_words(capsys):
    """Also with drafts, which change no greedy token."""
    texts = []
    for options in (["--speculative", "3"], []):
        arguments = ["--prompt", "And it came to pass", "--max-new-tokens", "32"]
        assert main(["generate", *arguments, *options, *NANO_FLAGS]) == 0
        captured = capsys.readouterr()
        texts.append(captured.out)
    assert texts[0] == texts[1]
    assert len(re.findall(r"\b(?:the|and|of|that|to|unto|in|he|they|lord)\b", texts[0].lower())) >= 5
