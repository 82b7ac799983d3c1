"""The Triton kernels of the hyper-connections: interpreted, and on a card."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pallas_kernels import backend
from pallas_kernels.mhc import gpu, gpu_few, gpu_many, reference
from tests.pallas_kernels.base.mhc import STATIC, MhcTests, case, close


class GpuMhcTests(MhcTests):
    backend = "gpu"

    @pytest.mark.parametrize(("dtype", "updates"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
    def test_many_tokens_take_other_kernels(self, monkeypatch, dtype: str, updates: bool):
        monkeypatch.setattr(gpu, "_FEW_TOKENS", 4)
        # Rows of more than one step, which are no power of two.
        monkeypatch.setattr(gpu_many, "_COLUMNS", 64)
        arrays = case((19,), width=96, dtype=dtype, updates=updates)
        close(self.run("mhc", arrays, **STATIC), reference.mhc(**arrays, **STATIC))

    def test_few_tokens_may_fill_several_tiles_and_steps(self, monkeypatch):
        monkeypatch.setattr(gpu_few, "_TILES", (16,))
        monkeypatch.setattr(gpu_few, "_PROGRAMS", 2)
        monkeypatch.setattr(gpu_few, "_VALUES", 64)
        arrays = case((19,), width=96, dtype="bfloat16")
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
    for width in (65, 2 * gpu.WIDEST):
        assert f"width {width}" in gpu.unsupported(**(arrays | {"streams": jnp.zeros((2, 4, width))}), **STATIC)
    assert "3 streams" in gpu.unsupported(**(arrays | {"streams": jnp.zeros((2, 3, 64))}), **STATIC)
    half = arrays["update"]._replace(y=arrays["update"].y.astype(jnp.bfloat16))
    assert "y is bfloat16" in gpu.unsupported(**(arrays | {"update": half}), **STATIC)
