"""The static choices that every module shares: sizes, roundings, and how weights lie in memory."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp

from dsv41.config import ModelConfig, TextConfig
from dsv41.layer_table import LayerTable, layer_table
from dsv41.numerics.rounding import Formats, RoundingPolicy
from dsv41.sharding.parallel import SINGLE, Parallel

_PAGE_TOKENS = 64

REMAT = ("nothing", "choices", "products")
"""What may be recomputed in a backward pass: nothing; all of a layer but its choices of entries and experts, so that it
chooses as it did; or all but those and the results of products without a batch axis."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a compiled step depends on besides shapes. Hashable, so that modules can hold it as an attribute.

    Attributes:
      config: the model's configuration.
      policy: which roundings are on.
      packed_weights: True keeps quantised weights as the checkpoint stores them (FP8 and FP4 with scales);
        False has them as plain floats of the activation dtype.
      page_tokens: tokens of one memory page; a multiple of every compression ratio.
      engram_in_step: True has Engram's tables among the parameters, and steps look up in them. False leaves them to
        :mod:`dsv41.engram`: steps are given the rows.
      simulated: True keeps caches as floats, rounded as packed ones are, so that they can be differentiated.
      remat: what a backward pass keeps of a layer, one of :data:`REMAT`.
      parallel: the mesh that steps run on, one program a device; modules then declare one device's part of each
        parameter. :attr:`whole` has the same model undivided.
    """

    config: ModelConfig
    policy: RoundingPolicy
    packed_weights: bool
    page_tokens: int
    engram_in_step: bool = True
    simulated: bool = False
    remat: str = "nothing"
    parallel: Parallel = SINGLE

    def __post_init__(self):
        if self.remat not in REMAT:
            raise ValueError(f"remat: {self.remat!r} is none of {', '.join(REMAT)}")
        for ratio in self.table.ratios:
            if self.page_tokens % ratio:
                raise ValueError(f"page_tokens: {self.page_tokens} is not a multiple of compress ratio {ratio}")
        if self.packed_weights and self.config.quantization is None:
            raise ValueError("packed_weights: the config has no quantization_config, its weights are plain floats")

    def __hash__(self) -> int:
        # Every call of a jitted step hashes its static arguments: walking a whole configuration costs more than
        # a small step's own dispatch.
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    @classmethod
    def default(
        cls,
        config: ModelConfig,
        *,
        cache_rounding: bool = True,
        packed_weights: bool | None = None,
        page_tokens: int | None = None,
        engram_in_step: bool = True,
    ) -> Settings:
        """The reference's roundings and the checkpoint's own storage.

        Args:
          cache_rounding: False keeps caches, index keys and index queries in the activation dtype.
          packed_weights: None packs exactly where the checkpoint does.
          page_tokens: None takes 64, or the next number that every compression ratio divides.
          engram_in_step: see the attribute.
        """
        if page_tokens is None:
            step = math.lcm(*layer_table(config.text).ratios)
            page_tokens = -(-_PAGE_TOKENS // step) * step
        packed = config.quantization is not None if packed_weights is None else packed_weights
        return cls(config, RoundingPolicy.for_config(config, cache_rounding), packed, page_tokens, engram_in_step)

    @classmethod
    def for_training(
        cls, config: ModelConfig, policy: RoundingPolicy, remat: str = "choices", parallel: Parallel = SINGLE
    ) -> Settings:
        """Float weights and caches, rounded as the policy says; gradients pass every rounding straight through."""
        page_tokens = cls.default(config).page_tokens
        return cls(config, policy, False, page_tokens, simulated=True, remat=remat, parallel=parallel)

    @functools.cached_property
    def whole(self) -> Settings:
        """The same on one device: what checkpoints and declarations of whole parameters go by."""
        return self if self.parallel == SINGLE else dataclasses.replace(self, parallel=SINGLE)

    @property
    def text(self) -> TextConfig:
        return self.config.text

    @property
    def dtype(self) -> jnp.dtype:
        return self.config.activation_dtype

    @functools.cached_property
    def table(self) -> LayerTable:
        return layer_table(self.config.text)

    @functools.cached_property
    def formats(self) -> Formats:
        return Formats.of(self.policy, self.dtype, self.simulated)

    def rounds(self, weights: str) -> bool:
        """Whether float weights are rounded where they are used, by the policy's switch of this name.

        In training alone: those that a quantised checkpoint gives are rounded already.
        """
        return self.simulated and getattr(self.policy, weights)

    def page_entries(self, ratio: int) -> int:
        """Global entries that one page holds for a source of this compression ratio."""
        return self.page_tokens // ratio
