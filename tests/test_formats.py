"""Number formats: bit-exact with the reference's data, and their own laws."""

from __future__ import annotations

import functools
import pathlib
import re

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.formats import (
    FP4_E4M3,
    FP4_E8M0,
    FP8_E8M0,
    BlockFormat,
    DenseFormat,
    Packed,
    e2m1_decode,
    e2m1_encode,
    e4m3_encode,
    e8m0_decode,
    e8m0_encode_ceil,
    nibbles_pack,
    nibbles_unpack,
)
from tests.safetensors_reader import read_safetensors

FORMATS = {"act_quant32": FP8_E8M0, "fp4_b16_e4m3": FP4_E4M3, "fp4_b32_e8m0": FP4_E8M0}
round_trip = jax.jit(lambda fmt, x: fmt.round(x), static_argnums=0)
encode = jax.jit(lambda fmt, x: fmt.encode(x), static_argnums=0)
decode = jax.jit(lambda fmt, packed, dtype: fmt.decode(packed, dtype), static_argnums=(0, 2))


@functools.cache
def golden() -> dict[str, np.ndarray]:
    return read_safetensors(pathlib.Path(__file__).parent / "data/ops/ops.safetensors")


encode_e2m1, decode_e2m1 = jax.jit(e2m1_encode), jax.jit(e2m1_decode)
encode_e8m0, decode_e8m0 = jax.jit(e8m0_encode_ceil), jax.jit(e8m0_decode)


