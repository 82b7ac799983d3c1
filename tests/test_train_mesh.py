"""Whole training runs, as ``dsv41 train`` makes them: on a mesh as on one device, killed as never interrupted."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from dsv41.checkpoint import CheckpointReader, config_json
from dsv41.cli import main
from dsv41.config import load_config
from dsv41.inference.calibration import CALIBRATION_FILE
from dsv41.layers.dspark import Drafter
from dsv41.model import Model
from dsv41.numerics.rounding import RoundingPolicy
from dsv41.settings import Settings
from dsv41.sharding.mesh import parse_preset
from dsv41.sharding.parallel import SINGLE, Parallel
from dsv41.sharding.rules import MeshError
from dsv41.training import build as training_build
from dsv41.training.build import TrainConfig, build
from dsv41.training.config import read_config
from dsv41.training.draft_step import draft_train_step
from dsv41.training.fit import check_blocks
from dsv41.training.metrics import read_metrics
from dsv41.training.step import train_step
from tests.helpers import mini8_config, with_text

ROOT = pathlib.Path(__file__).parent.parent
STEPS, SAVE_EVERY = 8, 2
WORDS = "in the beginning was a word and light of many waters upon that day it were so"

# One layer: with an Engram, entries and a candidate pool of its own. A drafter of one stage.
LAYOUT = {
    "num_hidden_layers": 1,
    "num_nextn_predict_layers": 1,
    "compress_ratios": (1, 0),
    "kv_source_layer_ids": (0,),
    "index_source_layer_ids": (0,),
    "candidate_source_layer_id": 0,
    "engram_layer_ids": (0,),
    "dspark_target_layer_ids": (0,),
}

RUN = """
[model]
directory = "{model}"
remat = "nothing"
[data]
files = ["{texts}"]
length = 48
batch_rows = 4
holdout = 0.0
[loss]
balance = 1e-2
replay_simulation = 0.5
[schedule]
peak = 3e-3
warmup = 0
decay_from = {steps}
steps = {steps}
[trainer]
steps = {steps}
micro_batches = 2
save_every = {save_every}
log_every = 1000
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> pathlib.Path:
    """A run of a small model without weights, on made-up sentences."""
    directory = tmp_path_factory.mktemp("train")
    shutil.copy(ROOT / "configs" / "nano" / "tokenizer.json", directory)
    nano = json.loads((ROOT / "configs" / "nano" / "config.json").read_text())
    vocabulary = {name: nano["text_config"][name] for name in ("vocab_size", "engram_compressed_vocab_size")}
    config = with_text(mini8_config(), **vocabulary, **LAYOUT)
    config = dataclasses.replace(config, image_token_id=nano["image_token_id"])
    (directory / "config.json").write_text(json.dumps(config_json(config)))
    rng = np.random.default_rng(0)
    lines = (" ".join(rng.choice(WORDS.split(), rng.integers(4, 60))) for _ in range(60))
    texts = directory / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    path = directory / "run.toml"
    path.write_text(RUN.format(model=directory, texts=texts, steps=STEPS, save_every=SAVE_EVERY))
    return path


def curve(directory: pathlib.Path) -> list[dict]:
    """The lines but for their times."""
    return [{name: value for name, value in line.items() if name != "wall"} for line in read_metrics(directory)]


@pytest.fixture(scope="module")
def whole(file) -> pathlib.Path:
    """The uninterrupted run on one device, and its export."""
    directory = file.parent / "whole"
    assert main(["train", str(file), "--out", str(directory), "--set", f"trainer.export={directory / 'export'}"]) == 0
    losses = [line["loss"] for line in curve(directory)]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.1
    return directory


@functools.cache
def mesh(**axes: int) -> Parallel:
    preset = parse_preset("test", {"axes": axes or {"data": 2, "expert": 2}})
    return preset.parallel(jax.devices()[: preset.devices])


def programs() -> int:
    """How many steps have been compiled."""
    return train_step._cache_size() + draft_train_step._cache_size()


def run(file: pathlib.Path, name: str, parallel: Parallel, *overrides: str) -> tuple[list[dict], pathlib.Path]:
    """The curve of a run that is built as the command builds it, and its export."""
    directory = file.parent / name
    made = build(read_config(file, TrainConfig, overrides), directory, parallel)
    before = programs()
    outcome = made.trainer.run()
    assert outcome.reason == "finished"
    # A state that lay elsewhere, or was bound to no device, would compile the second step anew.
    assert programs() == before + 1
    made.export(outcome.state, directory / "export", False)
    return curve(directory), directory / "export"


