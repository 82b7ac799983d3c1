"""The hyper-connections on XLA, and the operation as the model calls it."""

from __future__ import annotations

from tests.pallas_kernels.base.mhc import MhcTests


class TestMhc(MhcTests):
    backend = "xla"
