"""Block number formats: E2M1 and E4M3 elements with one shared scale for a block of consecutive values.

| format | element | scale | block | used for |
| --- | --- | --- | --- | --- |
| FP4_E4M3 | E2M1, two a byte (low nibble = even index) | E4M3 | 16 | main global entries |
| FP4_E8M0 | E2M1, two a byte | E8M0 (power of two) | 32 | index keys and queries, expert weights |
| FP8_E8M0 | E4M3 | E8M0 | 32 | window entries, linear inputs |

Everything here is bit-exact with the public reference and computed by integer arithmetic where floating point
would not be: power-of-two scales come from exponent bits (a float32 ``ceil(log2(x))`` is wrong at exact powers
of two), and E2M1 is decoded through integers because float32 subnormals are flushed to zero on some back ends.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

E2M1_MAX = 6.0
E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between the values of consecutive codes; on one the even code is nearest: the lower one on every other."""
E4M3_MAX = 448.0


class Packed(NamedTuple):
    """Encoded values; both leaves share the leading axes of the values that they hold.

    Attributes:
      payload: element codes, ``[..., payload_width]`` uint8 (floats in an unrounded format). Bytes and not float8:
        XLA on CPU widens float8 arrays to scatter into them, which would copy a whole pool.
      scales: block scales, ``[..., scale_width]`` uint8; None in an unrounded format.
    """

    payload: jax.Array
    scales: jax.Array | None

    def map(self, f, *others: Packed) -> Packed:
        """Applies ``f`` to the payloads and, where there are any, to the scales."""
        scales = None if self.scales is None else f(self.scales, *(o.scales for o in others))
        return Packed(f(self.payload, *(o.payload for o in others)), scales)


def e2m1_encode(x: jax.Array, step: jax.Array | float = 1.0) -> jax.Array:
    """Codes 0..15 (uint8) of float32 values over ``step``: to nearest, ties to the even code, -0 keeps its sign.

    Beyond 6 steps the code is that of 6. With few significant bits in ``step`` (E4M3's four) the middles of two codes
    times it are exact, which a quotient is not: XLA multiplies by reciprocals, GPUs divide approximately.
    """
    a = jnp.abs(x)
    beyond = (a > m * step if i % 2 == 0 else a >= m * step for i, m in enumerate(E2M1_MIDDLES))
    code = sum((b.astype(jnp.uint8) for b in beyond), start=jnp.zeros(x.shape, jnp.uint8))
    return code | (jnp.signbit(x).astype(jnp.uint8) << 3)


