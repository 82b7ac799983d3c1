"""Picture files: planned sizes, every kind of pixels, and what is refused."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from dsv41.config import VisionConfig, load_config
from dsv41.pictures.files import PictureError, picture_plan, read_picture
from dsv41.pictures.plan import PicturePlan, plan_picture
from tests.checkpoints import OFFICIAL
from tests.conftest import GOLDEN

PLANS = json.loads((GOLDEN.parent / "pictures" / "plan_official.json").read_text())
SIZE = 42


@pytest.fixture(scope="module")
def official() -> VisionConfig:
    return load_config(OFFICIAL).vision


@pytest.fixture(scope="module")
def small(official) -> VisionConfig:
    """Pictures of 42 × 42 pixels keep their size: one cell."""
    return dataclasses.replace(official, min_pixels=SIZE**2, max_image_tokens=64)


def pixels(path: pathlib.Path, vision: VisionConfig) -> np.ndarray:
    """What the encoder sees of a file, as 8-bit values ``[height, width, 3]``."""
    picture = read_picture(path, vision)
    plan, size = picture.plan, picture.plan.patch_size
    grid = picture.patches.astype(np.float32).reshape(plan.patch_rows, plan.patch_columns, 3, size, size)
    return (grid.transpose(0, 3, 1, 4, 2).reshape(plan.height, plan.width, 3) * 0.5 + 0.5) * 255


def save(image: Image.Image, path: pathlib.Path, **options) -> pathlib.Path:
    image.save(path, **options)
    return path


def gradient(channels: int) -> np.ndarray:
    """An image whose pixels and channels are all different enough to be told apart."""
    y, x = np.mgrid[:SIZE, :SIZE]
    planes = [(4 * x + y) % 256, (x + 4 * y) % 256, (2 * x + 3 * y + 90) % 256, (5 * x + 1) % 256][:channels]
    return np.stack(planes, axis=-1).astype(np.uint8)


def assert_pixels(found: np.ndarray, wanted: np.ndarray, tolerance: float = 0.6) -> None:
    """Equal up to what bfloat16 loses of values in −1 … 1."""
    np.testing.assert_allclose(found, np.broadcast_to(wanted, found.shape), rtol=0, atol=tolerance)


# Plans


@pytest.mark.parametrize("wanted", PLANS["plans"], ids=lambda plan: f"{plan['width']}x{plan['height']}")
def test_plans_are_the_references(official, wanted):
    for field, value in PLANS["config"].items():
        assert getattr(official, field) == value
    plan = plan_picture(wanted["width"], wanted["height"], official)
    assert (plan.cell_rows, plan.cell_columns) == (wanted["n_llm_h"], wanted["n_llm_w"])
    assert (plan.height, plan.width) == (wanted["best_height"], wanted["best_width"])
    assert (plan.patch_rows, plan.patch_columns) == (wanted["n_vit_h"], wanted["n_vit_w"])
    assert plan.span == wanted["tokens"]


def test_spans_are_the_vendors_counts(official):
    """Up to an aspect ratio of 10; beyond it the vendor's library fits again what it has fitted."""
    deepseek_recipe = pytest.importorskip("deepseek_recipe")
    rng, compared = np.random.default_rng(0), 0
    while compared < 500:
        width, height = (int(n) for n in np.exp(rng.uniform(2, 9.5, 2)))
        if max(width, height) > 10 * min(width, height):
            continue
        image = deepseek_recipe.ImageInfo(b"", width, height)
        vendors = deepseek_recipe.MultiModalData([image]).image_token_adjustment() + 1
        assert plan_picture(width, height, official).span == vendors, (width, height)
        compared += 1


def test_no_size_exceeds_the_budget(official):
    rng = np.random.default_rng(1)
    for budget in (official.max_image_tokens, 64, 9):
        vision = dataclasses.replace(official, max_image_tokens=budget)
        for width, height in np.exp(rng.uniform(0, 12, (400, 2))).astype(int):
            plan = plan_picture(int(width), int(height), vision)
            assert plan.span <= budget
            assert min(plan.patch_rows, plan.patch_columns) >= 1


