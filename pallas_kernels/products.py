"""Contractions that accumulate in float32, and the operand dtype in which they are exact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import DenseFormat, Format


def operand_dtype(dtype: jnp.dtype, fmt: Format) -> jnp.dtype:
    """bfloat16 if values of ``dtype`` and of ``fmt`` are exact in it, else float32.

    Every block format's values are exact in bfloat16: at most 6 significant bits.
    """
    stored = fmt.dtype if isinstance(fmt, DenseFormat) else jnp.bfloat16
    both = jnp.dtype(dtype) == jnp.bfloat16 and jnp.dtype(stored) == jnp.bfloat16
    return jnp.dtype(jnp.bfloat16 if both else jnp.float32)


def narrow(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds ``x`` to ``dtype``, also inside a fusion.

    XLA may skip a cast to bfloat16 that is widened again (excess precision is allowed by default); the reference
    rounds there, and what reads the result must see the rounded value. It may not skip ``reduce_precision``.
    """
    if jnp.dtype(dtype) == jnp.bfloat16 and x.dtype == jnp.float32:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Product of two arrays of one dtype with a float32 result; float32 operands are not rounded on the way.

    Raises:
      TypeError: the dtypes differ.
    """
    if a.dtype != b.dtype:
        raise TypeError(f"einsum {subscripts!r}: operands are {a.dtype} and {b.dtype}")
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def wide_linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x ``[..., in]`` times weight ``[out, in]`` transposed in float32, whatever the two are.

    Products of bfloat16 values are exact in float32, so that a matrix unit may take them as they are: only a mixed pair
    is widened first.
    """
    if x.dtype != weight.dtype:
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    return einsum("...i,oi->...o", x, weight)


@jax.custom_jvp
def _straight_through(x: jax.Array, rounded: jax.Array) -> jax.Array:
    return rounded


@_straight_through.defjvp
def _straight_through_jvp(primals, tangents):
    return primals[1], tangents[0]


def straight_through_to(x: jax.Array, value: jax.Array) -> jax.Array:
    """``value``, of which ``x`` gets all the gradient."""
    return _straight_through(x, value)


def rounded(fmt: Format, x: jax.Array) -> jax.Array:
    """``fmt.round(x)`` whose derivative is the identity: the cast to a small float would round gradients too."""
    return _straight_through(x, fmt.round(x))
