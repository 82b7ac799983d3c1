"""Where the model rounds, as one policy of switches, and rounding that gradients pass straight through."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from dsv41.config import ModelConfig
from pallas_kernels.block_linear.weights import round_blocks
from pallas_kernels.formats import FP4_E4M3, FP4_E8M0, FP8_E8M0, BlockFormat, DenseFormat, Format, Packed
from pallas_kernels.products import rounded, straight_through_to


def straight_through(fmt: Format, x: jax.Array) -> jax.Array:
    """Rounds ``[..., width]`` values to ``fmt``; the derivative is the identity, clipped values included."""
    return rounded(fmt, x)


def straight_through_blocks(weight: jax.Array) -> jax.Array:
    """Rounds a matrix ``[out, in]`` to E4M3, a power-of-two scale per 32×32 block; the derivative is the identity."""
    return straight_through_to(weight, round_blocks(weight))


@dataclasses.dataclass(frozen=True)
class SimulatedFormat(DenseFormat):
    """Values of a block format kept as plain floats: what is stored can be differentiated, straight through.

    Every block format's values are exact in bfloat16, so that they are those that packed storage would give back.

    Attributes:
      rounding: the block format.
    """

    rounding: BlockFormat

    def encode(self, x: jax.Array) -> Packed:
        return super().encode(rounded(self.rounding, x))

    def round(self, x: jax.Array) -> jax.Array:
        return rounded(self.rounding, x)


@dataclasses.dataclass(frozen=True)
class RoundingPolicy:
    """One switch for each rounding; inference stores what training simulates.

    Attributes:
      main_kv: global entries, E2M1 with an E4M3 scale per 16.
      index_keys: index keys, E2M1 with a power-of-two scale per 32.
      index_queries: index queries, as the keys (never stored).
      window: window entries, E4M3 with a power-of-two scale per 32.
      activations: inputs of quantised linears, E4M3 with a power-of-two scale per 32.
      expert_weights: routed experts, E2M1 with a power-of-two scale per 32 inputs. Like the next one it has nothing
        to do where weights are kept packed: those are rounded already.
      dense_weights: quantised linears, E4M3 with a power-of-two scale per 32×32 block, and rows of Engram's tables,
        with one per 32 of a row.
    """

    main_kv: bool = True
    index_keys: bool = True
    index_queries: bool = True
    window: bool = True
    activations: bool = True
    expert_weights: bool = True
    dense_weights: bool = True

    @classmethod
    def for_config(cls, config: ModelConfig, cache: bool = True) -> RoundingPolicy:
        """The reference's: of caches, and where the checkpoint is quantised of weights and activations.

        Args:
          cache: False switches the four cache and index roundings off.
        """
        quantised = config.quantization is not None
        return cls(cache, cache, cache, cache, quantised, quantised, quantised)

    @classmethod
    def preset(cls, name: str, switches: Mapping[str, bool] | None = None) -> RoundingPolicy:
        """A policy by name, and single switches that differ from it.

        Args:
          name: "off": nothing is rounded; "cache": what a request stores, and index queries; "full": weights and
            activations too.

        Raises:
          ValueError: there is no such preset or switch.
        """
        if name not in POLICY_PRESETS:
            raise ValueError(f"policy preset {name!r} is none of {', '.join(POLICY_PRESETS)}")
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(switches or {}) - set(known)):
            raise ValueError(f"policy switch {unknown[0]!r} is none of {', '.join(known)}")
        return cls(**{**dict.fromkeys(known, False), **dict.fromkeys(POLICY_PRESETS[name], True), **(switches or {})})


_CACHE = ("main_kv", "index_keys", "index_queries", "window")
POLICY_PRESETS = {"off": (), "cache": _CACHE, "full": (*_CACHE, "activations", "expert_weights", "dense_weights")}
"""The switches that are on in each preset of a :class:`RoundingPolicy`."""


@dataclasses.dataclass(frozen=True)
class Formats:
    """The storage format of each rounded thing under one policy."""

    main_kv: Format
    index_keys: Format
    index_queries: Format
    window: Format
    activations: Format

    @classmethod
    def of(cls, policy: RoundingPolicy, dtype: jnp.dtype, simulated: bool = False) -> Formats:
        """Formats where the policy rounds, the plain activation dtype where it does not.

        Args:
          simulated: rounded things are kept as floats of ``dtype``.
        """
        plain = DenseFormat(jnp.dtype(dtype).name)

        def of(rounds: bool, fmt: BlockFormat) -> Format:
            if not rounds:
                return plain
            return SimulatedFormat(plain.dtype, fmt) if simulated else fmt

        return cls(
            main_kv=of(policy.main_kv, FP4_E4M3),
            index_keys=of(policy.index_keys, FP4_E8M0),
            index_queries=of(policy.index_queries, FP4_E8M0),
            window=of(policy.window, FP8_E8M0),
            # Never stored, and rounded inside the operations.
            activations=FP8_E8M0 if policy.activations else plain,
        )