def as_bytes(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("suffix", ["", "_bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_encoding_is_the_references_to_the_bit(name: str, suffix: str):
    ops, fmt = golden(), FORMATS[name]
    x = jnp.asarray(ops["quant.x" + suffix])
    packed = encode(fmt, x)
    codes = ops[f"{name}.{'codes' if fmt.element == 'e4m3' else 'packed'}{suffix}"]
    np.testing.assert_array_equal(as_bytes(packed.payload), codes)
    np.testing.assert_array_equal(as_bytes(packed.scales), ops[f"{name}.scales{suffix}"])
    rounded = round_trip(fmt, x)
    assert rounded.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(rounded), ops[f"{name}.roundtrip{suffix}"])


def test_e2m1_codes_are_the_references():
    ops = golden()
    np.testing.assert_array_equal(np.asarray(encode_e2m1(jnp.asarray(ops["e2m1.encode_in"]))), ops["e2m1.encode_out"])
    values = np.asarray(decode_e2m1(np.arange(16, dtype=np.uint8)))
    np.testing.assert_array_equal(values.view(np.uint32), ops["e2m1.decode_table"].view(np.uint32))


def test_e2m1_ties_go_to_the_even_code():
    grid = np.asarray(decode_e2m1(np.arange(8, dtype=np.uint8)))
    middles = (grid[:-1] + grid[1:]) / 2
    codes = np.asarray(encode_e2m1(jnp.asarray(np.concatenate([middles, -middles]))))
    np.testing.assert_array_equal(codes & 1, 0)
    np.testing.assert_array_equal(codes[:7] | 8, codes[7:])
    np.testing.assert_array_equal(np.asarray(encode_e2m1(jnp.asarray([0.0, -0.0]))), [0, 8])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ties_go_to_the_even_code_beside_every_scale(dtype):
    """Values on the middle of two codes times their scale: multiplied by its reciprocal they may round to above."""
    scales = np.arange(8, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    # The largest value of a block makes its scale.
    block = np.concatenate([[6], middles, -middles, [0]]).astype(np.float32)
    packed = encode(FP4_E4M3, jnp.asarray(scales[:, None] * block, dtype))
    np.testing.assert_array_equal(as_bytes(packed.scales)[:, 0], np.arange(8, 0x7F))
    codes = np.array([7, 0, 2, 2, 4, 4, 6, 6])
    codes = np.concatenate([codes, codes[1:] | 8, [0]])
    np.testing.assert_array_equal(
        np.asarray(nibbles_unpack(packed.payload)), np.tile(codes, (len(scales), 1)).astype(np.uint8)
    )


def test_an_unknown_combination_is_refused():
    with pytest.raises(ValueError, match="there is no e4m3 with scales e4m3"):
        BlockFormat("e4m3", "e4m3", block=16, floor=1e-4)


def test_nibbles_put_the_even_index_low():
    codes = jnp.arange(16, dtype=jnp.uint8).reshape(2, 8)
    packed = jax.jit(nibbles_pack)(codes)
    np.testing.assert_array_equal(np.asarray(packed)[0], [0x10, 0x32, 0x54, 0x76])
    np.testing.assert_array_equal(np.asarray(jax.jit(nibbles_unpack)(packed)), np.asarray(codes))


def test_power_of_two_scales_are_exact_at_powers_of_two():
    exponents = np.arange(-126, 128)
    powers = np.ldexp(np.float32(1), exponents).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(encode_e8m0(jnp.asarray(powers))), exponents + 127)
    above = np.nextafter(powers[:-1], np.float32(np.inf))
    np.testing.assert_array_equal(np.asarray(encode_e8m0(jnp.asarray(above))), exponents[:-1] + 128)
    bytes_ = jnp.asarray(exponents + 127, jnp.uint8)
    np.testing.assert_array_equal(np.asarray(decode_e8m0(bytes_)), powers)


blocks = hnp.arrays(
    np.float32, (2, 64), elements=st.floats(-(2.0**90), 2.0**90, width=32, allow_subnormal=False, allow_nan=False)
)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@hypothesis.given(blocks, st.booleans())
@hypothesis.settings(max_examples=60, deadline=None)
def test_rounding_is_close_and_odd(fmt: BlockFormat, x: np.ndarray, bf16: bool):
    x = x.astype(ml_dtypes.bfloat16).astype(np.float32) if bf16 else x
    once = np.asarray(round_trip(fmt, jnp.asarray(x)))
    np.testing.assert_array_equal(np.asarray(round_trip(fmt, jnp.asarray(-x))), -once)
    scales = np.asarray(encode(fmt, jnp.asarray(x)).scales)
    step = (
        np.asarray(decode_e8m0(jnp.asarray(scales)))
        if fmt.scale == "e8m0"
        else scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    )
    step = np.repeat(step, fmt.block, axis=-1)
    limit = 6 if fmt.element == "e2m1" else 448
    clipped = np.clip(x, -limit * step, limit * step)
    # Half the widest gap of the element: 2 between 4 and 6; 32 between 256 and 448.
    assert np.all(np.abs(once - clipped) <= step * (1 if fmt.element == "e2m1" else 16))
    if fmt.scale == "e8m0":
        np.testing.assert_array_equal(clipped, x)


@pytest.mark.parametrize("fmt", [FP8_E8M0, FP4_E8M0], ids=["fp8", "fp4"])
@hypothesis.given(blocks)
@hypothesis.settings(max_examples=60, deadline=None)
def test_rounding_twice_is_rounding_once(fmt: BlockFormat, x: np.ndarray):
    once = round_trip(fmt, jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(round_trip(fmt, once)), np.asarray(once))


@hypothesis.given(hnp.arrays(np.uint8, (3, 16)), hnp.arrays(np.uint8, (3, 1), elements=st.integers(30, 220)))
@hypothesis.settings(max_examples=40, deadline=None)
def test_every_code_decodes_to_its_product(payload: np.ndarray, scales: np.ndarray):
    packed = Packed(jnp.asarray(payload), jnp.asarray(scales))
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = np.stack([payload & 15, payload >> 4], axis=-1).reshape(3, 32)
    expected = np.where(codes >= 8, -1, 1) * table[codes & 7] * np.exp2(scales.astype(np.float64) - 127)
    np.testing.assert_array_equal(np.asarray(decode(FP4_E8M0, packed, jnp.float32)), expected.astype(np.float32))
    # Exact in bfloat16 as well: that is what lets products run in it.
    np.testing.assert_array_equal(np.asarray(decode(FP4_E8M0, packed, jnp.bfloat16)).astype(np.float32), expected)


@pytest.mark.parametrize("fmt", [*FORMATS.values(), DenseFormat("bfloat16")])
def test_sizes_describe_the_encoding(fmt):
    packed = encode(fmt, jnp.ones((3, 64)))
    empty = fmt.zeros((3,), 64)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), packed) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), empty
    )
    assert packed.payload.shape[-1] == fmt.payload_width(64)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(packed)) == 3 * fmt.entry_bytes(64)
    np.testing.assert_array_equal(np.asarray(decode(fmt, empty, jnp.float32)), 0)


def test_a_width_that_is_no_multiple_of_the_block_is_refused():
    with pytest.raises(ValueError, match="width 40 is not a multiple of the block of 32"):
        FP8_E8M0.encode(jnp.zeros((2, 40)))


@pytest.mark.parametrize("fmt", [FP4_E4M3, FP4_E8M0, FP8_E8M0])
def test_encoding_casts_to_no_small_float(fmt):
    """A cast to float8 that is decoded in the same program may be skipped (seen on a GPU: nothing was rounded)."""
    text = jax.jit(fmt.encode).lower(jnp.zeros((1, 64))).as_text()
    assert not re.search(r"stablehlo\.convert .* -> tensor<\S*(f8|f4)E", text)


def test_e4m3_codes_are_those_of_the_cast():
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    halfway = (every[:-1] + every[1:]) / 2
    random = np.random.default_rng(0).standard_normal(10_000) * 2.0 ** np.random.default_rng(1).integers(-14, 8, 10_000)
    beside = [np.nextafter(halfway, np.float32(np.inf)), np.nextafter(halfway, np.float32(-np.inf))]
    x = np.clip(np.concatenate([every, halfway, *beside, random]).astype(np.float32), -448, 448)
    x = x[~np.isnan(x)]
    np.testing.assert_array_equal(jax.jit(e4m3_encode)(x), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    assert int(e4m3_encode(jnp.float32(jnp.nan))) & 0x7F == 0x7F
