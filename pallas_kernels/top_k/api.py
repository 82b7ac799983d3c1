"""Public function of the exact top-k."""

from __future__ import annotations

import jax

from pallas_kernels import backend


def top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest scores, descending; equal scores (−0 and +0 are equal) in order of their index.

    Args:
      scores: ``[..., n]`` float32 without NaN.
      k: how many (static); may exceed n.

    Returns:
      values ``[..., k]`` float32 and indices ``[..., k]`` int32; −inf and −1 beyond n.
    """
    return backend.run("top_k", scores, k)
