"""The TPU's hyper-connections in interpret mode."""

from __future__ import annotations

import pytest

from pallas_kernels import backend
from tests.pallas_kernels.base.mhc import MhcTests


class TestMhc(MhcTests):
    backend = "tpu"

    @pytest.fixture(autouse=True)
    def _interpreted(self):
        with backend.interpret():
            yield
