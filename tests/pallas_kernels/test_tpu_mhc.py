"""The TPU's hyper-connections in interpret mode."""

from __future__ import annotations

import pytest

from pallas_kernels import backend
from pallas_kernels.mhc import tpu
from tests.pallas_kernels.base.mhc import MhcTests


class TestMhc(MhcTests):
    backend = "tpu"

    @pytest.fixture(autouse=True)
    def _interpreted(self, monkeypatch):
        # Small tiles, so that a few rows make several, and one is not full.
        for name, size in {"_ROWS": 4, "_CHANNELS": 64}.items():
            monkeypatch.setattr(tpu, name, size)
        with backend.interpret():
            yield