def e2m1_decode(codes: jax.Array, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Values of E2M1 codes 0..15 (uint8)."""
    m = (codes & 7).astype(jnp.int32)
    halves = jnp.where(m < 2, m, (2 | (m & 1)) << jnp.maximum((m >> 1) - 1, 0))
    value = halves.astype(dtype) * jnp.asarray(0.5, dtype)
    return jnp.where(codes >= 8, -value, value)


def nibbles_pack(codes: jax.Array) -> jax.Array:
    """``[..., n]`` codes to ``[..., n/2]`` bytes, the even index in the low nibble."""
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def nibbles_unpack(packed: jax.Array) -> jax.Array:
    """``[..., n]`` bytes to ``[..., 2n]`` codes."""
    return jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def e8m0_encode_ceil(x: jax.Array) -> jax.Array:
    """E8M0 byte of the smallest power of two that is ≥ x, for positive normal float32 x."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).astype(jnp.uint8)


def e8m0_decode(byte: jax.Array) -> jax.Array:
    """float32 value 2^(byte − 127). Byte 0 (2⁻¹²⁷) is a subnormal that back ends flush to zero; 255 reads as +inf."""
    bits = byte.astype(jnp.uint32) << 23
    return lax.bitcast_convert_type(jnp.where(byte == 0, jnp.uint32(1 << 22), bits), jnp.float32)


def e4m3_encode(x: jax.Array) -> jax.Array:
    """Codes (uint8) of float values in [-448, 448]: to nearest, ties to the even code; NaN stays NaN.

    Integer arithmetic, not a cast: a cast to a small float that is widened again may be skipped by XLA (it allows
    excess precision), and then nothing is rounded.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    magnitude = bits & 0x7FFFFFFF
    # Normal values: drop 20 of 23 mantissa bits, to nearest even; the exponent's bias goes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2⁻⁶ the step is 2⁻⁹; code 8 is 2⁻⁶ itself, so rounding up needs no care.
    small = lax.bitcast_convert_type(jnp.minimum(magnitude, (127 - 6) << 23), jnp.float32)
    subnormal = lax.round(small * 2.0**9, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.uint32)
    code = jnp.where(magnitude < (127 - 6) << 23, subnormal, normal)
    code = jnp.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 31) << 7)).astype(jnp.uint8)


def e4m3_decode(byte: jax.Array) -> jax.Array:
    """float32 values of E4M3 bytes (uint8)."""
    return lax.bitcast_convert_type(byte, jnp.float8_e4m3fn).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """Elements of one small float type that share a scale in blocks along the last axis.

    Attributes:
      element: "e2m1" or "e4m3".
      scale: "e8m0" (power of two, rounded up) or, of E2M1 only, "e4m3" (to nearest, so that values may clip).
      block: values that share a scale.
      floor: smallest absolute maximum that a block is taken to have.
    """

    element: str
    scale: str
    block: int
    floor: float

    def __post_init__(self) -> None:
        if (self.element, self.scale) not in (("e2m1", "e4m3"), ("e2m1", "e8m0"), ("e4m3", "e8m0")):
            raise ValueError(f"block format: there is no {self.element} with scales {self.scale}")

    def payload_width(self, width: int) -> int:
        """Last axis of the payload of ``width`` values."""
        return width // 2 if self.element == "e2m1" else width

    def scale_width(self, width: int) -> int:
        return width // self.block

    def entry_bytes(self, width: int) -> int:
        """Bytes of one vector of ``width`` values, scales included."""
        return self.payload_width(width) + self.scale_width(width)

    def zeros(self, shape: tuple[int, ...], width: int) -> Packed:
        """An encoded array of zeros of shape ``[*shape, width]``."""
        return Packed(
            jnp.zeros((*shape, self.payload_width(width)), jnp.uint8),
            jnp.zeros((*shape, self.scale_width(width)), jnp.uint8),
        )

    def encode(self, x: jax.Array) -> Packed:
        """Rounds and packs ``[..., width]`` floats.

        Raises:
          ValueError: width is not a multiple of the block.
        """
        if x.shape[-1] % self.block:
            raise ValueError(f"width {x.shape[-1]} is not a multiple of the block of {self.block}")
        limit = E2M1_MAX if self.element == "e2m1" else E4M3_MAX
        blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, self.block)
        ratio = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1), self.floor) / limit
        if self.scale == "e4m3":
            scales = e4m3_encode(jnp.minimum(ratio, E4M3_MAX))
            codes = e2m1_encode(blocks, e4m3_decode(scales)[..., None]).reshape(x.shape)
            return Packed(nibbles_pack(codes), scales)
        scales = e8m0_encode_ceil(ratio)
        scaled = jnp.clip(blocks / e8m0_decode(scales)[..., None], -limit, limit).reshape(x.shape)
        if self.element == "e2m1":
            return Packed(nibbles_pack(e2m1_encode(scaled)), scales)
        return Packed(e4m3_encode(scaled), scales)

    def decode(self, packed: Packed, dtype: jnp.dtype = jnp.float32) -> jax.Array:
        """The values ``[..., width]`` of encoded vectors."""
        is_e2m1 = self.element == "e2m1"
        values = e2m1_decode(nibbles_unpack(packed.payload)) if is_e2m1 else e4m3_decode(packed.payload)
        step = e8m0_decode(packed.scales) if self.scale == "e8m0" else e4m3_decode(packed.scales)
        blocks = values.reshape(*values.shape[:-1], -1, self.block) * step[..., None]
        return blocks.reshape(values.shape).astype(dtype)

    def round(self, x: jax.Array) -> jax.Array:
        """``decode(encode(x))`` in x's dtype."""
        return self.decode(self.encode(x), x.dtype)


@dataclasses.dataclass(frozen=True)
class DenseFormat:
    """No rounding beyond a plain dtype: the stand-in for a :class:`BlockFormat` when its rounding is off."""

    dtype: str

    def payload_width(self, width: int) -> int:
        return width

    def scale_width(self, width: int) -> int:
        return 0

    def entry_bytes(self, width: int) -> int:
        return width * jnp.dtype(self.dtype).itemsize

    def zeros(self, shape: tuple[int, ...], width: int) -> Packed:
        return Packed(jnp.zeros((*shape, width), self.dtype), None)

    def encode(self, x: jax.Array) -> Packed:
        return Packed(x.astype(self.dtype), None)

    def decode(self, packed: Packed, dtype: jnp.dtype = jnp.float32) -> jax.Array:
        return packed.payload.astype(dtype)

    def round(self, x: jax.Array) -> jax.Array:
        return x.astype(self.dtype).astype(x.dtype)


Format = BlockFormat | DenseFormat

FP4_E4M3 = BlockFormat("e2m1", "e4m3", block=16, floor=E2M1_MAX * 2.0**-9)
FP4_E8M0 = BlockFormat("e2m1", "e8m0", block=32, floor=E2M1_MAX * 2.0**-126)
FP8_E8M0 = BlockFormat("e4m3", "e8m0", block=32, floor=1e-4)
