"""The TPU's dense linear map in interpret mode."""

from __future__ import annotations

import pytest

from pallas_kernels import backend
from tests.pallas_kernels.base.block_linear import BlockLinearTests


class TestBlockLinear(BlockLinearTests):
    backend = "tpu"

    @pytest.fixture(autouse=True)
    def _interpreted(self):
        with backend.interpret():
            yield
