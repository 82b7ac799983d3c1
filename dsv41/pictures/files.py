"""Picture files into patches: decoded, upright, on white, resized as planned, cut into a grid."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import warnings

import ml_dtypes
import numpy as np
from einops import rearrange
from PIL import Image, ImageOps

from dsv41.config import VisionConfig
from dsv41.pictures.plan import PicturePlan, plan_picture

# What users send to a chat. Pillow knows many more, some of which start other programs.
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
_GREY = (127, 127, 127)
_16_BIT = 2**16 - 1


class PictureError(ValueError):
    """A picture that cannot be used; the message names the file."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture as the encoder takes it.

    Attributes:
      patches: bfloat16 ``[patches, 3 · patch_size²]``, −1 … 1, in row-major order; inside: channel, row, column.
      plan: its sizes.
    """

    patches: np.ndarray
    plan: PicturePlan


def picture_plan(path: str | os.PathLike, vision: VisionConfig) -> PicturePlan:
    """The plan of a picture file. The file is decoded, so that what is broken in it shows now.

    Raises:
      PictureError: see :func:`read_picture`.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise PictureError(f"{path}: {error.strerror}") from error
    return _known_plan(os.fspath(path), status.st_mtime_ns, status.st_size, vision)


# A request's pictures are planned when it is read, when it is queued and when its steps are compiled; decoding a
# photograph takes a tenth of a second.
@functools.lru_cache(maxsize=2**16)
def _known_plan(path: str, modified: int, size: int, vision: VisionConfig) -> PicturePlan:
    return _plan(path, _decode(path), vision)


def read_picture(path: str | os.PathLike, vision: VisionConfig) -> Picture:
    """Reads a PNG, JPEG, GIF (first frame) or WebP file.

    Raises:
      PictureError: there is no such file; it is no picture of these kinds, is cut off or broken; it has more pixels
        than Pillow takes for safe; or it is so narrow that nothing of it would be left.
    """
    image = _decode(path)
    plan = _plan(path, image, vision)
    size = (plan.width, plan.height)
    if plan.stretched:
        image = image.resize(size, Image.Resampling.BICUBIC)
    else:
        image = ImageOps.pad(image, size, Image.Resampling.BICUBIC, color=_GREY)
    values = (np.asarray(image, np.float32) / 255 - 0.5) / 0.5
    grid = {"h": plan.patch_rows, "w": plan.patch_columns}
    patches = rearrange(values, "(h y) (w x) c -> (h w) (c y x)", **grid)
    return Picture(patches.astype(ml_dtypes.bfloat16), plan)


def _plan(path: str | os.PathLike, image: Image.Image, vision: VisionConfig) -> PicturePlan:
    plan = plan_picture(image.width, image.height, vision)
    scale = min(plan.width / image.width, plan.height / image.height)
    if not plan.stretched and round(min(image.size) * scale) < 1:
        raise PictureError(
            f"{path}: {image.width}×{image.height} pixels become {plan.width}×{plan.height}, in which the shorter "
            "side is less than a pixel"
        )
    return plan


def _decode(path: str | os.PathLike) -> Image.Image:
    """All pixels of a file, upright, as 8-bit RGB."""
    try:
        with warnings.catch_warnings():
            # Between its warning and its error lies a factor of 2; both are decided from the header alone.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(pathlib.Path(path), formats=_FORMATS) as image:
                image.load()
                return _flat(ImageOps.exif_transpose(image))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureError(f"{path}: too many pixels ({error})") from error
    except Image.UnidentifiedImageError as error:
        raise PictureError(f"{path}: no picture in the format {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}") from error
    except OSError as error:
        raise PictureError(f"{path}: {error.strerror or error}") from error
    except (ValueError, SyntaxError, EOFError) as error:  # what Pillow's readers raise for broken contents
        raise PictureError(f"{path}: broken ({error})") from error


def _flat(image: Image.Image) -> Image.Image:
    """An image of any mode as 8-bit RGB."""
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would cut at 255 instead of scaling it
        grey = np.asarray(image, np.int64)
        if grey.min() < 0 or grey.max() > _16_BIT:
            raise ValueError(f"grey values {grey.min()} … {grey.max()} are beyond 16 bits")
        image = Image.fromarray(((grey * 255 + _16_BIT // 2) // _16_BIT).astype(np.uint8))
    if image.has_transparency_data:
        # On white, as pages show them: the colours under transparent pixels are arbitrary, mostly black, and
        # dropping the alpha channel would put dark text on a dark ground.
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")
