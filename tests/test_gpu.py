"""What must be the same on a GPU: the formats' bits and parity. Run with ``pytest -m gpu`` on such a machine."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import FP4_E4M3, FP4_E8M0, FP8_E8M0
from pallas_kernels.products import narrow
from tests.safetensors_reader import read_safetensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU in this process"),
]


@pytest.mark.parametrize(
    ("name", "fmt"), [("act_quant32", FP8_E8M0), ("fp4_b16_e4m3", FP4_E4M3), ("fp4_b32_e8m0", FP4_E8M0)]
)
def test_rounding_inside_one_program_is_the_golden_s(name, fmt):
    golden = read_safetensors(pathlib.Path(__file__).parent / "data" / "ops" / "ops.safetensors")
    np.testing.assert_array_equal(jax.jit(fmt.round)(golden["quant.x"]), golden[f"{name}.roundtrip"])


def test_bfloat16_rounding_survives_fusion():
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    fused = jax.jit(lambda x: narrow(x, jnp.bfloat16).astype(jnp.float32) * 3.0)(x)
    np.testing.assert_array_equal(fused, x.astype(jnp.bfloat16).astype(np.float32) * 3.0)
