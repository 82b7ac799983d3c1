"""Rounding inside a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.products import narrow


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``x`` in ``dtype``, rounded even where it is widened again.

    On the chip a cast rounds, and Mosaic knows no ``reduce_precision``; in interpret mode XLA may skip the cast.
    """
    return narrow(x, dtype) if backend.interpreted() else x.astype(dtype)
