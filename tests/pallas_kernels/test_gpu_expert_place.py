"""Where the experts' GPU kernels put rows, and how they round them on the way: interpreted, and on the GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.expert_matmul import gpu_place
from pallas_kernels.expert_matmul.gpu_product import padded, permute
from pallas_kernels.formats import FP8_E8M0, DenseFormat

SIZE, WIDTH = 8, 512
BFLOAT16 = DenseFormat("bfloat16")
# Roundings and widths: whole steps of the product, and one and a quarter.
CASES = pytest.mark.parametrize(
    ("fmt", "width"), [(FP8_E8M0, WIDTH), (BFLOAT16, WIDTH), (FP8_E8M0, 320)], ids=["fp8", "bf16", "narrow"]
)


def pairs(rows: int, experts: int, k: int = 3, width: int = WIDTH) -> dict[str, jax.Array]:
    """Row 1 has no expert and is NaN, row 2 has one that lies elsewhere; magnitudes differ from block to block."""
    rng = np.random.default_rng(rows)
    # Low experts are chosen often: some fill several blocks.
    ids = np.stack([rng.permutation(1 + rng.integers(k, experts))[:k] for _ in range(rows)]).astype(np.int32)
    ids[1] = experts
    ids[2, 0] = -1
    x = rng.standard_normal((rows, width // 32, 32)) * np.exp2(rng.integers(-30, 30, (rows, width // 32, 1)))
    x[1] = np.nan
    return {
        "x": jnp.asarray(x.reshape(rows, width), jnp.bfloat16),
        "ids": jnp.asarray(ids),
        "weights": jnp.asarray(rng.random(ids.shape), jnp.float32),
    }


def place(arrays: dict[str, jax.Array], experts: int, fmt=FP8_E8M0, layer: int | None = None) -> gpu_place.Placed:
    def placed(x, ids, weights, layer):
        return gpu_place.place_tokens(x, ids, weights, layer, experts=experts, size=SIZE, fmt=fmt)

    return jax.jit(placed)(**arrays, layer=None if layer is None else jnp.int32(layer))


def floats(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float32)


def in_order(x: jax.Array, fmt) -> np.ndarray:
    """``x`` rounded, zeros for what its last step lacks, in the product's order."""
    rounded = jax.jit(fmt.round)(x)
    return floats(permute(jnp.pad(rounded, ((0, 0), (0, padded(x.shape[1]) - x.shape[1])))))


class PlaceTests:
    """What the kernels promise."""

    # Few pairs, many of one expert, and more than are compared with each other.
    @pytest.mark.parametrize(("rows", "experts"), [(5, 40), (20, 4), (50, 7)])
    def test_every_pair_has_its_own_slot_in_a_block_of_its_expert(self, rows: int, experts: int):
        arrays = pairs(rows, experts)
        placed = place(arrays, experts)
        ids, slot, chosen = np.asarray(arrays["ids"]), np.asarray(placed.slot), np.asarray(placed.expert)
        real = (ids >= 0) & (ids < experts)
        np.testing.assert_array_equal(slot >= 0, real)
        live = sum(-(-np.sum(ids == expert) // SIZE) for expert in range(experts))
        assert np.asarray(placed.live) == [live]
        assert (np.diff(chosen[:live]) >= 0).all()
        for expert in range(experts):
            # In order, without a gap, from the start of a block.
            mine = slot[ids == expert]
            first = np.sum([-(-np.sum(ids == lower) // SIZE) for lower in range(expert)], dtype=int) * SIZE
            np.testing.assert_array_equal(mine, first + np.arange(mine.size))
            assert (chosen[mine // SIZE] == expert).all()
        np.testing.assert_array_equal(np.asarray(placed.weight)[slot[real]], np.asarray(arrays["weights"])[real])

    @CASES
    def test_tokens_are_rounded_in_the_products_order(self, fmt, width: int):
        arrays = pairs(11, 9, width=width)
        placed = place(arrays, 9, fmt)
        slot = np.asarray(placed.slot)
        wanted = in_order(arrays["x"], fmt)
        row = np.nonzero(slot >= 0)[0]
        assert set(row) == set(range(11)) - {1}
        np.testing.assert_array_equal(floats(placed.tokens)[slot[slot >= 0]], wanted[row])

    def test_a_layer_counts_experts_on(self):
        arrays = pairs(11, 9)
        one, later = place(arrays, 9), place(arrays, 9, layer=3)
        live = int(one.live[0])
        np.testing.assert_array_equal(np.asarray(later.expert)[:live], np.asarray(one.expert)[:live] + 27)

    def test_pairs_beyond_what_is_counted_at_once(self, monkeypatch):
        arrays = pairs(50, 7)
        wanted = place(arrays, 7).slot
        monkeypatch.setattr(gpu_place, "_COUNTED", 32)
        np.testing.assert_array_equal(np.asarray(place(arrays, 7).slot), np.asarray(wanted))

    @CASES
    def test_inner_rows_are_rounded_where_they_are(self, fmt, width: int):
        arrays = pairs(11, 9, width=width)
        slot = place(arrays, 9).slot
        # What no pair owns, and columns that there are not, are NaN.
        inner = jnp.full((2 * 9 * SIZE, padded(width)), jnp.nan, jnp.bfloat16)
        owned = np.asarray(slot)[np.asarray(slot) >= 0]
        inner = inner.at[owned, :width].set(jnp.asarray(arrays["x"])[np.arange(owned.size) % 11])
        wanted = in_order(inner[:, :width], fmt)
        out = jax.jit(lambda inner, slot: gpu_place.place_inner(inner, slot, width, fmt))(inner, slot)
        np.testing.assert_array_equal(floats(out)[owned], wanted[owned])


class TestInterpreted(PlaceTests):
    @pytest.fixture(autouse=True)
    def interpreted(self):
        with backend.interpret():
            yield


@pytest.mark.gpu
class TestOnACard(PlaceTests):
    pass
