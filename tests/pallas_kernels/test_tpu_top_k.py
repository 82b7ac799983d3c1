"""The TPU's top-k in interpret mode."""

from __future__ import annotations

import pytest

from pallas_kernels import backend
from pallas_kernels.top_k import tpu
from tests.pallas_kernels.base.top_k import TopKTests


class TestTopK(TopKTests):
    backend = "tpu"

    @pytest.fixture(autouse=True)
    def _interpreted(self, monkeypatch):
        # Small blocks, so that a few rows make several, and one is not full.
        for name, size in {"_BLOCK_ROWS": 2, "_PASS_TILES": 2}.items():
            monkeypatch.setattr(tpu, name, size)
        with backend.interpret():
            yield
