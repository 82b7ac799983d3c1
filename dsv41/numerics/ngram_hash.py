"""Engram's n-gram hash: which table rows a position looks up, from the compressed ids of its last N tokens.

    hash_n(t) = XOR over i < n of (id of token t − i) · multiplier_i          in 63 bits, n = 2 … N
    row(n, head) = hash_n(t) mod prime(n, head) + offset(n, head)

JAX runs without 64-bit integers, so the device computes the products as pairs of uint32 and the remainder digit
by digit (Horner); the ``_host`` functions are the same in numpy's int64.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv41.config import ConfigError, TextConfig

BLOCKED = -1  # A look-back that reads as the pad token: before the sequence, or a position of an image span.

_INT32_MAX = int(np.iinfo(np.int32).max)
_INT64_MAX = int(np.iinfo(np.int64).max)


@dataclasses.dataclass(frozen=True, eq=False)
class NgramHash:
    """Constants of the hash; N = longest n-gram, columns in the order (n − 2)·heads + head.

    Attributes:
      multipliers: odd factors of the ids at look-back 0 … N − 1, ``[layers, N]`` int64.
      primes: rows of each column, ``[layers, columns]`` int64.
      offsets: first row of each column in its layer's table, ``[layers, columns]`` int64.
    """

    multipliers: np.ndarray
    primes: np.ndarray
    offsets: np.ndarray

    @property
    def order(self) -> int:
        """N, the longest n-gram."""
        return self.multipliers.shape[1]

    @property
    def heads(self) -> int:
        """Hash heads of one n-gram size."""
        return self.primes.shape[1] // (self.order - 1)


@functools.cache
def ngram_hash(text: TextConfig) -> NgramHash:
    """The hash constants of a configuration; the same object for the same configuration.

    Primes are the consecutive ones from ``engram_vocab_size`` on, drawn over layers, then n, then heads.
    Multipliers are at most 2·bound − 1 with bound = max int64 // compressed vocabulary // 2, so that the product
    with any compressed id stays below 2⁶³.

    Raises:
      ConfigError: ``engram_num_embeddings`` is not the sum of a layer's primes, or a row id does not fit int32.
    """
    layers, columns = len(text.engram_layer_ids), text.engram_columns
    # Before the primes are searched: they are looked for by trial division, which takes for ever on absurd sizes.
    if text.engram_vocab_size * columns > _INT32_MAX:
        raise ConfigError(
            f"text_config.engram_vocab_size: {text.engram_vocab_size} in {columns} columns makes rows beyond int32"
        )
    primes = _primes_from(text.engram_vocab_size, layers * columns).reshape(layers, columns)
    totals = tuple(int(total) for total in primes.sum(axis=1))
    if totals != text.engram_num_embeddings:
        raise ConfigError(
            f"text_config.engram_num_embeddings: {list(text.engram_num_embeddings)} are not the sums of the layers' "
            f"primes {list(totals)} (engram_vocab_size {text.engram_vocab_size})"
        )
    if max(totals, default=0) > _INT32_MAX:
        raise ConfigError(f"text_config.engram_num_embeddings: {list(totals)} has rows beyond int32")
    bound = _INT64_MAX // text.engram_compressed_vocab_size // 2
    order = text.engram_max_ngram_size
    draws = [np.random.default_rng(10007 * layer).integers(0, bound, size=order) for layer in text.engram_layer_ids]
    constants = NgramHash(
        multipliers=2 * np.array(draws, np.int64).reshape(layers, order) + 1,
        primes=primes,
        offsets=np.cumsum(primes, axis=1) - primes,
    )
    for array in (constants.multipliers, constants.primes, constants.offsets):
        array.flags.writeable = False  # The object is shared by all callers.
    return constants


def _primes_from(start: int, count: int) -> np.ndarray:
    """The first ``count`` primes at or above ``start``, int64."""
    found: list[int] = []
    candidate = max(start, 2)
    while len(found) < count:
        if np.all(candidate % np.arange(2, math.isqrt(candidate) + 1)):
            found.append(candidate)
        candidate += 1
    return np.array(found, np.int64)


def lookback(ids: jax.Array, tail: jax.Array) -> jax.Array:
    """The compressed ids that each position of a chunk looks back on.

    Args:
      ids: the chunk's compressed ids, ``[batch, query]`` int32; :data:`BLOCKED` at positions of image spans.
      tail: the N − 1 ids before the chunk, oldest first, ``[batch, N - 1]`` int32; :data:`BLOCKED` before the
        start of the sequence and at positions of image spans.

    Returns:
      ``[batch, query, N]`` int32: entry i is the id of position t − i. A blocked entry blocks all older ones.
    """
    queries, reach = ids.shape[1], tail.shape[1]
    history = jnp.concatenate([tail, ids], axis=1)
    seen = [ids]
    for i in range(1, reach + 1):
        older = history[:, reach - i : reach - i + queries]
        seen.append(jnp.where(seen[-1] < 0, BLOCKED, older))
    return jnp.stack(seen, axis=-1)


def next_tail(ids: jax.Array, tail: jax.Array, count: jax.Array) -> jax.Array:
    """The tail after a row has consumed its first ``count`` ids.

    Args:
      ids, tail: as in :func:`lookback`; ids from ``count`` on may be anything.
      count: ``[batch]`` int32, 0 … query.

    Returns:
      ``[batch, N - 1]`` int32.
    """
    history = jnp.concatenate([tail, ids], axis=1)
    return jnp.take_along_axis(history, count[:, None] + jnp.arange(tail.shape[1]), axis=1)


def hash_ids(constants: NgramHash, lookback: jax.Array, pad_id: jax.Array) -> jax.Array:
    """Table rows of every layer and column.

    Args:
      lookback: compressed ids ``[..., N]`` int32, below the compressed vocabulary; :data:`BLOCKED` reads as the pad.
      pad_id: compressed id of the pad token, int32 scalar.

    Returns:
      ``[layers, ..., columns]`` int32, the columns' offsets included.
    """
    heads, sizes = constants.heads, constants.order - 1
    layers = constants.primes.shape[0]
    # Everything broadcasts over [layers, ..., n - 2, head], so that XLA makes one loop of it. The products are
    # computed again for every column: cheaper than a second kernel where a call has few positions.
    middle = (1,) * (lookback.ndim - 1)

    def column_constant(values: np.ndarray) -> np.ndarray:
        return values.reshape(layers, *middle, sizes, heads)

    ids = jnp.where(lookback < 0, pad_id, lookback).astype(jnp.uint32)
    high = low = jnp.uint32(0)
    for i in range(constants.order):
        # The n-gram of size n holds look-backs below n: a zero factor keeps the others out of the XOR.
        used = np.arange(2, constants.order + 1)[:, None] > i
        factor = np.where(used, constants.multipliers[:, i].reshape(layers, *middle, 1, 1), 0)
        product_high, product_low = _multiply(ids[..., i][None, ..., None, None], factor)
        high, low = high ^ product_high, low ^ product_low
    primes = column_constant(constants.primes)
    rest = _modulo(high, low, primes, int(constants.primes.max(initial=2)))
    rows = rest.astype(jnp.int32) + column_constant(constants.offsets).astype(np.int32)
    return rows.reshape(layers, *lookback.shape[:-1], sizes * heads)


def _multiply(ids: jax.Array, factor: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """High and low uint32 of ids (uint32) × factor (int64 constants); the product must stay below 2⁶⁴."""
    factor_high, factor_low = (factor >> 32).astype(np.uint32), (factor & 0xFFFFFFFF).astype(np.uint32)
    # The upper half of a 32 × 32 bit product, from 16-bit limbs.
    a1, a0 = ids >> 16, ids & 0xFFFF
    b1, b0 = factor_low >> 16, factor_low & 0xFFFF
    cross1, cross0 = a0 * b1, a1 * b0
    carry = ((a0 * b0) >> 16) + (cross1 & 0xFFFF) + (cross0 & 0xFFFF)
    high = a1 * b1 + (cross1 >> 16) + (cross0 >> 16) + (carry >> 16)
    return high + ids * factor_high, ids * factor_low


def _modulo(high: jax.Array, low: jax.Array, divisor: np.ndarray, largest: int) -> jax.Array:
    """(high · 2³² + low) mod divisor in uint32; ``largest`` is the largest divisor, below 2³¹ + 1."""
    high, low, divisor = jnp.broadcast_arrays(high, low, divisor.astype(np.uint32))
    step = 32 - (largest - 1).bit_length()  # A remainder, shifted by this much, still fits 32 bits.
    rest, left = lax.rem(high, divisor), 32
    while left:
        bits = min(step, left)
        left -= bits
        rest = lax.rem((rest << bits) | ((low >> left) & ((1 << bits) - 1)), divisor)
    return rest


def hash_ids_host(constants: NgramHash, lookback: np.ndarray, pad_id: int) -> np.ndarray:
    """:func:`hash_ids` on the host: int32 ``[layers, ..., columns]`` from compressed ids ``[..., N]``."""
    ids = np.where(lookback < 0, pad_id, lookback).astype(np.int64)
    layers = constants.multipliers.shape[0]
    products = ids * constants.multipliers.reshape(layers, *(1,) * (lookback.ndim - 1), constants.order)
    hashes = np.bitwise_xor.accumulate(products, axis=-1)[..., 1:]
    per_column = np.repeat(hashes, constants.heads, axis=-1)
    columns = (layers, *(1,) * (lookback.ndim - 1), constants.primes.shape[1])
    return (per_column % constants.primes.reshape(columns) + constants.offsets.reshape(columns)).astype(np.int32)


def lookback_host(ids: np.ndarray, tail: np.ndarray) -> np.ndarray:
    """:func:`lookback` on the host: int32 ``[batch, query, N]``."""
    queries, reach = ids.shape[1], tail.shape[1]
    history = np.concatenate([tail, ids], axis=1)
    seen = [ids]
    for i in range(1, reach + 1):
        seen.append(np.where(seen[-1] < 0, BLOCKED, history[:, reach - i : reach - i + queries]))
    return np.stack(seen, axis=-1).astype(np.int32)


def next_tail_host(ids: np.ndarray, tail: np.ndarray, count: np.ndarray) -> np.ndarray:
    """:func:`next_tail` on the host: int32 ``[batch, N - 1]``."""
    history = np.concatenate([tail, ids], axis=1)
    return np.take_along_axis(history, count[:, None] + np.arange(tail.shape[1]), axis=1).astype(np.int32)
