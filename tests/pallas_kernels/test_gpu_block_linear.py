"""The dense linear map's GPU kernels: rounding in interpret mode; the product's inline PTX needs a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.block_linear import gpu, gpu_product, xla
from pallas_kernels.formats import FP8_E8M0, DenseFormat
from pallas_kernels.gpu.rounding import round_rows
from tests.pallas_kernels.base.block_linear import BlockLinearTests, case

BF16 = DenseFormat("bfloat16")
OUT, WIDTH = 128, 256


@pytest.mark.gpu
class TestBlockLinear(BlockLinearTests):
    backend = "gpu"
    group_size = (OUT, WIDTH)

    # What is about float32 rows or float weights: they are XLA's.
    test_products_are_the_references = None
    test_gradients_pass_the_rounding_unchanged = None

    @pytest.mark.parametrize("fmt", [FP8_E8M0, BF16], ids=["rounded", "bf16"])
    @pytest.mark.parametrize(
        ("rows", "out", "width"),
        [
            ((1,), OUT, 128),
            ((2, 3), OUT, WIDTH),
            ((70,), 3 * OUT, 2304),
            ((128,), OUT, WIDTH),
            ((3, 50), OUT, 3 * WIDTH),
        ],
    )
    def test_float8_weights(self, rows: tuple[int, ...], out: int, width: int, fmt):
        self.check(case("bfloat16", rows, out, width), fmt)

    def test_a_nan_row_leaves_the_others(self):
        arrays = case("bfloat16", (11,), OUT, WIDTH)
        before = np.asarray(self.run("block_linear", arrays, activation_fmt=FP8_E8M0), np.float32)
        arrays["x"] = arrays["x"].at[5].set(jnp.nan)
        after = np.asarray(self.run("block_linear", arrays, activation_fmt=FP8_E8M0), np.float32)
        keep = np.arange(11) != 5
        np.testing.assert_array_equal(after[keep], before[keep])
        assert np.isnan(after[5]).all()

    @pytest.mark.parametrize("rows", [(2, 3), (2, 70)])
    def test_gradients_are_xlas(self, rows: tuple[int, ...]):
        arrays = case("bfloat16", rows, OUT, WIDTH)

        def gradient(function):
            given = {name: arrays[name] for name in ("weight", "scale")}
            return jax.jit(jax.grad(lambda x: jnp.sum(function(x, **given, activation_fmt=FP8_E8M0))))(arrays["x"])

        mine, wanted = gradient(gpu.block_linear), gradient(xla.block_linear)
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(wanted, np.float32))


def test_contraction_order_is_a_permutation_of_each_step():
    place = np.asarray(gpu_product.place(jnp.arange(2 * gpu_product.STEP)))
    assert sorted(place[: gpu_product.STEP]) == list(range(gpu_product.STEP))
    np.testing.assert_array_equal(place[gpu_product.STEP :], place[: gpu_product.STEP] + gpu_product.STEP)
    # First instruction: the threads' first words, bytes 0, 2 and 1, 3.
    first = [32 * thread + byte + high for byte in (0, 1) for thread in range(4) for high in (0, 2)]
    assert list(np.argsort(place)[:16]) == first


def hostile_rows() -> jax.Array:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, WIDTH)) * 2.0 ** rng.integers(-30, 30, (5, WIDTH))
    # Blocks whose scale lies at a power of two, just above one and at the floor.
    x[0] = np.linspace(-448, 448, WIDTH)
    x[1] = np.linspace(-450, 450, WIDTH)
    x[2] = 1e-6 * np.linspace(-1, 1, WIDTH)
    x[3] = 0
    return jnp.asarray(x, jnp.bfloat16)


@pytest.mark.parametrize("fmt", [FP8_E8M0, BF16], ids=["rounded", "bf16"])
def test_rounding_for_the_product_is_the_formats(fmt):
    x = hostile_rows()
    with backend.interpret():
        mine = jax.jit(lambda x: gpu.round_and_place(x, fmt, 8))(x)
    assert mine.shape == (8, WIDTH)
    wanted = np.asarray(jax.jit(fmt.round)(x), np.float32)
    place = np.asarray(gpu_product.place(jnp.arange(WIDTH)))
    np.testing.assert_array_equal(np.asarray(mine, np.float32)[:5, place], wanted)


def test_rounding_of_rows_is_the_formats():
    x = hostile_rows()
    with backend.interpret():
        mine = jax.jit(round_rows)(x)
    np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(jax.jit(FP8_E8M0.round)(x), np.float32))
    with pytest.raises(ValueError, match="rows of 40 values are not whole blocks of 32"):
        round_rows(jnp.zeros((2, 40), jnp.bfloat16))


@pytest.mark.parametrize(("out", "width"), [(32768, 1280), (5120, 8192), (1280, 5120), (512, 5120), (128, 128)])
@pytest.mark.parametrize("rows", [1, 128])
def test_pieces_leave_no_program_much_longer_than_the_others(out: int, width: int, rows: int):
    parts = gpu_product.pieces(out, width, rows)
    steps, tiles = width // gpu_product.STEP, out // gpu_product.TILE
    assert 1 <= parts <= steps
    busiest = -(-tiles * parts // 132) * -(-steps // parts)
    # Within 1.3 of a fair share, or as short as a piece may be, or cut as far as its sums are worth.
    assert busiest <= max(1.3 * tiles * steps / 132, 8)


@pytest.mark.parametrize(
    ("changes", "fmt", "reason"),
    [
        ({"dtype": "float32"}, FP8_E8M0, "x is float32"),
        ({}, DenseFormat("float32"), "not exact in bfloat16"),
        ({"width": 96}, FP8_E8M0, "96 columns of the weight are not a multiple of 128"),
        ({"out": 64}, FP8_E8M0, "64 rows of the weight in 1 groups are not a multiple of 128"),
        ({"rows": (0,)}, FP8_E8M0, "no rows"),
    ],
)
def test_what_is_left_to_xla(changes: dict, fmt, reason: str):
    arrays = jax.eval_shape(lambda: case(**({"dtype": "bfloat16", "out": OUT, "width": WIDTH} | changes)))
    assert reason in gpu.unsupported(**arrays, activation_fmt=fmt)


def test_plain_weights_are_left_to_xla():
    arrays = jax.eval_shape(lambda: case("bfloat16", out=OUT, width=WIDTH))
    assert gpu.unsupported(**arrays, activation_fmt=FP8_E8M0) is None
    assert "without scales" in gpu.unsupported(**(arrays | {"scale": None}), activation_fmt=FP8_E8M0)
