"""The trainer: one curve whatever interrupts it, what stays on disk, and steps that are not finite."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41.checkpoint import CheckpointError
from dsv41.training.checkpoints import Checkpoints, abstract_state, restore_parameters
from dsv41.training.config import TrainConfigError
from dsv41.training.metrics import MetricsLog, read_metrics
from dsv41.training.plots import plot_runs
from dsv41.training.trainer import Trainer, TrainerConfig
from tests.train_process import BALLAST, Batches, Config, fresh_state, run, train_step

ROOT = pathlib.Path(__file__).parent.parent


def curve(directory: pathlib.Path) -> list[dict]:
    """The lines but for their times."""
    return [{name: value for name, value in line.items() if name != "wall"} for line in read_metrics(directory)]


def saved(directory: pathlib.Path) -> list[int]:
    return sorted(int(path.name) for path in (directory / "checkpoints").iterdir())


def test_the_curve_of_a_run_in_two_parts_is_that_of_one(tmp_path):
    options = {"save_every": 3, "evaluate_every": 2}
    whole = run(tmp_path / "whole", Batches(), steps=8, **options)
    assert run(tmp_path / "parts", Batches(), steps=4, **options).reason == "finished"
    parts = run(tmp_path / "parts", Batches(), steps=8, **options)
    lines = curve(tmp_path / "whole")
    assert [line["step"] for line in lines] == [*range(1, 9)]
    assert [line["step"] for line in lines if "held_out" in line] == [2, 4, 6, 8]
    assert len({line["loss"] for line in lines}) == 8
    assert curve(tmp_path / "parts") == lines
    jax.tree.map(np.testing.assert_array_equal, parts.state, whole.state)
    walls = [line["wall"] for line in read_metrics(tmp_path / "parts")]
    assert walls == sorted(walls)


def test_a_finished_run_does_nothing_more(tmp_path):
    run(tmp_path, Batches(), steps=2)
    lines = (tmp_path / "metrics.jsonl").read_bytes()
    outcome = run(tmp_path, Batches(), steps=2)
    assert (outcome.reason, outcome.step, int(outcome.state.step)) == ("finished", 2, 2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[dict]:
    """The curve of the run that other processes are interrupted in."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    run(directory, Batches(), ballast=BALLAST, steps=30, save_every=4, evaluate_every=5)
    return curve(directory)


def start(directory: pathlib.Path, pace: float) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.train_process", str(directory), "30", "4", str(pace)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def unfinished(directory: pathlib.Path) -> list[pathlib.Path]:
    """Checkpoints that have no name yet, of a run that has one already."""
    paths = list((directory / "checkpoints").glob("*"))
    return [path for path in paths if not path.name.isdecimal()] if any(p.name.isdecimal() for p in paths) else []


def kill_while_saving(child: subprocess.Popen, directory: pathlib.Path) -> None:
    """Kills a process in the middle of writing a checkpoint: it is stopped for as long as it takes to look."""
    while child.poll() is None:
        if unfinished(directory):
            os.kill(child.pid, signal.SIGSTOP)
            if unfinished(directory):
                child.kill()
                child.communicate()
                assert unfinished(directory)
                return
            os.kill(child.pid, signal.SIGCONT)
        time.sleep(0.001)
    raise AssertionError(child.communicate()[1])


def terminate_after(child: subprocess.Popen, directory: pathlib.Path, lines: int) -> int:
    """Sends SIGTERM when the curve has so many lines; returns the exit code."""
    while child.poll() is None and len(read_metrics(directory)) < lines:
        time.sleep(0.01)
    child.terminate()
    _, errors = child.communicate()
    assert "Traceback" not in errors, errors
    return child.returncode


def test_real_signals_leave_no_trace_in_the_curve(tmp_path, uninterrupted):
    kill_while_saving(start(tmp_path, pace=0.1), tmp_path)
    killed = curve(tmp_path)
    assert 4 < killed[-1]["step"] < 30
    assert killed == uninterrupted[: len(killed)]
    assert terminate_after(start(tmp_path, pace=0.1), tmp_path, lines=len(killed) + 3) == 128 + signal.SIGTERM
    assert not unfinished(tmp_path)
    interrupted = curve(tmp_path)
    assert len(killed) < len(interrupted) < 30
    # What a signal interrupts is saved before it ends.
    assert saved(tmp_path)[-1] == interrupted[-1]["step"]
    last = start(tmp_path, pace=0)
    _, errors = last.communicate()
    assert last.returncode == 0, errors
    assert curve(tmp_path) == uninterrupted