def assert_alike(ours: list[dict], wanted: list[dict], relative: float) -> None:
    assert [line["step"] for line in ours] == [line["step"] for line in wanted]
    for line, other in zip(ours, wanted, strict=True):
        assert line.keys() == other.keys()
        for name, value in other.items():
            ours, wanted = (list(x.values()) if isinstance(x, dict) else x for x in (line[name], value))
            np.testing.assert_allclose(ours, wanted, rtol=relative, atol=1e-6, err_msg=name)


def assert_same_layout(ours: pathlib.Path, wanted: pathlib.Path) -> None:
    assert CheckpointReader(ours).specs() == CheckpointReader(wanted).specs()


def test_a_mesh_gives_the_curve_of_one_device_and_its_state_to_it(file, whole):
    """The table of n-grams has other rows of padding there."""
    ours, export = run(file, "mesh", mesh(), "trainer.steps=2")
    assert_alike(ours, curve(whole)[:2], 1e-3)
    assert_same_layout(export, whole / "export")
    there = build(read_config(file, TrainConfig, ["trainer.steps=2"]), file.parent / "mesh", SINGLE)
    outcome = there.trainer.run()  # nothing is left to do but to restore
    text = load_config(file.parent).text
    assert outcome.state.params["engram_table_0"]["weight"].shape[0] == text.engram_num_embeddings[0]
    assert text.engram_num_embeddings[0] % mesh().mesh.size
    there.export(outcome.state, file.parent / "restored", False)
    restored, wanted = CheckpointReader(file.parent / "restored"), CheckpointReader(export)
    for name in wanted.specs():
        assert restored.read(name).tobytes() == wanted.read(name).tobytes(), name


@pytest.mark.parametrize(
    ("axes", "override", "message"),
    [
        ({"context": 2}, "data.batch_rows=4", "context: 2 shards; training needs rows undivided"),
        (
            {"data": 2, "expert": 2},
            "data.batch_rows=6",
            "data.batch_rows: 6 is not divisible by mesh axes data 2 × exp",
        ),
        (
            {"tensor": 4},
            "policy.dense_weights=true",
            r"wo_a/weight: policy\.dense_weights .* 32 × 32, .* 16 × 128 does",
        ),
        (
            {"tensor": 4},
            "policy.expert_weights=true",
            r"experts/w2/weight: policy\.expert_weights .* 1 × 32, .* 128 × 16",
        ),
        (
            {"tensor": 4},
            "policy.activations=true",
            r"wo_b/weight: policy\.activations .* 1 × 32, .* part of 128 × 16 do",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_weights_are_read(file, monkeypatch, axes, override, message):
    monkeypatch.setattr(training_build, "first_masters", None)
    with pytest.raises(MeshError, match=message):
        build(read_config(file, TrainConfig, [override]), file.parent / "none", mesh(**axes))
    config = load_config(file.parent)
    check_blocks(Model(Settings.for_training(config, RoundingPolicy.preset("full"), parallel=mesh(tensor=2))))
    there = Settings.for_training(config, RoundingPolicy.preset("full"), parallel=mesh(tensor=4))
    with pytest.raises(MeshError, match=r"^stages_0/attn/wo_a/weight: policy\.dense_weights"):
        check_blocks(Drafter(there))


def test_a_killed_run_goes_on_to_the_curve_of_one_that_was_not(file, whole):
    directory = file.parent / "killed"
    command = [sys.executable, "-m", "dsv41.cli", "train", str(file), "--out", str(directory)]
    environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (directory / "checkpoints" / str(SAVE_EVERY)).exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    begun = len(curve(directory))
    assert SAVE_EVERY <= begun < STEPS
    assert main(["train", str(file), "--out", str(directory)]) == 0
    assert curve(directory) == curve(whole)


def test_a_drafter_is_trained_on_a_mesh_as_on_one_device(file, whole):
    """Every column is an anchor: which are drawn depends on the device. Not so of held-out texts, whose anchors are
    the same on all meshes; they calibrate the confidences too."""
    options = ("trainer.steps=2", "dspark.anchors=48", "trainer.evaluate_every=2", "data.holdout=0.1")
    options += (f"model.directory={whole / 'export'}",)
    options += ("loss.replay_simulation=0",)
    one, export = run(file, "draft", SINGLE, *options)
    there, other = run(file, "draft-mesh", mesh(), *options)
    assert one[1]["loss"] != one[0]["loss"]
    assert_alike(there, one, 1e-3)
    assert {*one[1]["held_out"]} >= {"draft_accepted", "draft_survival_1"}
    assert_same_layout(other, export)
    # Chances of so young a drafter hardly depend on their temperatures.
    ours, wanted = (json.loads((path / CALIBRATION_FILE).read_text())["temperature"] for path in (other, export))
    np.testing.assert_allclose(ours, wanted, rtol=0.05)
