"""Encoding pictures: a function of its own with its own compiled shapes, so that another machine can run it.

What leaves it is an :class:`EncodedPicture`, the embeddings of a whole span. A request takes one in place of a file:
the machine that encodes needs the vision weights only, the one that prefills needs none of them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Iterable

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dsv41.checkpoint import CheckpointReader, LoadProgress, ParameterTree, RandomSource, TensorSource, load_checkpoint
from dsv41.config import ModelConfig, VisionConfig, load_config
from dsv41.layers.vision import PictureEncoder
from dsv41.pictures.files import Picture, read_picture
from dsv41.settings import Settings

_BUCKETS = 3


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedPicture:
    """A picture's span as embeddings.

    Attributes:
      embeddings: float array ``[span, d]``: START, rows of (cells, NEWLINE), END.
    """

    embeddings: np.ndarray

    def __post_init__(self) -> None:
        shape = np.shape(self.embeddings)
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"embeddings: shape {list(shape)} where [span, d] is needed")

    @property
    def span(self) -> int:
        """Positions in the sequence."""
        return self.embeddings.shape[0]


def span_buckets(vision: VisionConfig) -> tuple[int, ...]:
    """Widths that spans are padded to, ascending: a quarter, half and all of the token budget.

    A span of n positions has fewer than n cells, hence fewer than n · downsample_ratio² patches.
    """
    return tuple(dict.fromkeys(-(-vision.max_image_tokens // 2**i) for i in reversed(range(_BUCKETS))))


def span_bucket(span: int, vision: VisionConfig) -> int:
    """The width that a span of so many positions is padded to."""
    return next(width for width in span_buckets(vision) if width >= span)


@functools.partial(jax.jit, static_argnums=(0, 4))
def encode_patches(
    encoder: PictureEncoder, params: ParameterTree, patches: jax.Array, grid: jax.Array, width: int
) -> jax.Array:
    """Embeddings ``[width, d]`` of a span; see :class:`~dsv41.layers.vision.PictureEncoder`."""
    return encoder.apply({"params": params}, patches, grid, width)


def padded_patches(picture: Picture, width: int) -> tuple[np.ndarray, np.ndarray]:
    """A picture's patches padded for a span of ``width``, and its grid int32 ``[2]``."""
    plan = picture.plan
    patches = np.zeros((width * plan.downsample_ratio**2, picture.patches.shape[1]), ml_dtypes.bfloat16)
    patches[: plan.patches] = picture.patches
    return patches, np.array([plan.patch_rows, plan.patch_columns], np.int32)


def abstract_encoder(settings: Settings) -> ParameterTree:
    """Shapes and dtypes of the encoder's parameters as ``jax.ShapeDtypeStruct`` leaves; nothing is allocated."""
    vision = settings.config.vision
    width = span_buckets(vision)[0]
    shape = (width * vision.downsample_ratio**2, 3 * vision.patch_size**2)
    patches, grid = jax.ShapeDtypeStruct(shape, jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.int32)
    init = functools.partial(PictureEncoder(settings).init, width=width)
    return nn.meta.unbox(jax.eval_shape(init, jax.random.key(0), patches, grid))["params"]


class Pictures:
    """The vision part with its weights: picture files in, embeddings out.

    Attributes:
      settings: the model's.
      params: the encoder's parameters.
    """

    def __init__(
        self,
        settings: Settings,
        source: TensorSource,
        progress: Callable[[LoadProgress], None] | None = None,
        stored: ModelConfig | None = None,
    ) -> None:
        """Loads the weights.

        Args:
          source: a checkpoint, or random weights in its place; only the vision part's tensors are read.
          progress: called while they are read.
          stored: the source's own configuration where it is not the model's.

        Raises:
          CheckpointError: tensors are missing or do not fit.
        """
        self.settings = settings
        self.params = load_checkpoint(source, stored or settings.config, abstract_encoder(settings), progress)
        self._warm: set[int] = set()

    @classmethod
    def from_checkpoint(cls, directory: str | pathlib.Path) -> Pictures:
        """The vision part of a checkpoint in the public layout, alone."""
        directory = pathlib.Path(directory)
        return cls(Settings.default(load_config(directory)), CheckpointReader(directory))

    @classmethod
    def random(cls, config: ModelConfig, *, seed: int = 0) -> Pictures:
        """Random weights."""
        return cls(Settings.default(config), RandomSource(config, seed))

    def read(self, path: str | os.PathLike) -> EncodedPicture:
        """Reads and encodes a file.

        Raises:
          PictureError: the file cannot be used.
        """
        return self.encode(read_picture(path, self.settings.config.vision))

    def encode(self, picture: Picture) -> EncodedPicture:
        """Encodes patches; one compilation for each width of :func:`span_buckets`."""
        span = picture.plan.span
        width = span_bucket(span, self.settings.config.vision)
        patches, grid = padded_patches(picture, width)
        embeddings = encode_patches(PictureEncoder(self.settings), self.params, patches, grid, width)
        return EncodedPicture(np.asarray(embeddings)[:span])

    def warm_up(self, spans: Iterable[int]) -> None:
        """Compiles what spans of these lengths need and no earlier call has, by encoding one patch in each width."""
        vision = self.settings.config.vision
        for width in sorted({span_bucket(span, vision) for span in spans} - self._warm):
            patches = np.zeros((width * vision.downsample_ratio**2, 3 * vision.patch_size**2), ml_dtypes.bfloat16)
            encode_patches(PictureEncoder(self.settings), self.params, patches, np.ones(2, np.int32), width)
            self._warm.add(width)
