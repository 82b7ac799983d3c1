"""The Triton kernels of the hyper-connections: interpreted, and on a card."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pallas_kernels import backend
from pallas_kernels.mhc import gpu, reference
from tests.pallas_kernels.base.mhc import STATIC, MhcTests, case, close


class GpuMhcTests(MhcTests):
    backend = "gpu"

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_many_tokens_take_another_product(self, monkeypatch, dtype: str):
        monkeypatch.setattr(gpu, "_FEW_TOKENS", 4)
        arrays = case((13,), width=64, dtype=dtype)
        close(self.run("mhc", arrays, **STATIC), reference.mhc(**arrays, **STATIC))

    def test_rows_that_are_no_power_of_two(self, monkeypatch):
        monkeypatch.setattr(gpu, "_COLUMNS", 64)
        arrays = case((3,), width=96, dtype="bfloat16")
        close(self.run("mhc", arrays, **STATIC), reference.mhc(**arrays, **STATIC))


class TestInterpreted(GpuMhcTests):
    def run(self, operation: str, arrays: dict, **static):
        with backend.interpret():
            return super().run(operation, arrays, **static)


@pytest.mark.gpu
class TestOnACard(GpuMhcTests):
    pass


def test_reasons_against_the_kernels():
    arrays = case((2,), width=64)
    assert gpu.unsupported(**arrays, **STATIC) is None
    wide = arrays | {"streams": jnp.zeros((2, 4, 2 * gpu._WIDEST))}
    assert "wider than" in gpu.unsupported(**wide, **STATIC)
    assert "3 streams" in gpu.unsupported(**(arrays | {"streams": jnp.zeros((2, 3, 64))}), **STATIC)
    half = arrays["update"]._replace(y=arrays["update"].y.astype(jnp.bfloat16))
    assert "y is bfloat16" in gpu.unsupported(**(arrays | {"update": half}), **STATIC)
