"""The routed experts' GPU kernel: what it promises, what it leaves to XLA. Its inline PTX has no interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_matmul import ExpertWeights, gpu, gpu_product, xla
from pallas_kernels.formats import FP8_E8M0, DenseFormat
from tests.pallas_kernels.base.expert_matmul import LIMIT, ExpertMatmulTests, case

SIZES = {"hidden": 512, "inner": 256}
# Half and a quarter of an official expert's inner columns: the last step is half of one, and the last tile of rows may
# be half of one, too. 320 is a step and a quarter, a tile of rows and a quarter.
PARTS = ({"hidden": 512, "inner": 1152}, {"hidden": 320, "inner": 576})
# The scale that the kernel decodes to infinity.
INFINITE = 255 - gpu_product._EXPONENT


@pytest.mark.gpu
class TestExpertMatmul(ExpertMatmulTests):
    backend = "gpu"
    sizes = SIZES
    packed, dtype, fmt = True, "bfloat16", FP8_E8M0
    # Both round the same products to bfloat16 and E4M3; one that lies at a tie may fall to the other side.
    tolerance = 2.0**-4
    layer_tolerance = 0.0

    # What is about floats: they are XLA's.
    test_float32 = None
    test_gradients_are_the_references_and_finite_beside_poison = None
    test_packed_experts_pass_gradients_to_their_input = None
    test_expert_is_the_references = None

    @pytest.mark.parametrize("rows", [1, 40, 600])
    def test_blocks_of_every_size(self, rows: int):
        self.check(self.case(5, rows=rows + 4), FP8_E8M0, self.tolerance)

    @pytest.mark.parametrize("rows", [11, 600])
    @pytest.mark.parametrize("sizes", PARTS, ids=str)
    def test_parts_of_steps_and_tiles(self, sizes: dict, rows: int):
        self.check(self.case(3, rows=rows, **sizes), FP8_E8M0, self.tolerance)

    @pytest.mark.parametrize("sizes", PARTS, ids=str)
    def test_scales_behind_a_row_change_nothing(self, sizes: dict):
        """Infinite ones in the layers beside, in an expert that no row has, and in every other row of the last
        matrix."""
        arrays = self.case(3, **sizes)
        arrays["expert_ids"] = jnp.where(arrays["expert_ids"] == 1, -1, arrays["expert_ids"])
        wanted = self.check(arrays, FP8_E8M0, self.tolerance)

        def beside(name: str) -> ExpertWeights:
            codes, scale = arrays[name]
            scale = scale.at[1].set(INFINITE)
            if name == "w2":
                scale = scale.at[:, ::2].set(INFINITE)
            spoiled = jnp.full_like(scale, INFINITE)
            return ExpertWeights(jnp.stack([codes] * 3), jnp.stack([spoiled, scale, spoiled]))

        arrays |= {name: beside(name) for name in ("w1", "w3", "w2")} | {"layer": jnp.int32(1)}
        out = np.asarray(self.run("expert_matmul", arrays, limit=LIMIT, activation_fmt=FP8_E8M0))
        assert not np.isfinite(out[0, ::2]).any()
        np.testing.assert_array_equal(out[:, 1::2], wanted[:, 1::2])

    def test_gradients_are_xlas(self):
        arrays = self.case(5)

        def gradients(function):
            def loss(x, weights):
                given = arrays | {"x": x, "expert_weights": weights}
                return jnp.sum(function(**given, limit=LIMIT, activation_fmt=FP8_E8M0))

            return jax.jit(jax.grad(loss, argnums=(0, 1)))(arrays["x"], arrays["expert_weights"])

        for mine, wanted in zip(gradients(gpu.expert_matmul), gradients(xla.expert_matmul), strict=True):
            np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(wanted, np.float32))


@pytest.mark.parametrize(("pairs", "experts", "rows"), [(6, 384, 8), (3072, 384, 16), (49152, 384, 64), (50, 3, 32)])
def test_rows_of_a_block(pairs: int, experts: int, rows: int):
    assert gpu.block_rows(pairs, experts) == rows


@pytest.mark.parametrize(
    ("rows", "out", "fused", "groups"),
    [(16, 2304, True, 4), (16, 1152, True, 3), (16, 5120, False, 4), (16, 320, False, 2), (32, 2304, True, 2)],
)
def test_warpgroups(rows: int, out: int, fused: bool, groups: int):
    assert gpu_product.groups(rows, out, fused) == groups


def test_contraction_order_is_a_permutation_of_each_step():
    order = np.asarray(gpu_product.permute(jnp.arange(2 * gpu_product.STEP)))
    assert sorted(order[: gpu_product.STEP]) == list(range(gpu_product.STEP))
    # First instruction: the threads' first words, codes 0, 4 and 1, 5.
    assert list(order[:16]) == [
        64 * thread + code for first in (0, 1) for thread in range(4) for code in (first, first + 4)
    ]


@pytest.mark.parametrize(
    ("changes", "fmt", "reason"),
    [
        ({"packed": False}, FP8_E8M0, "weights are bfloat16, not packed"),
        ({"dtype": "float32"}, FP8_E8M0, "x is float32"),
        ({}, DenseFormat("float32"), "not exact in bfloat16"),
        ({"hidden": 288}, FP8_E8M0, "288 columns of an expert's matrix are not a multiple of 64"),
        ({"inner": 64}, FP8_E8M0, "64 rows of an expert's matrix are fewer than 128"),
        ({"hidden": 192}, FP8_E8M0, "192 rows of an expert's matrix are fewer than 256"),
    ],
)
def test_what_is_left_to_xla(changes: dict, fmt, reason: str):
    arrays = jax.eval_shape(lambda: case(3, **({"packed": True, "dtype": "bfloat16"} | SIZES | changes)))
    if not changes.get("packed", True):
        arrays["w1"] = arrays["w1"]._replace(weight=jax.ShapeDtypeStruct(arrays["w1"].weight.shape, jnp.bfloat16))
    assert reason in gpu.unsupported(**arrays, limit=1.0, activation_fmt=fmt)


def test_more_slots_than_can_be_counted_are_left_to_xla():
    arrays = jax.eval_shape(lambda: case(3, packed=True, dtype="bfloat16", **SIZES))
    many = {"x": (2**22, 512), "expert_ids": (2**22, 2), "expert_weights": (2**22, 2)}
    arrays |= {name: jax.ShapeDtypeStruct(shape, arrays[name].dtype) for name, shape in many.items()}
    assert "more than an int32 can count" in gpu.unsupported(**arrays, limit=1.0, activation_fmt=FP8_E8M0)


@pytest.mark.parametrize("sizes", [SIZES, *PARTS], ids=str)
def test_what_the_kernel_runs(sizes: dict):
    arrays = jax.eval_shape(lambda: case(3, packed=True, dtype="bfloat16", **sizes))
    for fmt in (FP8_E8M0, DenseFormat("bfloat16")):
        assert gpu.unsupported(**arrays, limit=1.0, activation_fmt=fmt) is None
