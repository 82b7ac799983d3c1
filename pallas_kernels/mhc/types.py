"""What a boundary between two sub-layers reads and leaves."""

from __future__ import annotations

from typing import NamedTuple

import jax

# Keeps a row of zeros (padding) from dividing by zero; the reference's constant.
STATISTICS_EPS = 1e-20


class HyperConnection(NamedTuple):
    """Parameters of one sub-layer, all float32: fn ``[(2+C)·C, C·d]``, base ``[(2+C)·C]``, scale ``[3]``."""

    fn: jax.Array
    base: jax.Array
    scale: jax.Array


class Coefficients(NamedTuple):
    """pre ``[..., C]`` (the next sub-layer's mix), post ``[..., C]``, comb ``[..., C, C]``; float32."""

    pre: jax.Array
    post: jax.Array
    comb: jax.Array


class Update(NamedTuple):
    """What the sub-layer that ran does to the streams: h'_j = post_j · y + Σ_i comb[i, j] · h_i.

    y ``[..., d]`` its output, post ``[..., C]`` and comb ``[..., C, C]`` float32 its own coefficients.
    """

    y: jax.Array
    post: jax.Array
    comb: jax.Array


class Boundary(NamedTuple):
    """What the next sub-layer starts from.

    Attributes:
      streams: ``[..., C, d]`` after the update, in the streams' dtype.
      x: ``[..., d]`` its normalised input, in the streams' dtype.
      coefficients: its own coefficients, from these streams.
    """

    streams: jax.Array
    x: jax.Array
    coefficients: Coefficients