def test_the_newest_checkpoints_stay(tmp_path):
    run(tmp_path, Batches(), steps=9, save_every=2, keep=2)
    assert saved(tmp_path) == [8, 9]


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    state = fresh_state(ballast=BALLAST)
    wanted = jax.tree.map(np.array, state)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(0, state, {"given": 0})
        for batch, _ in zip(iter(Batches().__next__, None), range(5), strict=False):
            state, _ = train_step(state, batch)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        step, restored, data = checkpoints.restore(abstract_state(state))
    assert (step, data) == (0, {"given": 0})
    jax.tree.map(np.testing.assert_array_equal, restored, wanted)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_a_sharded_state_comes_back_to_where_another_mesh_wants_it(tmp_path):
    def placed(devices: int, value: jax.Array) -> jax.Array:
        mesh = Mesh(np.asarray(jax.devices()[:devices]), ("data",))
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec("data")))

    values = jnp.arange(24, dtype=jnp.float32).reshape(8, 3)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, {"moments": placed(4, values), "none": None}, None)
    like = abstract_state({"moments": placed(2, values), "none": None})
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        _, restored, _ = checkpoints.restore(like)
    assert restored["moments"].sharding == like["moments"].sharding
    np.testing.assert_array_equal(restored["moments"], values)
    assert restored["none"] is None


@pytest.mark.parametrize("now", [6, 9])
def test_rows_of_padding_may_be_others_than_they_were(tmp_path, now):
    """Five rows of a table are its own, of which a mesh made eight."""

    def state(rows: int) -> dict:
        table = jnp.zeros((rows, 3)).at[:5].set(jnp.arange(1, 16, dtype=jnp.float32).reshape(5, 3))
        return {"params": {"table": table, "weight": jnp.ones((8, 3))}, "moments": {"x": {"table": 2 * table}}}

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, state(8), None)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        _, restored, _ = checkpoints.restore(abstract_state(state(now)), {("table",): 5})
        jax.tree.map(np.testing.assert_array_equal, restored, state(now))
        with pytest.raises(CheckpointError, match=r"2 leaves (.|\n)*params/table: float32 \[8, 3\] there"):
            checkpoints.restore(abstract_state(state(now)), {("weight",): 5})
        with pytest.raises(CheckpointError, match="2 leaves"):  # of another model
            checkpoints.restore(abstract_state(state(now)), {("table",): 7 if now == 6 else 9})
    parameters = restore_parameters(tmp_path, abstract_state(state(now)["params"]), {("table",): 5})
    jax.tree.map(np.testing.assert_array_equal, parameters, state(now)["params"])


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"weight": jnp.zeros((4, 3))}, r"weight: float32 \[4, 2\] there, float32 \[4, 3\] now"),
        ({"weight": jnp.zeros((4, 2), jnp.bfloat16)}, r"weight: float32 \[4, 2\] there, bfloat16 \[4, 2\] now"),
        ({"weight": jnp.zeros((4, 2)), "bias": jnp.zeros(2)}, r"bias: nothing there, float32 \[2\] now"),
        ({}, r"weight: float32 \[4, 2\] there, nothing now"),
    ],
)
def test_a_state_of_another_form_is_refused(tmp_path, other, problem):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, {"weight": jnp.zeros((4, 2))}, None)
    with (
        Checkpoints(tmp_path, keep=1) as checkpoints,
        pytest.raises(CheckpointError, match=rf"checkpoints/3: 1 leaves are not of this state:\s+{problem}$"),
    ):
        checkpoints.restore(abstract_state(other))


def test_a_step_that_is_not_finite_stops_the_run(tmp_path, capsys):
    before = run(tmp_path, Batches(), steps=4, save_every=4).state
    outcome = run(tmp_path, Batches(poisoned=(7,)), steps=20, save_every=100)
    assert outcome == ("not finite", 7, None, None)
    lines = curve(tmp_path)
    assert lines[-1]["step"] == 7
    assert (lines[-1]["skipped"], lines[-1]["bad"], lines[-1]["gradient_norm"]) == (1.0, "params/second/weight", None)
    assert "step 7: the gradient of params/second/weight is not finite; the last checkpoint is of step 4" in (
        capsys.readouterr().out
    )
    # The last good checkpoint is what it was, and the run goes on from there as if nothing had happened.
    assert saved(tmp_path) == [4]
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        step, state, _ = checkpoints.restore(abstract_state(before))
    assert step == 4
    jax.tree.map(np.testing.assert_array_equal, state, before)
    run(tmp_path, Batches(), steps=8, save_every=100)
    run(tmp_path / "clean", Batches(), steps=8, save_every=100)
    assert curve(tmp_path) == curve(tmp_path / "clean")


