"""The router's GPU kernels, interpreted, and on the GPU; what they leave to XLA."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.router import gpu
from tests.pallas_kernels.base.router import SCALE, RouterTests, case


class GpuRouterTests(RouterTests):
    backend = "gpu"
    dtype = "bfloat16"
    # A width that is cut, into two parts.
    sizes: ClassVar[dict] = {"hidden": 1024}


class TestInterpreted(GpuRouterTests):
    @pytest.fixture(autouse=True)
    def interpreted(self):
        with backend.interpret():
            yield


@pytest.mark.gpu
class TestOnACard(GpuRouterTests):
    def test_the_official_sizes(self):
        # Whole numbers, whose sums do not depend on their order: nearly equal scores could change places.
        rng = np.random.default_rng(0)
        for rows in (1, 64, 1024):
            arrays = case(rows + 3, 384, 5120, "bfloat16")
            for name in ("x", "weight"):
                arrays[name] = jnp.asarray(rng.integers(-1, 2, arrays[name].shape), jnp.bfloat16)
            for name in ("bias", "image_bias"):
                arrays[name] = jnp.asarray(100 * rng.integers(0, 2, 384), jnp.float32)
            self.check(arrays, 6)


def test_parts_add_up_to_the_product():
    arrays = case(rows=70, hidden=1024, dtype="bfloat16")
    x, weight = jnp.nan_to_num(arrays["x"]), arrays["weight"]
    with backend.interpret():
        parts = jax.jit(gpu.product_parts)(x, weight)
    assert parts.shape == (2, 70, 20)
    wanted = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(np.asarray(parts, np.float64).sum(0), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "k", "reason"),
    [
        ({"dtype": "float32"}, 6, "x is float32"),
        ({"experts": 5000}, 6, "5000 experts are not 1 to 4096"),
        ({}, 40, "k is 40, not 1 to 20"),
        ({}, 6, None),
    ],
)
def test_what_is_left_to_xla(changes: dict, k: int, reason: str | None):
    said = gpu.unsupported(**case(**({"dtype": "bfloat16"} | changes)), k=k, scale=SCALE)
    assert said is None if reason is None else reason in said
