"""The TPU's index selection in interpret mode."""

from __future__ import annotations

import pytest

from pallas_kernels import backend
from pallas_kernels.index_select import tpu
from tests.pallas_kernels.base.index_select import IndexSelectTests


class TestIndexSelect(IndexSelectTests):
    backend = "tpu"

    @pytest.fixture(autouse=True)
    def _interpreted(self, monkeypatch):
        # Few pages a step, so that short requests take several steps.
        for name, size in {"_PAGES": 3}.items():
            monkeypatch.setattr(tpu, name, size)
        with backend.interpret():
            yield
