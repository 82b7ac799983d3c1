"""The public function of the hyper-connections."""

from __future__ import annotations

import jax

from pallas_kernels import backend
from pallas_kernels.mhc.types import Boundary, HyperConnection, Update


def mhc(
    streams: jax.Array,
    mix: jax.Array,
    connection: HyperConnection,
    norm_weight: jax.Array,
    update: Update | None = None,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> Boundary:
    """One boundary between sub-layers: ends one and prepares the next, which one pass over the streams can do.

    The mix of the next sub-layer was predicted by the one that ran, from the streams that entered *it*, so nothing
    here waits for a sum over a whole row except the norm: each column of the streams is read, updated, mixed and
    added to the statistics together. The fewest values moved for a token: C·d + d read, C·d + d written.

    1. h'_j = post_j · y + Σ_i comb[i, j] · h_i, in float32, rounded to the streams' dtype;
    2. x = Σ_c mix_c · h'_c, in float32, rounded to the streams' dtype, then x · rsqrt(mean(x²) + norm_eps) ·
       norm_weight in float32, rounded again;
    3. m = (flat(h') · fnᵀ) · rsqrt(mean(flat(h')²) + 1e-20), products and sums as exact as float32 is;
       pre = σ(m[:C] · scale₀ + base[:C]) + eps; post = 2σ(m[C:2C] · scale₁ + base[C:2C]);
       comb = Sinkhorn of m[2C:] · scale₂ + base[2C:] as C×C.

    x is not rounded to FP8 here: the router and the compressor read it unrounded, and each linear rounds its own.
    Anything that changes the streams between two sub-layers (an Engram) splits the pass: update before it, and this
    function without ``update`` after it.

    Args:
      streams: ``[..., C, d]`` floats; C is small (4).
      mix: ``[..., C]`` float32, for the next sub-layer's input.
      connection: the next sub-layer's parameters.
      norm_weight: ``[d]`` floats, the next sub-layer's norm.
      update: of the sub-layer that ran; None: the streams stand as they are, and are returned.
      norm_eps: of the norm (static).
      eps: of the coefficients (static).
      iterations: steps of the Sinkhorn normalisation (static).

    Returns:
      See :class:`Boundary`. Each row depends on its own row only: whatever padded rows hold changes no other.
    """
    return backend.run(
        "mhc", streams, mix, connection, norm_weight, update, norm_eps=norm_eps, eps=eps, iterations=iterations
    )
