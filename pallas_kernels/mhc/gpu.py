"""Hyper-connections on Hopper in Pallas-Triton: two kernels for few tokens, three for many.

Both do all of it in one pass over the streams but for the product with ``fn``, which many tokens take in another
(:mod:`~pallas_kernels.mhc.gpu_few`, :mod:`~pallas_kernels.mhc.gpu_many`). The coefficients are made in a kernel too: in
XLA every step of the Sinkhorn loop is launches of its own.

The products are as exact as float32's: bfloat16 streams times the three bfloat16 pieces of a float32, on the matrix
units, with float32 sums.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.backend import interpreted
from pallas_kernels.mhc import xla
from pallas_kernels.mhc.gpu_few import COLUMNS, columns, rows
from pallas_kernels.mhc.gpu_many import WIDEST, coefficients, products, streams_pass
from pallas_kernels.mhc.gpu_parts import Static
from pallas_kernels.mhc.types import Boundary, HyperConnection, Update

# Up to so many tokens the latency of launches counts, not bytes.
_FEW_TOKENS = 64


def unsupported(
    streams: jax.Array,
    mix: jax.Array,
    connection: HyperConnection,
    norm_weight: jax.Array,
    update: Update | None = None,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> str | None:
    """Why the kernels do not run these arguments; None if they do."""
    del mix, connection, norm_weight, norm_eps, eps, iterations
    copies, width = streams.shape[-2:]
    if copies not in (2, 4):
        return f"{copies} streams, not 2 or 4"
    if width % COLUMNS or width > WIDEST:
        return f"streams of width {width}: not whole steps of {COLUMNS}, or wider than {WIDEST}"
    if streams.dtype not in (jnp.bfloat16, jnp.float32):
        return f"streams are {streams.dtype}"
    if update is not None and update.y.dtype != streams.dtype:
        return f"y is {update.y.dtype}, streams are {streams.dtype}"
    if streams.size == 0:
        return f"streams are empty: {streams.shape}"
    # Offsets are 32-bit integers.
    if streams.size >= 2**31:
        return f"streams have {streams.size} values"
    return None


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
    """See :func:`pallas_kernels.mhc.mhc`; derivatives are those of the XLA back end."""
    lead = streams.shape[:-2]
    dims = len(lead)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[dims:]), (streams, mix, update))
    out = _boundary(Static(norm_eps, eps, iterations, interpreted()), *rows, connection, norm_weight)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _boundary(static, streams, mix, update, connection, norm_weight) -> Boundary:
    copies = streams.shape[1]
    if streams.shape[0] <= _FEW_TOKENS:
        new, x, sums, squares = columns(streams, mix, update, connection.fn, static.interpret)
        return Boundary(new, *rows(x, sums, squares, connection, norm_weight, copies, static))
    new, x, square = streams_pass(streams, mix, update, norm_weight, static)
    sums = products(new, connection.fn)
    return Boundary(new, x, coefficients(sums, square, connection, copies, static))


def _forward(static, *args):
    return _boundary(static, *args), args


def _backward(static, args, cotangents):
    def function(streams, mix, update, connection, norm_weight):
        return xla.mhc(
            streams,
            mix,
            connection,
            norm_weight,
            update,
            norm_eps=static.norm_eps,
            eps=static.eps,
            iterations=static.iterations,
        )

    return jax.vjp(function, *args)[1](cotangents)


_boundary.defvjp(_forward, _backward)
