"""The embedded model: a whole checkpoint that writes words, with the recipe and the vocabulary that it came from."""

from __future__ import annotations

import json
import pathlib
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from dsv41.checkpoint import CheckpointReader, checkpoint_layout
from dsv41.cli import main
from dsv41.config import load_config
from dsv41.defaults import NANO_DIRECTORY
from dsv41.evaluation.replay import beginnings
from dsv41.inference.engine import Engine
from dsv41.inference.prefill import clear_requests, prefill
from dsv41.layer_table import Mode, layer_table
from dsv41.state.request import create_state
from dsv41.training.build import TrainConfig
from dsv41.training.config import read_config
from dsv41.training.data import DataConfig, load_texts
from tests.fixtures_engine import NANO_FLAGS, NANO_OPTIONS
from tests.test_cli import readme_lines

RECIPE = pathlib.Path(__file__).parent.parent / "configs" / "nano"
LENGTH = 65  # of held-out texts: a chunk, and the token after it
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
    """By the README's line; without its drafts too, which change no greedy token."""
    (line,) = (line for line in readme_lines() if "--speculative" in line)
    drafting = shlex.split(line)[1:]
    at = drafting.index("--speculative")
    texts = []
    for argv in (drafting, drafting[:at] + drafting[at + 2 :]):
        assert main([*argv, *NANO_FLAGS]) == 0
        captured = capsys.readouterr()
        assert re.search(r"prompt tokens, \d+ new", captured.err)
        assert ("speculation: " in captured.err) == (argv == drafting)
        texts.append(captured.out)
    assert texts[0] == texts[1]
    assert len(re.findall(r"\b(?:the|and|of|that|to|unto|in|he|they|lord)\b", texts[0].lower())) >= 5


def test_its_engram_knows_its_language():
    """Next tokens of held-out chapters are harder to tell with tables of zeros; by the steps of the test above."""
    engine = Engine.from_checkpoint(NANO_DIRECTORY, NANO_OPTIONS)
    settings, shape = engine.model.settings, engine.slot_shape([LENGTH])
    params = engine.variables["params"]
    tables = {name: jax.tree.map(jnp.zeros_like, leaf) for name, leaf in params.items() if "engram_table" in name}
    assert len(tables) == len(settings.text.engram_layer_ids)
    held_out = load_texts(DataConfig(LENGTH, batch_rows=1, corpus="bibles"))[1]
    texts = beginnings(held_out, engine.tokenizer, settings.config.bos_token_id, LENGTH, 6)

    def nats(variables: dict) -> np.ndarray:
        """Of each text's last token after the others."""
        found = []
        for *prompt, token in texts.tolist():
            state = create_state(settings, shape.batch, shape.pages, shape.table_pages)
            state = clear_requests(
                engine.model,
                jax.device_put(state, jax.local_devices()[0]),
                np.ones(shape.batch, bool),
                np.arange(shape.pages, dtype=np.int32).reshape(shape.batch, shape.table_pages),
            )
            _, logits = prefill(engine.model, variables, state, [0], [prompt], engine._prefill)
            found.append(-scipy.special.log_softmax(np.asarray(logits, np.float32)[0])[token])
        return np.array(found)

    trained, zeroed = nats(engine.variables), nats(engine.variables | {"params": params | tables})
    assert zeroed.mean() > trained.mean() + 0.5
