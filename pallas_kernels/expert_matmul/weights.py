"""One matrix of every expert, packed or plain."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.formats import FP4_E8M0, Packed


class ExpertWeights(NamedTuple):
    """One matrix of every expert, in the public layout.

    Attributes:
      weight: E2M1 codes ``[experts, out, in/2]`` uint8 (low nibble = even column), or floats ``[experts, out, in]``.
      scale: E8M0 bytes ``[experts, out, in/32]``; None with float weights.
    """

    weight: jax.Array
    scale: jax.Array | None


def decode_weights(weights: ExpertWeights, dtype: jnp.dtype) -> jax.Array:
    """``[..., out, in]`` floats; exact in bfloat16 if packed."""
    if weights.scale is None:
        return weights.weight.astype(dtype)
    return FP4_E8M0.decode(Packed(*weights), dtype)
