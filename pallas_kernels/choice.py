"""Choices that a backward pass must not make again: computed anew, a near-tie may fall the other way."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

CHOICE = "choice"
"""The name under which rematerialisation policies know them."""


def choice(x: jax.Array) -> jax.Array:
    """``x``, marked as something to be kept and not recomputed."""
    return checkpoint_name(x, CHOICE)
