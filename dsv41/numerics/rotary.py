"""Partial rotary positions: the last R of a vector, adjacent pairs, with YaRN in the CSA2 layers."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.config import TextConfig
from pallas_kernels.products import narrow


def window_frequencies(text: TextConfig) -> np.ndarray:
    """Angular frequencies ``[R/2]`` float32 of window-only layers: no YaRN."""
    return _inverse_powers(text.qk_rope_head_dim, text.rope_theta)


def csa_frequencies(text: TextConfig) -> np.ndarray:
    """Angular frequencies ``[R/2]`` float32 of every CSA2 layer (queries, window keys and global entries): YaRN.

    There is no softmax factor: YaRN changes frequencies only.
    """
    rope, yarn, base = text.qk_rope_head_dim, text.rope_scaling, text.compress_rope_theta

    def dimension(rotations: float) -> float:
        wavelength = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope * math.log(wavelength) / (2 * math.log(base))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), rope - 1)
    ramp = np.clip((np.arange(rope // 2, dtype=np.float32) - low) / max(high - low, 1e-3), 0, 1).astype(np.float32)
    plain = _inverse_powers(rope, base)
    return (plain / np.float32(yarn.factor) * ramp + plain * (1 - ramp)).astype(np.float32)


def _inverse_powers(rope: int, base: float) -> np.ndarray:
    # The power is correctly rounded through float64: one unit in the last place is 0.03 rad at position 10⁶.
    exponents = np.arange(0, rope, 2, dtype=np.float32) / np.float32(rope)
    powers = np.power(np.float64(base), exponents.astype(np.float64)).astype(np.float32)
    return np.float32(1.0) / powers


def rotary_table(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, each ``[*positions.shape, R/2]`` float32, of integer positions."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array], inverse: bool = False) -> jax.Array:
    """Rotates the last R of ``x`` ``[..., D]``; the table's ``[..., R/2]`` broadcasts against x's leading axes.

    Args:
      inverse: rotates back (the output of attention, by the query's position).
    """
    cos, sin = table
    if inverse:
        sin = -sin
    rope = 2 * cos.shape[-1]
    keep, turn = x[..., :-rope], x[..., -rope:].astype(jnp.float32)
    even, odd = turn[..., 0::2], turn[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(turn.shape)
    return jnp.concatenate([keep, narrow(turned, x.dtype)], axis=-1)
