"""The TPU's dense linear map in interpret mode."""

from __future__ import annotations

import pytest

from pallas_kernels import backend
from pallas_kernels.block_linear import tpu
from pallas_kernels.formats import DenseFormat
from tests.pallas_kernels.base.block_linear import BlockLinearTests, case


class TestBlockLinear(BlockLinearTests):
    backend = "tpu"

    @pytest.fixture(autouse=True)
    def _interpreted(self, monkeypatch):
        # Small tiles, so that a small product has several, and one is not full.
        for name, size in {"_OUTPUTS": 32, "_WHOLE_SCALES": 32, "_ROWS": 4}.items():
            monkeypatch.setattr(tpu, name, size)
        with backend.interpret():
            yield

    def test_the_last_tile_is_part_of_one(self, monkeypatch):
        for name in ("_OUTPUTS", "_WHOLE_SCALES"):
            monkeypatch.setattr(tpu, name, 64)
        self.check(case(out=96), DenseFormat("float32"))
