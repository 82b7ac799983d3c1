"""Device time by kernel, from a trace."""

from __future__ import annotations

import types

import pytest

from dsv41.evaluation import profile
from dsv41.evaluation.profile import KernelTime, kernel_times


def line(name: str, *events: tuple[str, float]):
    made = [types.SimpleNamespace(name=event, duration_ns=duration) for event, duration in events]
    return types.SimpleNamespace(name=name, events=made)


def test_kernels_of_all_streams_are_added_up_by_kind(tmp_path, monkeypatch):
    device = types.SimpleNamespace(
        name="/device:GPU:0",
        lines=[
            line("Stream #1(compute)", ("fusion_3", 2000.0), ("gemm", 500.0), ("fusion.12", 1000.0)),
            line("Stream #2(memcpy)", ("fusion", 1000.0)),
            line("XLA Modules", ("jit_step", 9000.0)),
        ],
    )
    host = types.SimpleNamespace(name="/host:CPU", lines=[line("Stream #1", ("fusion", 7000.0))])
    trace = types.SimpleNamespace(planes=[host, device])
    monkeypatch.setattr(profile, "ProfileData", types.SimpleNamespace(from_file=lambda path: trace))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "host.xplane.pb").touch()
    assert kernel_times(tmp_path) == [KernelTime("fusion", 3, 4.0), KernelTime("gemm", 1, 0.5)]


def test_a_folder_without_a_trace_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no trace"):
        kernel_times(tmp_path)