def test_a_step_that_is_not_finite_is_skipped(tmp_path, capsys):
    before = run(tmp_path, Batches(), steps=2).state
    data = Batches(poisoned=(3,), lost=(4,))
    after = run(tmp_path, data, steps=4, on_nan="skip", save_every=1).state
    assert int(after.step) == 4
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, after.optimizer, before.optimizer)
    lines = curve(tmp_path)
    assert [line.get("bad") for line in lines] == [None, None, "params/second/weight", "loss"]
    assert lines[3]["loss"] is None
    assert np.isfinite(lines[2]["loss"])
    shown = capsys.readouterr().out
    assert "step 4: loss is not finite; skipped" in shown
    assert run(tmp_path, data, steps=6, on_nan="skip").reason == "finished"
    assert [line["skipped"] for line in curve(tmp_path)] == [0, 0, 1, 1, 0, 0]


def test_another_configuration_is_refused_and_nothing_touched(tmp_path):
    run(tmp_path, Batches(), steps=2)
    there = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(TrainConfigError, match=r"seed: 0 there, 5 now; trainer.micro_batches: 1 there, 2 now$"):
        run(tmp_path, Batches(), seed=5, steps=9, micro_batches=2)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == there
    run(tmp_path, Batches(), steps=3, keep=1, save_every=7, log_every=2)
    assert json.loads((tmp_path / "train.json").read_text())["trainer.keep"] == 1


def test_fresh_refuses_a_run(tmp_path):
    run(tmp_path, Batches(), steps=1, fresh=True)
    with pytest.raises(CheckpointError, match="has a run already"):
        run(tmp_path, Batches(), steps=1, fresh=True)


def test_data_that_ends_too_early_is_an_error(tmp_path):
    class Short(Batches):
        def __next__(self):
            if self.get_state()["given"] == 3:
                raise StopIteration
            return super().__next__()

    with pytest.raises(TrainConfigError, match=r"trainer\.steps: 5, and the data ends after 3"):
        run(tmp_path, Short(), steps=5)


@pytest.fixture
def _interruptible():
    """As in a terminal: a process that a shell starts in the background ignores the key."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_the_interrupt_key_saves_and_a_second_one_ends_at_once(tmp_path):
    class Interrupting(Batches):
        presses = 1

        def __next__(self):
            batch = super().__next__()
            if self.get_state()["given"] == 3:
                for _ in range(self.presses):
                    signal.raise_signal(signal.SIGINT)
            return batch

    outcome = run(tmp_path, Interrupting(), steps=9)
    assert (outcome.reason, outcome.step, outcome.signal) == ("interrupted", 3, signal.SIGINT)
    assert saved(tmp_path) == [3]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    twice = Interrupting()
    twice.presses = 2
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "twice", twice, steps=9)
    assert saved(tmp_path / "twice") == []


def test_metrics_of_a_step_are_not_waited_for_before_the_next(tmp_path):
    order = []

    class Late:
        def __init__(self, step: int) -> None:
            self._step = step

        def __array__(self, dtype=None, copy=None) -> np.ndarray:
            order.append(f"read {self._step}")
            return np.ones((), np.float32)

    def step(state, batch):
        number = len([entry for entry in order if entry.startswith("step")]) + 1
        order.append(f"step {number}")
        return state, {"loss": Late(number)}

    options = TrainerConfig(steps=3)
    Trainer(step, fresh_state(), Batches(), None, options, tmp_path, Config(options)).run()
    assert order == ["step 1", "step 2", "read 1", "step 3", "read 2", "read 3"]


def test_a_curve_is_cut_to_where_the_run_goes_on(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        for step in range(1, 6):
            log.write(step, step / 2, {"loss": np.float32(0.1), "count": np.int32(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "wal')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    with MetricsLog(tmp_path, 9) as log:
        assert log.wall == 2.5
    with MetricsLog(tmp_path, 3) as log:
        assert log.wall == 1.5
        log.write(4, 9.0, {"loss": float("inf"), "held_out": {"bits_per_byte": np.float32(2.5)}})
    assert read_metrics(tmp_path) == [
        *({"step": n, "wall": n / 2, "loss": 0.1, "count": n} for n in (1, 2, 3)),
        {"step": 4, "wall": 9.0, "loss": None, "held_out": {"bits_per_byte": 2.5}},
    ]


def test_runs_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    lines = [
        {"step": n, "loss": 5 / n, "learning_rate": 0.1, "max_load": 2, "held_out": {"bits_per_byte": 3 / n}}
        for n in (1, 2, 3)
    ]
    plot_runs({"a": lines, "b": lines[:2]}, tmp_path / "runs.svg")
    picture = (tmp_path / "runs.svg").read_text()
    for text in ("bits per byte", "a: held_out.bits_per_byte", "b: loss", "learning rate"):
        assert f"<!-- {text} -->" in picture
    assert "accepted" not in picture
    assert picture.count('<g id="axes_') == 4
    assert [path.name for path in tmp_path.iterdir()] == ["runs.svg"]
    with pytest.raises(ValueError, match="c: no step with a loss yet"):
        plot_runs({"c": []}, tmp_path / "none.png")
