"""Start-up of a run on several hosts: every process finds the others before the first computation.

All processes run the same program in the same order, each on its own devices; a mesh spans the devices of all.
"""

from __future__ import annotations

import os
import re

import jax

from dsv41.sharding.rules import MeshError

_ADDRESS, _PROCESSES, _PROCESS = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def initialize(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Joins the processes of a run; does nothing where there is one, or where they are joined already.

    It must come before anything that asks JAX for devices. What is not given is taken from the environment
    (``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES``, ``JAX_PROCESS_ID``), then from what started the processes: a
    TPU pod (also on GKE, also several slices), Slurm or Open MPI, as JAX detects them. Under Slurm with one task a
    node a process takes all GPUs that the node lends; else each takes one, unless ``JAX_LOCAL_DEVICE_IDS`` says more.

    Args:
      coordinator: ``host:port`` of process 0, as all processes reach it.
      processes: how many there are.
      process: which one this is, from 0.

    Raises:
      MeshError: some of the three are missing, or one has a wrong value.
    """
    if jax.distributed.is_initialized():
        return
    coordinator = coordinator or os.environ.get(_ADDRESS)
    processes = _environment(_PROCESSES) if processes is None else processes
    process = _environment(_PROCESS) if process is None else process
    given = {
        f"--coordinator ({_ADDRESS})": coordinator,
        f"--processes ({_PROCESSES})": processes,
        f"--process ({_PROCESS})": process,
    }
    missing = [name for name, value in given.items() if value is None]
    launcher = _launcher()
    if missing and launcher is None:
        if len(missing) == len(given):
            _initialize_tpu()
            return
        if processes == 1:
            return
        there = [name for name, value in given.items() if value is not None]
        raise MeshError(
            f"several processes: {', '.join(there)} given, but not {', '.join(missing)}; neither Slurm nor Open MPI "
            "nor a TPU pod says it"
        )
    _check(coordinator, processes, process)
    if processes == 1:
        return
    if not missing:
        # Detection would still ask the launcher for devices, and take one GPU a process.
        jax.distributed.initialize(coordinator, processes, process, cluster_detection_method="deactivate")
    else:
        jax.distributed.initialize(coordinator, processes, process, local_device_ids=_local_devices())


def is_leader() -> bool:
    """Whether this process is the one that prints and writes files: the first of a run. Starts the back end."""
    return jax.process_index() == 0


def _environment(name: str) -> int | None:
    value = os.environ.get(name)
    if value is None:
        return None
    if not value.isdecimal():
        raise MeshError(f"{name}: {value!r} is no number of processes")
    return int(value)


def _check(coordinator: str | None, processes: int | None, process: int | None) -> None:
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise MeshError(f"--coordinator: {coordinator!r} is not HOST:PORT")
    if processes is not None and processes < 1:
        raise MeshError(f"--processes: {processes} is below 1")
    if process is not None and (process < 0 or (processes is not None and process >= processes)):
        raise MeshError(f"--process: {process} of --processes {processes}; they are counted from 0")


def _launcher() -> str | None:
    """What started several processes, as far as the environment tells."""
    count = os.environ.get
    if all(name in os.environ for name in _SLURM) and count("SLURM_NTASKS") != "1":
        return "Slurm"
    if count("OMPI_COMM_WORLD_SIZE", "1") != "1":
        return "Open MPI"
    hosts = count("TPU_PROCESS_ADDRESSES") or count("TPU_WORKER_HOSTNAMES") or ""
    if "," in hosts or "TPU_PROCESS_ADDRESSES_PATH" in os.environ or count("MEGASCALE_NUM_SLICES", "1") != "1":
        return "TPU pod"
    return None


def _initialize_tpu() -> None:
    """TPU virtual machines are told their neighbours by a server, which JAX asks."""
    if "TPU_SKIP_MDS_QUERY" in os.environ:  # so JAX says that this host has no TPU
        return
    try:
        jax.distributed.initialize()
    except ValueError as error:
        if "coordinator_address" not in str(error):
            raise
        # A TPU, but no server that knows a coordinator: this host is alone.


def _local_devices() -> list[int] | None:
    """GPUs of this process where a Slurm node runs one: JAX would take the first only."""
    one_a_node = re.fullmatch(r"1(\(x\d+\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if not one_a_node or not gpus.isdecimal() or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    return list(range(int(gpus)))
