"""The TPU's routed experts in interpret mode."""

from __future__ import annotations

import pytest

from pallas_kernels import backend
from pallas_kernels.expert_matmul import tpu
from tests.pallas_kernels.base.expert_matmul import ExpertMatmulTests


class TestExpertMatmul(ExpertMatmulTests):
    backend = "tpu"

    @pytest.fixture(autouse=True)
    def _interpreted(self, monkeypatch):
        # Small tiles, so that small matrices and few choices have several.
        for name, size in {"_TILE": 32, "_DECODED": 16, "_CHUNK": 8}.items():
            monkeypatch.setattr(tpu, name, size)
        with backend.interpret():
            yield
