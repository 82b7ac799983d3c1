"""Decoding of packed values in 32-bit lanes by integer arithmetic: no chip before the newest has small float types.

Arrays are int32 or float32 and of any shape; every function works element by element.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

# Twice the magnitude of the eight E2M1 codes, four bits each: 0, 1, 2, 3, 4, 6, 8, 12.
_E2M1_HALVES = 0xC8643210 - (1 << 32)


def e2m1_doubled(codes: jax.Array) -> jax.Array:
    """Twice the values of E2M1 codes; bits above the lowest four are ignored."""
    halves = (jnp.int32(_E2M1_HALVES) >> ((codes & 7) << 2)) & 15
    return jnp.where((codes & 8) != 0, -halves, halves).astype(jnp.float32)


def e4m3(codes: jax.Array) -> jax.Array:
    """Values of E4M3 codes 0..255."""
    magnitude = codes & 0x7F
    normal = lax.bitcast_convert_type((magnitude << 20) + (120 << 23), jnp.float32)
    value = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * 2.0**-9, normal)
    value = jnp.where(magnitude == 0x7F, jnp.nan, value)
    return jnp.where(codes >= 0x80, -value, value)


def e8m0(codes: jax.Array) -> jax.Array:
    """Powers of two of E8M0 codes 0..255; 0 is a subnormal, which the chip takes for zero, and 255 is infinite."""
    return lax.bitcast_convert_type(jnp.where(codes == 0, 1 << 22, codes << 23), jnp.float32)
