"""The picture encoder against the reference, and what padding, tiles and odd grids must not change."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41.checkpoint import CheckpointError, RandomSource
from dsv41.checkpoint.layout import checkpoint_layout
from dsv41.config import load_config
from dsv41.layers.vision import PictureEncoder, gather_cells
from dsv41.pictures.encoder import (
    EncodedPicture,
    Pictures,
    abstract_encoder,
    encode_patches,
    padded_patches,
    span_bucket,
    span_buckets,
)
from dsv41.pictures.files import Picture
from dsv41.pictures.plan import PicturePlan
from dsv41.settings import Settings
from dsv41.verification.golden import Golden
from dsv41.verification.vision import compare_pictures, encode_golden, golden_picture, golden_pictures
from pallas_kernels import tiling
from tests.checkpoints import OFFICIAL, Edited
from tests.conftest import GOLDEN

PICTURES = (("C1", 0), ("C2", 0), ("C3", 0), ("C3", 1))


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden(GOLDEN / "mini8" / "f32", GOLDEN / "mini8" / "fp8")


@pytest.fixture(scope="module")
def pictures(golden) -> Pictures:
    return golden_pictures(golden)


def random_picture(rows: int, columns: int, seed: int = 0) -> Picture:
    values = np.random.default_rng(seed).uniform(-1, 1, (rows * columns, 3 * 14**2))
    return Picture(values.astype(ml_dtypes.bfloat16), PicturePlan(rows, columns, 14, 3))


# Against the reference


@pytest.mark.parametrize(("name", "flavour"), [("mini8", "f32"), ("mini8", "fp8"), ("tiny40", "f32")])
def test_golden_pictures(name, flavour):
    golden = Golden(GOLDEN / name / flavour, GOLDEN / name / "fp8")
    rows = {row.name: row for row in compare_pictures("", golden, ("C1", "C2", "C3"))}
    wanted = [f"{case}.image_rows.{n}" for case, n in PICTURES]
    wanted += [f"{case}.prefill.embed of picture {n}" for case, n in PICTURES] + ["C1.vit_out", "C2.vit_out"]
    assert rows.keys() == set(wanted)
    for row in rows.values():
        assert row.passed, row
        assert row.limit == (1e-4 if flavour == "f32" else 2e-2)


def test_a_wrong_weight_fails_the_comparison(golden, monkeypatch):
    right = Pictures.__init__

    def wrong(self, *args, **kwargs):
        right(self, *args, **kwargs)
        wo = self.params["vision"]["blocks"]["attn"]["wo"]
        wo["bias"] = wo["bias"].at[1].add(0.1)  # of the last block

    monkeypatch.setattr(Pictures, "__init__", wrong)
    assert not any(row.passed for row in compare_pictures("", golden, ("C1", "C2", "C3")))


# Padding


@pytest.mark.parametrize(("case", "number"), PICTURES)
def test_what_padding_holds_reaches_nothing(golden, pictures, case, number):
    picture, _ = golden_picture(golden, case, number)
    width = span_bucket(picture.plan.span, golden.config.vision)
    encoder = PictureEncoder(pictures.settings)
    patches, grid = padded_patches(picture, width)
    clean = np.asarray(encode_patches(encoder, pictures.params, patches, grid, width))
    poisoned = patches.copy()
    poisoned[picture.plan.patches :] = np.nan
    found = np.asarray(encode_patches(encoder, pictures.params, poisoned, grid, width))
    assert found.tobytes() == clean.tobytes()
    assert np.isfinite(clean).all()
    assert not clean[picture.plan.span :].any()
    np.testing.assert_array_equal(clean[: picture.plan.span], pictures.encode(picture).embeddings)


def test_the_bucket_changes_nothing(golden, pictures):
    picture, _ = golden_picture(golden, "C1", 0)
    widths = span_buckets(golden.config.vision)
    assert widths == (16, 32, 64)
    spans = [
        np.asarray(
            encode_patches(PictureEncoder(pictures.settings), pictures.params, *padded_patches(picture, width), width)
        )[: picture.plan.span]
        for width in widths
    ]
    for span in spans[1:]:
        np.testing.assert_allclose(span, spans[0], rtol=0, atol=1e-5)


def test_every_plan_fits_its_bucket():
    vision = load_config(OFFICIAL).vision
    assert span_buckets(vision) == (256, 512, 1024)
    for rows in range(1, 200):
        for columns in range(1, 600, 7):
            plan = PicturePlan(rows, columns, vision.patch_size, vision.downsample_ratio)
            if plan.span <= vision.max_image_tokens:
                width = span_bucket(plan.span, vision)
                assert plan.patches <= width * vision.downsample_ratio**2
                assert plan.cell_rows * plan.cell_columns <= width


# Memory


def test_tiles_of_queries_change_nothing(golden, pictures, monkeypatch):
    picture, _ = golden_picture(golden, "C3", 1)
    whole = encode_golden(golden, pictures, "C3", 1)["span"]
    monkeypatch.setattr(tiling, "TEMPORARY_BYTES", 4 * 4 * 144 * 7)  # 144 patches: tiles of 5 queries, padded
    width = span_bucket(picture.plan.span, golden.config.vision)
    encoder = PictureEncoder(pictures.settings)
    tiled = encoder.apply({"params": pictures.params}, *padded_patches(picture, width), width)
    np.testing.assert_allclose(np.asarray(tiled)[: picture.plan.span], whole, rtol=0, atol=1e-5)


def test_memory_does_not_grow_with_the_square_of_the_patches():
    """The largest picture of the official model: 9,216 patches, whose scores would take 5 GiB at once."""
    config = dataclasses.replace(load_config(OFFICIAL), dtype="float32", quantization=None)
    settings, vision = Settings.default(config), config.vision
    width = vision.max_image_tokens
    patches = width * vision.downsample_ratio**2
    lowered = encode_patches.lower(
        PictureEncoder(settings),
        abstract_encoder(settings),
        jax.ShapeDtypeStruct((patches, 3 * vision.patch_size**2), jnp.bfloat16),
        jax.ShapeDtypeStruct((2,), jnp.int32),
        width,
    )
    scores = 4 * vision.num_attention_heads * patches**2
    assert lowered.compile().memory_analysis().temp_size_in_bytes < scores / 10


# Layout of cells and spans


@pytest.mark.parametrize("grid", [(3, 3), (4, 5), (1, 7), (7, 1), (2, 3), (6, 4)])
def test_cells_are_channel_outermost_and_zero_padded(grid):
    rows, columns = grid
    x = np.random.default_rng(0).standard_normal((rows * columns + 4, 2)).astype(np.float32)
    x[rows * columns :] = np.nan
    padded = np.zeros((-(-rows // 3) * 3, -(-columns // 3) * 3, 2), np.float32)
    padded[:rows, :columns] = x[: rows * columns].reshape(rows, columns, 2)
    want = [
        padded[r : r + 3, c : c + 3].transpose(2, 0, 1).ravel()
        for r in range(0, padded.shape[0], 3)
        for c in range(0, padded.shape[1], 3)
    ]
    found = np.asarray(gather_cells(jnp.asarray(x), jnp.array(grid), 3, len(want) + 2))
    np.testing.assert_array_equal(found[: len(want)], want)
    assert not found[len(want) :].any()


@pytest.mark.parametrize("grid", [(1, 1), (1, 21), (21, 1), (7, 8)])
def test_markers_stand_where_the_sequence_has_them(pictures, grid):
    picture = random_picture(*grid)
    plan = picture.plan
    span = pictures.encode(picture).embeddings
    assert span.shape == (plan.span, pictures.settings.text.hidden_size)
    lines = span[1:-1].reshape(plan.cell_rows, plan.cell_columns + 1, -1)
    start, newline, end = (np.asarray(pictures.params[f"image_{name}"]) for name in ("start", "newline", "end"))
    np.testing.assert_array_equal(span[0], start)
    np.testing.assert_array_equal(span[-1], end)
    np.testing.assert_array_equal(lines[:, -1], np.broadcast_to(newline, lines[:, -1].shape))
    cells = lines[:, :-1].reshape(-1, lines.shape[-1])
    assert len(np.unique(cells, axis=0)) == len(cells)  # each cell is its own part of the picture
    for marker in (start, newline, end):
        assert not (cells == marker).all(-1).any()


def test_every_patch_sees_the_whole_picture(pictures):
    """Changing the last patch moves every cell: full attention, no causal order."""
    picture = random_picture(6, 6)
    changed = picture.patches.copy()
    changed[-1] = -changed[-1]
    before, after = (pictures.encode(Picture(p, picture.plan)).embeddings for p in (picture.patches, changed))
    moved = np.abs(before - after).max(-1)
    assert (moved[[1, 2, 4, 5]] > 1e-4).all()
    assert not moved[[0, 3, 6, 7]].any()


# Weights


def test_only_the_vision_part_is_read():
    config = load_config(GOLDEN / "mini8" / "fp8")
    layout = checkpoint_layout(config)
    source = Edited(RandomSource(config, 0), drop=[name for name, spec in layout.items() if spec.part != "vision"])
    params = Pictures(Settings.default(config), source).params
    assert source.reads == sum(spec.part == "vision" for spec in layout.values())
    assert params["vision"]["norm"]["weight"].dtype == jnp.float32
    assert params["vision"]["blocks"]["norm1"]["weight"].dtype == jnp.float32
    assert params["aligner"]["w1"]["weight"].dtype == jnp.bfloat16


def test_a_checkpoint_without_vision_is_named():
    config = load_config(GOLDEN / "mini8" / "fp8")
    layout = checkpoint_layout(config)
    source = Edited(RandomSource(config, 0), drop=[name for name, spec in layout.items() if spec.part == "vision"])
    with pytest.raises(CheckpointError, match=r"missing: vision\.patch_embed\.proj\.weight"):
        Pictures(Settings.default(config), source)


def test_embeddings_need_two_axes():
    with pytest.raises(ValueError, match=r"embeddings: shape \[3\]"):
        EncodedPicture(np.zeros(3))