def test_a_wide_picture_is_squeezed_where_the_config_limits_it(small, tmp_path):
    vision = dataclasses.replace(small, max_wh_ratio=2.0)
    plan = plan_picture(4 * SIZE, SIZE, vision)
    assert plan == PicturePlan(3, 6, 14, 3, stretched=True)
    wide = save(Image.fromarray(np.repeat(gradient(3), 4, axis=1)), tmp_path / "wide.png")
    found = pixels(wide, vision)
    assert found.shape == (SIZE, 2 * SIZE, 3)
    assert np.abs(found[[0, -1]] - 127).max() > 20  # no grey bands: the picture fills it
    assert plan_picture(SIZE, 4 * SIZE, vision) == plan_picture(SIZE, 4 * SIZE, small)


# Pixels


def test_pixels_arrive_in_their_places(small, tmp_path):
    image = np.concatenate([gradient(3), 255 - gradient(3)], axis=1)
    path = save(Image.fromarray(image), tmp_path / "a.png")
    picture = read_picture(path, small)
    assert picture.patches.dtype.name == "bfloat16"
    assert picture.patches.shape == (18, 588)
    assert picture.plan == picture_plan(path, small) == PicturePlan(3, 6, 14, 3)
    assert_pixels(pixels(path, small), image)
    patch = picture.patches.astype(np.float32)[7].reshape(3, 14, 14)  # second row of patches, second column
    np.testing.assert_allclose(patch, (image[14:28, 14:28].transpose(2, 0, 1) / 255 - 0.5) / 0.5, atol=4e-3)


def test_black_and_white_span_the_whole_range(small, tmp_path):
    for value, wanted in ((0, -1.0), (255, 1.0)):
        path = save(Image.new("L", (SIZE, SIZE), value), tmp_path / "a.png")
        assert (read_picture(path, small).patches == wanted).all()


def test_resizing_is_bicubic_and_pads_with_grey(official, tmp_path):
    image = Image.fromarray(gradient(3)).resize((640, 480))
    path = save(image, tmp_path / "a.png")
    found = pixels(path, official)
    assert found.shape == (490, 644, 3)
    wanted = np.full(found.shape, 127.0)
    resized = np.asarray(image.resize((644, 483), Image.Resampling.BICUBIC), np.float32)
    top = round((490 - 483) / 2)
    wanted[top : top + 483] = resized
    assert_pixels(found, wanted)


def test_palette_one_bit_and_grey(small, tmp_path):
    colour = gradient(3)
    palette = Image.fromarray(colour).quantize(200)
    assert_pixels(pixels(save(palette, tmp_path / "p.png"), small), np.asarray(palette.convert("RGB")))
    one_bit = Image.fromarray(colour[..., 0]).point(lambda v: 255 * (v > 127), mode="1")
    assert_pixels(pixels(save(one_bit, tmp_path / "1.png"), small), 255.0 * np.asarray(one_bit)[..., None])
    grey = save(Image.fromarray(colour[..., 0]), tmp_path / "l.png")
    assert_pixels(pixels(grey, small), colour[..., :1])


def test_16_bit_grey_is_scaled_not_cut(small, tmp_path):
    grey = gradient(1)[..., 0].astype(np.uint16) * 257
    path = save(Image.fromarray(grey), tmp_path / "a.png")
    with Image.open(path) as image:
        assert image.mode.startswith("I")
    assert_pixels(pixels(path, small), gradient(1))


def test_cmyk_jpeg(small, tmp_path):
    image = Image.new("CMYK", (SIZE, SIZE), (255, 0, 0, 0))
    found = pixels(save(image, tmp_path / "a.jpg", quality=95), small)
    assert_pixels(found, np.array([0, 255, 255]), tolerance=6)


