"""Where the model rounds, as one policy of switches, and rounding that gradients pass straight through."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dsv41.config import ModelConfig
from pallas_kernels.formats import FP4_E4M3, FP4_E8M0, FP8_E8M0, DenseFormat, Format
from pallas_kernels.products import rounded


def straight_through(fmt: Format, x: jax.Array) -> jax.Array:
    """Rounds ``[..., width]`` values to ``fmt``; the derivative is the identity, clipped values included."""
    return rounded(fmt, x)


@dataclasses.dataclass(frozen=True)
class RoundingPolicy:
    """One switch for each rounding; inference stores what training simulates.

    Attributes:
      main_kv: global entries, E2M1 with an E4M3 scale per 16.
      index_keys: index keys, E2M1 with a power-of-two scale per 32.
      index_queries: index queries, as the keys (never stored).
      window: window entries, E4M3 with a power-of-two scale per 32.
      activations: inputs of quantised linears, E4M3 with a power-of-two scale per 32.
    """

    main_kv: bool = True
    index_keys: bool = True
    index_queries: bool = True
    window: bool = True
    activations: bool = True

    @classmethod
    def for_config(cls, config: ModelConfig, cache: bool = True) -> RoundingPolicy:
        """The reference's roundings: the caches', and the activations' where the checkpoint is quantised.

        Args:
          cache: False switches the four cache and index roundings off.
        """
        return cls(cache, cache, cache, cache, activations=config.quantization is not None)


@dataclasses.dataclass(frozen=True)
class Formats:
    """The storage format of each rounded thing under one policy."""

    main_kv: Format
    index_keys: Format
    index_queries: Format
    window: Format
    activations: Format

    @classmethod
    def of(cls, policy: RoundingPolicy, dtype: jnp.dtype) -> Formats:
        """Formats where the policy rounds, the plain activation dtype where it does not."""
        plain = DenseFormat(jnp.dtype(dtype).name)
        return cls(
            main_kv=FP4_E4M3 if policy.main_kv else plain,
            index_keys=FP4_E8M0 if policy.index_keys else plain,
            index_queries=FP4_E8M0 if policy.index_queries else plain,
            window=FP8_E8M0 if policy.window else plain,
            activations=FP8_E8M0 if policy.activations else plain,
        )
