"""What the routed experts promise."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_matmul import ExpertWeights, decode_weights, reference
from pallas_kernels.formats import FP4_E8M0, FP8_E8M0, DenseFormat
from tests.pallas_kernels.base.common import OperationTests, compiled, golden

F32 = DenseFormat("float32")
LIMIT = 1.5


def encode(x: jax.Array):
    return FP4_E8M0.encode(x)


def case(experts: int, rows=11, k=2, hidden=64, inner=32, packed=False, dtype="float32") -> dict:
    """Random experts; row 3 has no expert and is NaN, row 4 has one that lies elsewhere (also as −1)."""
    rng = np.random.default_rng(experts)

    def matrix(out: int, width: int) -> ExpertWeights:
        w = jnp.asarray(rng.standard_t(3, (experts, out, width)) / np.sqrt(width), jnp.float32)
        return ExpertWeights(*compiled(encode, {"x": w})) if packed else ExpertWeights(w, None)

    ids = np.stack([rng.permutation(experts)[:k] for _ in range(rows)]).astype(np.int32)
    ids[3] = experts
    ids[4, 0] = -1
    x = rng.standard_t(4, (rows, hidden)).astype(np.float32)
    x[3] = np.nan
    return {
        "x": jnp.asarray(x, dtype),
        "expert_ids": jnp.asarray(ids),
        "expert_weights": jnp.asarray(rng.uniform(0.1, 1, (rows, k)), jnp.float32),
        "w1": matrix(inner, hidden),
        "w3": matrix(inner, hidden),
        "w2": matrix(hidden, inner),
    }


class ExpertMatmulTests(OperationTests):
    """Promises of the operation.

    Attributes:
      sizes: hidden and inner width where a back end needs its own.
      packed, dtype, fmt: weights, x and roundings that a test takes if it is about something else.
      tolerance: largest error with these.
      layer_tolerance: largest difference between a layer alone and as one of several.
    """

    # Few experts of two, and many: back ends may treat them differently.
    EXPERTS = (3, 40)
    sizes: ClassVar[dict] = {}
    packed = False
    dtype = "float32"
    fmt = F32
    tolerance = 1e-5
    layer_tolerance = 1e-6

    def case(self, experts: int, **changes) -> dict:
        """:func:`case` with what the class asks for where nothing else is."""
        return case(experts, **{"packed": self.packed, "dtype": self.dtype, **self.sizes, **changes})

    def check(self, arrays: dict, fmt, tolerance: float):
        out = np.asarray(self.run("expert_matmul", arrays, limit=LIMIT, activation_fmt=fmt))
        wanted = np.asarray(compiled(reference.expert_matmul, arrays, limit=LIMIT, activation_fmt=fmt))
        assert out.dtype == np.float32
        np.testing.assert_allclose(out, wanted, rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(out[3], 0)
        return out

    @pytest.mark.parametrize("experts", EXPERTS)
    @pytest.mark.parametrize("packed", [False, True])
    def test_float32(self, experts: int, packed: bool):
        self.check(case(experts, packed=packed), F32, 1e-5)

    @pytest.mark.parametrize("experts", EXPERTS)
    def test_bfloat16_with_rounded_activations(self, experts: int):
        # Both round the same products; one that lies at a tie may fall to the other side, of bfloat16 or of E4M3.
        arrays = self.case(experts, packed=True, dtype="bfloat16")
        out = self.check(arrays, FP8_E8M0, 2.0**-4)
        wanted = compiled(reference.expert_matmul, arrays, limit=LIMIT, activation_fmt=FP8_E8M0)
        assert np.mean(np.abs(out - np.asarray(wanted)) <= 1e-6) > 0.9

    @pytest.mark.parametrize("experts", EXPERTS)
    def test_all_rows_on_one_expert(self, experts: int):
        arrays = self.case(experts, rows=21, k=1)
        arrays["expert_ids"] = jnp.full_like(arrays["expert_ids"], experts - 1).at[3].set(experts)
        self.check(arrays, self.fmt, self.tolerance)

    @pytest.mark.parametrize("experts", EXPERTS)
    def test_rows_do_not_depend_on_their_company(self, experts: int):
        arrays = self.case(experts)
        out = self.check(arrays, self.fmt, self.tolerance)
        arrays["x"] = arrays["x"].at[5].set(jnp.nan)
        spoiled = np.asarray(self.run("expert_matmul", arrays, limit=LIMIT, activation_fmt=self.fmt))
        keep = np.arange(out.shape[0]) != 5
        np.testing.assert_array_equal(spoiled[keep], out[keep])
        assert np.isnan(spoiled[5]).all()

    def test_one_of_several_stacked_layers(self):
        arrays = self.case(self.EXPERTS[0])
        wanted = self.check(arrays, self.fmt, self.tolerance)

        def stacked(leaf: jax.Array) -> jax.Array:
            return jnp.stack([jnp.flip(leaf, 0), leaf, jnp.zeros_like(leaf)])

        arrays |= {name: jax.tree.map(stacked, arrays[name]) for name in ("w1", "w3", "w2")}
        arrays["layer"] = jnp.int32(1)
        out = self.run("expert_matmul", arrays, limit=LIMIT, activation_fmt=self.fmt)
        np.testing.assert_allclose(
            np.asarray(out), np.asarray(wanted), rtol=self.layer_tolerance, atol=self.layer_tolerance
        )

    @pytest.mark.parametrize("experts", EXPERTS)
    def test_gradients_are_the_references_and_finite_beside_poison(self, experts: int):
        if not self.supports_gradient:
            pytest.skip("no gradient on this back end")
        arrays = case(experts, rows=7)
        cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(arrays["x"].shape), jnp.float32)
        names = ("x", "expert_weights", "w1", "w3", "w2")

        def gradients(function, arrays):
            def loss(chosen):
                return jnp.sum(function(arrays | chosen) * cotangent)

            return jax.jit(jax.grad(loss))({name: arrays[name] for name in names})

        mine = gradients(lambda a: self.run("expert_matmul", a, limit=LIMIT, activation_fmt=F32), arrays)
        arrays["x"] = jnp.nan_to_num(arrays["x"])
        wanted = gradients(lambda a: compiled(reference.expert_matmul, a, limit=LIMIT, activation_fmt=F32), arrays)
        for name in names:
            for left, right in zip(jax.tree.leaves(mine[name]), jax.tree.leaves(wanted[name]), strict=True):
                np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=1e-4, atol=1e-5, err_msg=name)

    @pytest.mark.parametrize("experts", EXPERTS)
    def test_packed_experts_pass_gradients_to_their_input(self, experts: int):
        if not self.supports_gradient:
            pytest.skip("no gradient on this back end")
        arrays = case(experts, packed=True)
        floats = arrays | {
            name: ExpertWeights(compiled(decode_weights, {"weights": arrays[name]}, dtype=jnp.float32), None)
            for name in ("w1", "w3", "w2")
        }

        cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(arrays["x"].shape), jnp.float32)

        def gradient(arrays):
            def loss(x):
                out = self.run("expert_matmul", arrays | {"x": x}, limit=LIMIT, activation_fmt=F32)
                return jnp.sum(out * cotangent)

            return np.asarray(jax.jit(jax.grad(loss))(arrays["x"]))

        np.testing.assert_array_equal(gradient(arrays), gradient(floats))

    @pytest.mark.parametrize("routed", [False, True])
    def test_expert_is_the_references(self, routed: bool):
        ops = golden()
        rows = ops["expert.x"].shape[0]
        arrays = {
            "x": jnp.asarray(ops["expert.x"]),
            "expert_ids": jnp.zeros((rows, 1), jnp.int32),
            "expert_weights": jnp.asarray(ops["expert.route_w"]) if routed else jnp.ones((rows, 1)),
        }
        arrays |= {name: ExpertWeights(jnp.asarray(ops[f"expert.{name}"])[None], None) for name in ("w1", "w3", "w2")}
        out = np.asarray(self.run("expert_matmul", arrays, limit=10.0, activation_fmt=F32))
        wanted = ops["expert.y_routed" if routed else "expert.y"]
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())

    def test_packed_weights_decode_as_the_references(self):
        ops = golden()
        weights = ExpertWeights(jnp.asarray(ops["fp4_gemm.w"])[None], jnp.asarray(ops["fp4_gemm.w_scale"])[None])
        for dtype in (jnp.float32, jnp.bfloat16):
            decoded = np.asarray(compiled(decode_weights, {"weights": weights}, dtype=dtype), np.float32)
            np.testing.assert_array_equal(decoded[0], ops["fp4_gemm.w_dequant"])
