"""``dsv41 train`` and ``dsv41 curves`` as commands: errors in one line, before anything is computed or written."""

from __future__ import annotations

import json

import jax
import pytest

from dsv41.cli import main

SMALL = """
[model]
directory = "{model}"
[data]
files = ["texts.txt"]
length = 64
batch_rows = 2
[schedule]
warmup = 0
decay_from = 1
steps = 2
[trainer]
steps = 2
"""


@pytest.fixture
def file(tmp_path, golden_dir):
    path = tmp_path / "run.toml"
    path.write_text(SMALL.format(model=golden_dir / "mini8" / "f32"))
    return path


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule.steps=0"], "schedule.steps: 0 is not positive"),
        (["optimizer.momentum=1"], "optimizer.momentum: 1.0 is not in [0, 1)"),
        (["loss.balance=-1"], "loss.balance: -1.0 is negative or not finite"),
        (["data.corpus=kjv"], "data.corpus: 'kjv' and files"),
        (["data.corpus=none", "data.files="], "data.corpus: 'none' is none of"),
        (["policy.preset=fp8"], "policy.preset: 'fp8' is none of off, cache, full"),
        (["policy.windows=true"], "policy.windows: True: no such field; did you mean window?"),
        (["dspark.anchors=0"], "dspark.anchors: 0 is not positive"),
        (["trainer.on_nan=ignore"], "trainer.on_nan: 'ignore' is none of stop, skip"),
        (["bias_rate=-1"], "bias_rate: -1.0 is below 0"),
        (["trainer.mesh=nowhere"], "mesh 'nowhere': no such preset or file"),
        (["model.directory=nowhere"], "nowhere"),
        ([], "has neither a tokenizer.json nor the packaged vocabulary"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(file, tmp_path, capsys, overrides, message):
    options = [part for override in overrides for part in ("--set", override)]
    assert main(["train", str(file), "--out", str(tmp_path / "out"), *options]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("dsv41: error: ")
    assert shown.count("\n") == 1
    assert message in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("processes", "name", "message"),
    [
        (1, "there", "trainer.export: {} is there already"),
        (2, "new", "trainer.export: {}: none of 2 processes has the"),
    ],
)
def test_an_export_that_cannot_be_written_is_refused_before_the_run(
    file, tmp_path, capsys, monkeypatch, processes, name, message
):
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    export = tmp_path / name
    assert main(["train", str(file), "--out", str(tmp_path / "out"), "--set", f"trainer.export={export}"]) == 2
    assert message.format(export) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_curves_of_runs_are_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        lines = [{"step": n, "wall": n, "loss": 4 / n} for n in (1, 2)]
        (tmp_path / run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    directories = [str(tmp_path / run) for run in ("a", "b")]
    assert main(["curves", *directories, "--out", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert main(["curves", *directories, "--out", str(tmp_path / "both.gif")]) == 2
    assert "neither .png nor .svg" in capsys.readouterr().err
    assert main(["curves", str(tmp_path / "none"), "--out", str(tmp_path / "x.png")]) == 2
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1')
    assert main(["curves", directories[0], "--out", str(tmp_path / "x.png")]) == 2
    assert "no step with a loss yet" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
