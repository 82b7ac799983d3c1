"""What the dense linear map promises."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_linear import decode_blocks, reference
from pallas_kernels.formats import FP8_E8M0, DenseFormat
from tests.pallas_kernels.base.common import OperationTests, compiled, golden


def case(dtype="float32", rows=(2, 3), out=64, width=96, groups=1) -> dict:
    rng = np.random.default_rng(0)
    return {
        "x": jnp.asarray(rng.standard_t(3, (*rows, groups * width)), dtype),
        "weight": jnp.asarray(rng.standard_normal((out, width)), jnp.float8_e4m3fn),
        "scale": jnp.asarray(rng.integers(120, 130, (out // 32, width // 32)), jnp.uint8),
    }


class BlockLinearTests(OperationTests):
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("rounds", [False, True])
    def test_float8_weights(self, dtype: str, rounds: bool):
        self.check(case(dtype), FP8_E8M0 if rounds else DenseFormat(dtype))

    # Outputs and inputs of a group.
    group_size = (64, 96)

    def test_groups_of_outputs_have_their_own_inputs(self):
        out, width = self.group_size
        self.check(case("bfloat16", (2, 3), 3 * out, width, groups=3), DenseFormat("bfloat16"), groups=3)

    def check(self, arrays: dict, fmt, groups: int = 1):
        out = self.run("block_linear", arrays, activation_fmt=fmt, groups=groups)
        dtype = arrays["x"].dtype
        assert out.dtype == dtype
        assert out.shape == (*arrays["x"].shape[:-1], arrays["weight"].shape[0])
        wanted = compiled(reference.block_linear, arrays, activation_fmt=fmt, groups=groups)
        wanted = np.asarray(wanted, np.float32)
        # One rounding of a bfloat16 result may fall to the other side: a step is up to 2^-7 of the value.
        tolerance = 2.0**-7 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(np.asarray(out, np.float32), wanted, rtol=tolerance, atol=1e-4)

    @pytest.mark.parametrize("name", ["fp8_gemm", "fp4_gemm"])
    def test_products_are_the_references(self, name: str):
        ops = golden()
        arrays = {"x": jnp.asarray(ops["fp8_gemm.x"])}
        if name == "fp8_gemm":
            arrays["weight"] = jnp.asarray(ops["fp8_gemm.w"]).view(jnp.float8_e4m3fn)
            arrays["scale"] = jnp.asarray(ops["fp8_gemm.w_scale"])
        else:
            arrays |= {"weight": jnp.asarray(ops["fp4_gemm.w_dequant"]), "scale": None}
        out = np.asarray(self.run("block_linear", arrays, activation_fmt=FP8_E8M0))
        wanted = ops[name + ".y"]
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())

    def test_gradients_pass_the_rounding_unchanged(self):
        if not self.supports_gradient:
            pytest.skip("no gradient on this back end")
        arrays = case()
        weight = decode_blocks(arrays["weight"], arrays["scale"], jnp.float32)

        def loss(x, weight):
            return jnp.sum(self.run("block_linear", {"x": x, "weight": weight, "scale": None}, activation_fmt=FP8_E8M0))

        dx, dweight = jax.jit(jax.grad(loss, argnums=(0, 1)))(arrays["x"], weight)
        np.testing.assert_allclose(np.asarray(dx), np.broadcast_to(weight.sum(0), dx.shape), rtol=1e-5, atol=1e-4)
        rounded = np.asarray(jax.jit(FP8_E8M0.round)(arrays["x"])).reshape(-1, 96).sum(0)
        np.testing.assert_allclose(np.asarray(dweight), np.broadcast_to(rounded, dweight.shape), rtol=1e-5, atol=1e-4)

    def test_scales_that_do_not_fit_are_refused(self):
        arrays = case() | {"scale": jnp.zeros((2, 2), jnp.uint8)}
        with pytest.raises(
            ValueError, match=r"scales \(2, 2\) are not one for each 32×32 block of a weight \(64, 96\)"
        ):
            self.run("block_linear", arrays, activation_fmt=FP8_E8M0)
