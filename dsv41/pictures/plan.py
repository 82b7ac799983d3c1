"""How a picture of any size is fitted to patches, cells and the token budget; sizes alone, no pixels.

A picture is resized (its aspect ratio kept, to within a patch) and cut into patches of ``patch_size`` pixels. r × r
patches (r = ``downsample_ratio``) make a cell, and in the sequence the picture is START, rows of (cells, NEWLINE), END:

    span = rows · (columns + 1) + 2 ≤ max_image_tokens
"""

from __future__ import annotations

import dataclasses
import math

from dsv41.config import VisionConfig


@dataclasses.dataclass(frozen=True)
class PicturePlan:
    """The sizes that a picture takes.

    Attributes:
      patch_rows, patch_columns: the grid that the vision tower sees.
      patch_size: pixels of a patch's side.
      downsample_ratio: patches of a cell's side.
      stretched: the picture is wider than ``max_wh_ratio`` allows and is squeezed, instead of padded.
    """

    patch_rows: int
    patch_columns: int
    patch_size: int
    downsample_ratio: int
    stretched: bool = False

    @property
    def height(self) -> int:
        """Pixels after resizing and padding."""
        return self.patch_rows * self.patch_size

    @property
    def width(self) -> int:
        """Pixels after resizing and padding."""
        return self.patch_columns * self.patch_size

    @property
    def patches(self) -> int:
        return self.patch_rows * self.patch_columns

    @property
    def cell_rows(self) -> int:
        return -(-self.patch_rows // self.downsample_ratio)

    @property
    def cell_columns(self) -> int:
        return -(-self.patch_columns // self.downsample_ratio)

    @property
    def span(self) -> int:
        """Positions in the sequence, markers and newlines counted."""
        return self.cell_rows * (self.cell_columns + 1) + 2


def plan_picture(width: int, height: int, vision: VisionConfig) -> PicturePlan:
    """The plan for a picture of so many pixels: at least ``min_pixels``, at most the token budget.

    Raises:
      ValueError: a side without pixels.
    """
    if min(width, height) < 1:
        raise ValueError(f"a picture of {width}×{height} pixels has none")
    size, limit = vision.patch_size, vision.max_wh_ratio
    stretched = limit is not None and width >= height * limit
    across, down = (min(width, height * limit), height) if limit is not None else (width, height)
    if across * down < vision.min_pixels:
        enlarge = (vision.min_pixels / (across * down)) ** 0.5
        across, down = int(across * enlarge), int(down * enlarge)

    def plan(rows: int, columns: int) -> PicturePlan:
        return PicturePlan(rows, columns, size, vision.downsample_ratio, stretched)

    fitted = plan(math.ceil(down / size), math.ceil(across / size))
    return fitted if fitted.span <= vision.max_image_tokens else plan(*_largest_grid(across, down, vision))


def _largest_grid(across: float, down: float, vision: VisionConfig) -> tuple[int, int]:
    """Patch rows and columns of the largest grid of this aspect ratio within the token budget.

    With columns w and rows a·w (a = height / width) the budget is a·w·(w + 1) + 2: a quadratic in w.
    """
    budget, ratio = vision.max_image_tokens, vision.downsample_ratio
    aspect = down / across
    columns = math.sqrt((budget - 2) / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1:  # a tower of single cells, each with its newline
        return (budget - 2) // 2 * ratio, ratio
    if rows < 1:  # one line of cells
        return ratio, (budget - 3) * ratio
    cell = vision.patch_size * ratio
    scale = min(math.floor(columns) * cell / across, math.floor(rows) * cell / down)
    return math.floor(down * scale / vision.patch_size), math.floor(across * scale / vision.patch_size)
