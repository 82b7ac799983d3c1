"""Runs of several processes: two of four pretended devices each, and what start-up makes of the environment."""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from dsv41.checkpoint import RandomSource
from dsv41.checkpoint.layout import STORAGE_BYTES
from dsv41.checkpoint.orbax import restore_variables
from dsv41.checkpoint.placement import flatten_tree
from dsv41.commands.options import OptionError, add_mesh_options, mesh_of
from dsv41.sharding import distributed
from dsv41.sharding.rules import MeshError
from tests.mesh_process import AXES, decoded, loaded, single_model
from tests.test_sharded_steps import meshed

ROOT = pathlib.Path(__file__).parent.parent
PROCESSES = 2
# Everything that tells of other processes.
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS")
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_GPUS_ON_NODE": "8",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> pathlib.Path:
    """The directory in which two processes left what they found."""
    out = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={8 // PROCESSES}")
    environment = os.environ | {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.mesh_process", address, str(PROCESSES), str(process), str(out)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(PROCESSES)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, error in zip(running, errors, strict=True):
        assert process.returncode == 0, error
    return out


def test_two_processes_give_the_tokens_of_one(outcomes):
    model = meshed(single_model(), AXES)
    tokens = decoded(model, loaded(model)[0])
    assert len(np.unique(tokens)) > tokens.shape[1]
    for process in range(PROCESSES):
        there = np.load(outcomes / f"{process}.npz")
        assert there["leader"] == (process == 0)
        np.testing.assert_array_equal(there["tokens"], tokens)


def test_each_process_reads_what_its_devices_hold(outcomes):
    model = single_model()
    specs = RandomSource(model.settings.config, 0).specs()
    read = loaded(model)[1]
    size = lambda name: math.prod(specs[name][1]) * STORAGE_BYTES[specs[name][0]]  # noqa: E731
    experts = sum(size(name) for name in specs if ".ffn.experts." in name and name.startswith("layers."))
    table = "layers.0.engram.embed.weight"
    rows = specs[table][1][0]
    half = -(-rows // 8) * 4
    for process, own in enumerate((half, rows - half)):
        expected = read - experts - size(table) + experts // 2 + size(table) // rows * own
        assert np.load(outcomes / f"{process}.npz")["read"] == expected


def test_what_two_processes_wrote_one_reads(outcomes):
    model = single_model()
    restored = flatten_tree(restore_variables(outcomes / "orbax", model))
    for path, leaf in flatten_tree(loaded(model)[0]).items():
        assert restored[path].sharding == leaf.sharding
        assert np.asarray(restored[path]).tobytes() == np.asarray(leaf).tobytes(), path


# Start-up


@pytest.fixture
def joined(monkeypatch) -> list[tuple]:
    """What JAX would have been asked, in an environment that tells of nothing."""
    for name in os.environ:
        if name in VARIABLES or name.startswith(("SLURM_", "OMPI_", "TPU_", "MEGASCALE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    calls: list[tuple] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: calls.append((args, options)))
    return calls


def test_one_process_has_nothing_to_join(joined, monkeypatch):
    distributed.initialize()
    distributed.initialize(processes=1)
    distributed.initialize("localhost:1", 1, 0)
    for name, value in (SLURM | {"SLURM_NTASKS": "1"}).items():
        monkeypatch.setenv(name, value)
    distributed.initialize()
    assert joined == []


def test_processes_are_joined_as_they_are_told(joined, monkeypatch):
    distributed.initialize("host:1234", 2, 1)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "other:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    distributed.initialize(process=3)
    assert [args for args, _ in joined] == [("host:1234", 2, 1), ("other:1", 4, 3)]


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        (SLURM, list(range(8))),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, None),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, None),
    ],
)
def test_launchers_tell_the_rest(joined, monkeypatch, environment, devices):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    distributed.initialize()
    assert joined == [((None, None, None), {"local_device_ids": devices})]


def test_a_host_with_tpus_asks_for_its_neighbours(joined, monkeypatch):
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY")
    distributed.initialize()
    assert joined == [((), {})]

    def alone(message: str) -> None:
        raise ValueError(message)

    monkeypatch.setattr(jax.distributed, "initialize", lambda: alone("coordinator_address should be defined."))
    distributed.initialize()
    monkeypatch.setattr(jax.distributed, "initialize", lambda: alone("unsupported worker-network-endpoints"))
    with pytest.raises(ValueError, match="unsupported worker"):
        distributed.initialize()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("host:1", None, None), r"--coordinator .* given, but not --processes \(JAX_NUM_PROCESSES\), --process "),
        ((None, 2, 0), r"given, but not --coordinator \(JAX_COORDINATOR_ADDRESS\);"),
        (("host", 2, 0), "--coordinator: 'host' is not HOST:PORT"),
        (("host:1", 2, 2), "--process: 2 of --processes 2"),
        (("host:1", 0, 0), "--processes: 0 is below 1"),
    ],
)
def test_what_is_missing_is_named(joined, given, message):
    with pytest.raises(MeshError, match=message):
        distributed.initialize(*given)
    assert joined == []


def test_a_number_in_the_environment_is_checked(joined, monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(MeshError, match="JAX_NUM_PROCESSES: 'two'"):
        distributed.initialize()


def test_options_give_a_mesh(joined, tmp_path):
    parser = argparse.ArgumentParser()
    add_mesh_options(parser)
    assert mesh_of(parser.parse_args([])) is None
    with pytest.raises(OptionError, match="--processes needs --mesh"):
        mesh_of(parser.parse_args(["--processes", "2"]))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"axes": {"expert": len(jax.devices())}}))
    parallel = mesh_of(parser.parse_args(["--mesh", str(path)]))
    assert parallel.parts("experts") == parallel.mesh.size == len(jax.devices())
    with pytest.raises(MeshError, match=r"v6e-16x16: .* needs 256 devices, there are"):
        mesh_of(parser.parse_args(["--mesh", "v6e-16x16"]))
    with pytest.raises(SystemExit):
        parser.parse_args(["--process", "-1"])
    mesh_of(parser.parse_args(["--mesh", str(path), "--coordinator", "h:1", "--processes", "2", "--process", "0"]))
    assert [args for args, _ in joined] == [("h:1", 2, 0)]