def test_transparency_lies_on_white(small, tmp_path):
    colour = gradient(4)
    colour[:9, :, 3] = 0
    colour[9:18, :, 3] = 255
    alpha = colour[..., 3:] / 255
    wanted = colour[..., :3] * alpha + 255 * (1 - alpha)
    assert_pixels(pixels(save(Image.fromarray(colour), tmp_path / "rgba.png"), small), wanted, tolerance=1.6)
    grey = save(Image.fromarray(colour[..., [0, 3]]), tmp_path / "la.png")
    assert_pixels(pixels(grey, small), colour[..., :1] * alpha + 255 * (1 - alpha), tolerance=1.6)
    keyed = Image.new("P", (SIZE, SIZE), 0)
    keyed.putpalette([0, 0, 0, 10, 200, 30])
    keyed.paste(1, (0, 0, SIZE, SIZE // 2))
    found = pixels(save(keyed, tmp_path / "p.png", transparency=0), small)
    assert_pixels(found[: SIZE // 2], np.array([10, 200, 30]))
    assert_pixels(found[SIZE // 2 :], np.array([255, 255, 255]))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_stand_upright(small, tmp_path, orientation):
    upright = Image.fromarray(np.concatenate([gradient(3), 255 - gradient(3)], axis=1))
    turn = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }.get(orientation)
    stored = upright if turn is None else upright.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(stored, tmp_path / "a.png", exif=exif)
    assert picture_plan(path, small) == PicturePlan(3, 6, 14, 3)
    assert_pixels(pixels(path, small), np.asarray(upright))


def test_the_first_frame_of_an_animation(small, tmp_path):
    frames = [Image.new("RGB", (SIZE, SIZE), colour) for colour in ("red", "blue")]
    path = save(frames[0], tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert_pixels(pixels(path, small), np.array([255, 0, 0]))


# Refusals


def png_of_size(width: int, height: int) -> bytes:
    """A small file that announces so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(10_000, 10_000), (100_000, 100_000)])
def test_decompression_bombs_are_refused_by_their_pixels(small, tmp_path, width, height):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_of_size(width, height))
    with pytest.raises(PictureError, match=rf"bomb\.png: too many pixels \(.*{width * height} pixels"):
        picture_plan(path, small)


def test_truncated_files_are_refused_when_planned(small, tmp_path):
    for name in ("a.png", "a.jpg", "a.gif", "a.webp"):
        buffer = io.BytesIO()
        noise = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
        Image.fromarray(noise).save(buffer, {"jpg": "JPEG"}.get(name[2:], name[2:].upper()))
        path = tmp_path / name
        for part in (0.5, 0.02):
            path.write_bytes(buffer.getvalue()[: int(len(buffer.getvalue()) * part)])
            with pytest.raises(PictureError, match=name.replace(".", r"\.")):
                picture_plan(path, small)


def test_flipped_bytes_are_refused_or_read(small, tmp_path):
    """Whatever is broken in a file, the error is one that names it."""
    rng, errors = np.random.default_rng(0), []
    buffer = io.BytesIO()
    Image.fromarray(gradient(3)).save(buffer, "PNG")
    path = tmp_path / "a.png"
    for _ in range(200):
        data = np.frombuffer(buffer.getvalue(), np.uint8).copy()
        data[rng.integers(len(data))] ^= rng.integers(1, 256)
        path.write_bytes(data.tobytes())
        try:
            read_picture(path, small)
        except PictureError as error:
            errors.append(str(error))
    assert len(errors) > 50
    assert all("a.png" in error for error in errors)


def test_other_files_are_refused(small, tmp_path):
    with pytest.raises(PictureError, match=r"none\.png: No such file or directory"):
        read_picture(tmp_path / "none.png", small)
    with pytest.raises(PictureError, match="Is a directory"):
        read_picture(tmp_path, small)
    text = tmp_path / "a.png"
    text.write_text("not a picture")
    with pytest.raises(PictureError, match=r"a\.png: no picture in the format PNG, JPEG, GIF or WEBP"):
        read_picture(text, small)
    text.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 42 42\n")  # would start an interpreter
    with pytest.raises(PictureError, match="no picture in the format"):
        read_picture(text, small)


def test_a_picture_that_would_vanish_is_refused(official, tmp_path):
    path = save(Image.new("L", (100_000, 1)), tmp_path / "line.png")
    with pytest.raises(PictureError, match=r"line\.png: 100000×1 pixels become .* less than a pixel"):
        picture_plan(path, official)
    assert ImageOps.contain(Image.new("L", (5000, 1)), (38472, 14)).height == 8  # this one is still there
    assert picture_plan(save(Image.new("L", (5000, 1)), tmp_path / "line.png"), official).patch_rows == 1
