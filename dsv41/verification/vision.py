"""Pictures against the reference: patches through the tower and the aligner, and the span as it enters the prompt."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np

from dsv41.checkpoint import CheckpointReader
from dsv41.config import load_config
from dsv41.layers.vision import PictureEncoder
from dsv41.pictures.encoder import Pictures, padded_patches, span_bucket
from dsv41.pictures.files import Picture
from dsv41.pictures.plan import PicturePlan
from dsv41.settings import Settings
from dsv41.verification.golden import Golden
from dsv41.verification.limits import LAYER_ABSOLUTE, LAYER_RELATIVE_RMS
from dsv41.verification.table import Row, at_most, max_abs, relative_rms


@functools.partial(jax.jit, static_argnums=(0, 4))
def _captured(encoder: PictureEncoder, params: dict, patches: jax.Array, grid: jax.Array, width: int):
    return encoder.apply({"params": params}, patches, grid, width, mutable=["intermediates"])


def golden_pictures(golden: Golden) -> Pictures:
    """The checkpoint's vision part, its weights as the golden's flavour computes with them."""
    reader, stored = CheckpointReader(golden.weights), load_config(golden.weights)
    return Pictures(Settings.default(golden.config), reader, stored=stored)


def golden_picture(golden: Golden, case: str, number: int) -> tuple[Picture, int]:
    """A picture of a case, and the position of its span."""
    expected, vision = golden.tensors("expected"), golden.config.vision
    rows, columns, *_, start = (int(n) for n in expected[f"{case}.grid.{number}"])
    plan = PicturePlan(rows, columns, vision.patch_size, vision.downsample_ratio)
    return Picture(expected[f"{case}.patches.{number}"].reshape(plan.patches, -1), plan), start


def encode_golden(golden: Golden, pictures: Pictures, case: str, number: int) -> dict[str, np.ndarray]:
    """Live rows of ``vit_out``, ``image_rows`` and the whole ``span``, float32."""
    picture, _ = golden_picture(golden, case, number)
    plan = picture.plan
    width = span_bucket(plan.span, golden.config.vision)
    encoder = PictureEncoder(pictures.settings)
    span, captured = _captured(encoder, pictures.params, *padded_patches(picture, width), width)
    (tower,), (rows,) = (captured["intermediates"][name] for name in ("vit_out", "image_rows"))
    live = {"vit_out": plan.patches, "image_rows": plan.cell_rows * plan.cell_columns, "span": plan.span}
    return {name: np.asarray(x[: live[name]], np.float32) for name, x in zip(live, (tower, rows, span), strict=True)}


def compare_pictures(group: str, golden: Golden, cases: tuple[str, ...]) -> list[Row]:
    """Rows for every picture of the cases."""
    expected = golden.tensors("expected")
    found = [(m[1], int(m[2])) for m in (re.fullmatch(r"(\w+)\.patches\.(\d+)", name) for name in expected) if m]
    found = sorted(picture for picture in found if picture[0] in cases)
    pictures = golden_pictures(golden) if found else None
    rows: list[Row] = []
    for case, number in found:
        ours, (_, start) = encode_golden(golden, pictures, case, number), golden_picture(golden, case, number)
        rows.append(_row(group, golden, f"{case}.image_rows.{number}", ours["image_rows"]))
        if f"{case}.vit_out" in expected:  # kept where a case has one picture
            rows.append(_row(group, golden, f"{case}.vit_out", ours["vit_out"]))
        span = expected[f"{case}.prefill.embed"][0, start : start + len(ours["span"])]
        rows.append(_row(group, golden, f"{case}.prefill.embed of picture {number}", ours["span"], span))
    return rows


def _row(group: str, golden: Golden, name: str, ours: np.ndarray, want: np.ndarray | None = None) -> Row:
    want = golden.tensors("expected")[name] if want is None else want
    if golden.flavour == "f32":
        return at_most(group, name, "max abs", max_abs(ours, want), LAYER_ABSOLUTE)
    return at_most(group, name, "relative RMS", relative_rms(ours, want), LAYER_RELATIVE_RMS)
