"""The TPU's routed experts in interpret mode."""

from __future__ import annotations

import pytest

from pallas_kernels import backend
from tests.pallas_kernels.base.expert_matmul import ExpertMatmulTests


class TestExpertMatmul(ExpertMatmulTests):
    backend = "tpu"

    @pytest.fixture(autouse=True)
    def _interpreted(self):
        with backend.interpret():
            yield
