"""The TPU's index selection in interpret mode."""

from __future__ import annotations

import pytest

from pallas_kernels import backend
from tests.pallas_kernels.base.index_select import IndexSelectTests


class TestIndexSelect(IndexSelectTests):
    backend = "tpu"

    @pytest.fixture(autouse=True)
    def _interpreted(self):
        with backend.interpret():
            yield
