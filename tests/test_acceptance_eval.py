"""How many drafts are accepted: counted by real verification, and confidences that are calibrated for it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil

import numpy as np
import pytest

from dsv41.checkpoint import CheckpointError
from dsv41.cli import main
from dsv41.config import load_config
from dsv41.evaluation import acceptance
from dsv41.evaluation.acceptance import measure_acceptance, without_drafts
from dsv41.inference.calibration import CALIBRATION_FILE, fit_temperatures, read_calibration, write_calibration
from dsv41.inference.engine import Engine
from dsv41.inference.measurements import Calibration
from dsv41.inference.options import EngineOptions
from dsv41.inference.requests import Request
from dsv41.inference.scheduler import ThroughputScheduler
from dsv41.loading import model_tokenizer
from dsv41.training import data
from tests.fixtures_engine import GOLDEN, SMALL_OPTIONS
from tests.helpers import random_tokens

MINI8 = GOLDEN / "mini8" / "fp8"
NANO = pathlib.Path(data.__file__).parent.parent / "data" / "nano"
PROMPTS = [random_tokens(i, n).tolist() for i, n in enumerate((7, 33, 18))]
NEW_TOKENS = 10


# ---------------------------------------------------------------- verification


def test_what_is_measured_is_what_the_engine_does(drafting_engine, small_engine):
    temperature = 0.8  # greedy below, by the command
    row = measure_acceptance(drafting_engine, small_engine, PROMPTS, NEW_TOKENS, temperature, seed=4)
    requests = [
        Request(tokens=prompt, max_new_tokens=NEW_TOKENS, temperature=temperature, seed=4 + i)
        for i, prompt in enumerate(PROMPTS)
    ]
    tokens = [c.tokens for c in small_engine.generate(requests)]
    assert row["new_tokens"] == sum(map(len, tokens))
    assert row["same_tokens"] == 1.0
    # Each token but a prompt's first came from a step, as its own or as an accepted draft.
    assert row["steps"] + sum(row["accepted"]) == row["new_tokens"] - len(PROMPTS)
    assert row["mean_accepted"] == pytest.approx(sum(row["accepted"]) / row["steps"])
    assert row["tokens_per_step"] == pytest.approx(1 + row["mean_accepted"])
    accepted, reached = np.array(row["accepted"]), np.array(row["reached"])
    assert (reached[1:] <= accepted[:-1]).all()  # a draft is looked at only where the one before was accepted
    assert reached[0] == row["verified"][0] > 0
    assert (reached[3:] == 0).all()
    assert row["acceptance"][3:] == [None, None]
    for k in np.flatnonzero(reached):
        assert row["acceptance"][k] == pytest.approx(accepted[k] / reached[k])
    assert row["speedup"] == pytest.approx(row["tokens_per_s"] / row["plain_tokens_per_s"])


def test_engines_are_told_apart(drafting_engine, small_engine):
    with pytest.raises(ValueError, match="drafting: this engine was made without speculative"):
        measure_acceptance(small_engine, small_engine, PROMPTS, 2)
    with pytest.raises(ValueError, match="plain: this engine was made with speculative 3"):
        measure_acceptance(drafting_engine, drafting_engine, PROMPTS, 2)
    plain = without_drafts(drafting_engine)
    assert plain.options == dataclasses.replace(drafting_engine.options, speculative=None)
    assert plain.variables is drafting_engine.variables


def test_eval_drafts_prints_a_row_a_temperature(capsys, monkeypatch, drafting_engine):
    made = []

    def from_checkpoint(directory: pathlib.Path, options: EngineOptions) -> Engine:
        made.append((directory, options))
        return drafting_engine

    monkeypatch.setattr(Engine, "from_checkpoint", from_checkpoint)
    options = ["--prompts", "2", "--prompt-length", "9", "--new-tokens", "7", "--speculative", "3", "--deterministic"]
    argv = ["eval", "drafts", "--checkpoint", str(MINI8), "--temperature", "0", "0.7", "--batch", "2", *options]
    assert main([*argv, "--json"]) == 0
    assert made == [(MINI8, EngineOptions(max_batch=2, max_length=16, deterministic=True, speculative=3))]
    rows = json.loads(capsys.readouterr().out)
    assert [row["temperature"] for row in rows] == [0.0, 0.7]
    for row in rows:
        assert (row["speculative"], row["prompts"], row["deterministic"], row["same_tokens"]) == (3, 2, True, 1.0)
        assert row["steps"] + sum(row["accepted"]) == row["new_tokens"] - 2
    assert main([*argv, "--temperature", "0"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("│"))
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells[0] == "0"
    assert cells[4:6] == ["–", "–"]  # positions that three drafts do not have
    assert float(cells[6]) == pytest.approx(rows[0]["mean_accepted"], rel=1e-2)


def test_eval_drafts_continues_held_out_documents(capsys, monkeypatch):
    """Chapter 12 of 25 is held out, in all three translations; one of them is too short."""
    words = "in the beginning was the word and the word was with god "
    chapters = [f"{n} {words * 3}" for n in range(75)]
    chapters[37] = "too short"
    given = []

    def measure(drafting, plain, prompts, *rest):
        given.append(prompts)
        return {"prompts": len(prompts)}

    monkeypatch.setattr(data, "corpus", lambda name: chapters if name == "bibles" else None)
    monkeypatch.setattr(Engine, "from_checkpoint", lambda directory, options: None)
    monkeypatch.setattr(acceptance, "without_drafts", lambda engine: None)
    monkeypatch.setattr(acceptance, "measure_acceptance", measure)
    argv = ["eval", "drafts", "--checkpoint", str(NANO), "--corpus", "bibles", "--prompt-length", "12"]
    assert main([*argv, "--temperature", "0", "--prompts", "2", "--json"]) == 0
    tokenizer, begin = model_tokenizer(load_config(NANO), NANO), load_config(NANO).bos_token_id
    assert given == [[[begin, *tokenizer.encode(chapters[i])[:11]] for i in (36, 38)]]
    assert main([*argv, "--prompts", "3"]) == 2
    assert "texts: 3 are wanted, 2 held-out texts have 12 tokens" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*argv, "--text", __file__])
    assert "--text: not allowed with argument --corpus" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--speculative", "6"], "--speculative: 6 is outside 1 … 5"),
        (["--prompt-length", "200", "--new-tokens", "100"], "--max_length: 300 exceeds max_position_embeddings 256"),
        (["--temperature", "0", "-1"], r"--temperature: \[0.0, -1.0\] are not all numbers from 0 on"),
        (["--text", __file__], "--text: the model's vocabulary is not the packaged tokenizer's"),
        (["--corpus", "bibles"], "--corpus: the model's vocabulary is not the packaged tokenizer's"),
    ],
)
def test_eval_drafts_refuses_before_it_makes_an_engine(capsys, monkeypatch, argv, message):
    monkeypatch.setattr(Engine, "from_checkpoint", None)
    assert main(["eval", "drafts", "--checkpoint", str(MINI8), *argv]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


# ---------------------------------------------------------------- calibration


def test_temperatures_are_found_again():
    """Chances that come from known temperatures, and outcomes that are drawn from them."""
    rng, true = np.random.default_rng(0), np.array([0.3, 1.0, 4.0])
    logits = rng.normal(size=(20_000, 3)) * 3
    chance = 1 / (1 + np.exp(-logits / true))
    live = rng.random(logits.shape) < 0.7
    poisoned = np.where(live, logits, np.nan)
    np.testing.assert_allclose(fit_temperatures(poisoned, chance, live), true, rtol=1e-9)
    drawn = np.where(live, rng.random(logits.shape) < chance, np.nan)
    np.testing.assert_allclose(fit_temperatures(poisoned, drawn, live), true, rtol=0.1)
    live[:, 1] = False
    assert fit_temperatures(poisoned, chance, live)[1] == 1.0
    # Confidences that are always wrong, and always right.
    sure = (logits > 0) == [False, True, True]
    np.testing.assert_allclose(fit_temperatures(logits, sure, np.full_like(live, True)), [16, 1 / 16, 1 / 16])


def test_what_cannot_be_fitted_is_named():
    ones = np.ones((4, 2))
    with pytest.raises(ValueError, match="confidence: a logit of position 1 is not finite"):
        fit_temperatures(np.array([[0, np.nan]]), ones[:1], ones[:1] > 0)
    with pytest.raises(ValueError, match=r"accepted: a chance of position 0 is outside \[0, 1\]"):
        fit_temperatures(ones, ones * [1.5, 1.0], ones > 0)


def test_a_scheduler_starts_with_the_file_s_temperatures(tmp_path, small_checkpoint):
    """Beside the checkpoint, through the engine, to the chances that depths are chosen by."""
    temperature = (0.5, 1.0, 2.0, 3.0, 16.0)
    assert read_calibration(tmp_path, 5) is None
    shutil.copytree(small_checkpoint, tmp_path, dirs_exist_ok=True)
    assert write_calibration(tmp_path, np.array(temperature)) == tmp_path / CALIBRATION_FILE
    assert sorted(p.name for p in tmp_path.iterdir() if CALIBRATION_FILE in p.name) == [CALIBRATION_FILE]
    engine = Engine.from_checkpoint(tmp_path, dataclasses.replace(SMALL_OPTIONS, speculative="auto"))
    engine._speculation(2)
    (scheduler,) = engine._schedulers.values()
    assert isinstance(scheduler, ThroughputScheduler)
    logits = np.linspace(-2, 2, 10).reshape(2, 5)
    expected = 1 / (1 + np.exp(-logits / temperature))
    np.testing.assert_allclose(scheduler.calibration.probabilities(logits), expected, rtol=1e-6)
    np.testing.assert_allclose(Calibration(5).temperature, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1, 1]", "temperature: None is no list of 2 numbers"),
        ('{"temperature": [1, 1, 1]}', r"temperature: \[1, 1, 1\] is no list of 2 numbers \(dspark_block_size\)"),
        ('{"temperature": [1, "a"]}', "temperature: 'a' is outside 1/16 … 16"),
        ('{"temperature": [0, 1]}', "temperature: 0 is outside 1/16 … 16"),
        ('{"temperature": [1, NaN]}', "temperature: nan is outside 1/16 … 16"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: pathlib.Path, text, message):
    (tmp_path / CALIBRATION_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=f"{CALIBRATION_FILE}: {message}"):
        read_calibration(tmp_path, 2)
