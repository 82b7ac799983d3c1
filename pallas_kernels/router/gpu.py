"""The router on Hopper GPUs in two launches (Pallas-Triton): a product cut along its contraction, and all the rest.

XLA takes five for it. A decode step's product has few rows and a small matrix, so that only cutting the contraction
gives every multiprocessor a part; the second launch adds the parts up on its way. With many rows the product is XLA's.
Triton: the parts are small plain products, the rest is a search in a row that few warps hold in their registers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import backend
from pallas_kernels.choice import choice
from pallas_kernels.products import wide_linear
from pallas_kernels.router import xla

# Rows up to which the product is cut, and the part of a program: with 384 experts and a width of 5120 that is a
# program for nearly every multiprocessor, and the parts stay in the L2 cache.
_MAX_ROWS, _ROWS, _EXPERTS, _WIDTH, _STEP = 128, 64, 32, 512, 128
# Experts whose scores a program holds, and choices that are found one after the other.
_MAX_EXPERTS, _MAX_CHOSEN = 4096, 32
# Scores of a thread: the maxima that follow each other take longer across many warps.
_THREAD_SCORES = 8
# Below the key of every float.
_TAKEN = -(2**31)


def unsupported(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    image_bias: jax.Array,
    is_image: jax.Array,
    valid: jax.Array,
    *,
    k: int,
    scale: float,
) -> str | None:
    """Why XLA has to run this; None if the kernel can."""
    experts = weight.shape[0]
    if x.dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        return f"x is {x.dtype} and the weight {weight.dtype}"
    if not 0 < experts <= _MAX_EXPERTS:
        return f"{experts} experts are not 1 to {_MAX_EXPERTS}"
    if not 0 < k <= min(experts, _MAX_CHOSEN):
        return f"k is {k}, not 1 to {min(experts, _MAX_CHOSEN)}"
    if x.size == 0:
        return f"x is empty: {x.shape}"
    return None


def route(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    image_bias: jax.Array,
    is_image: jax.Array,
    valid: jax.Array,
    *,
    k: int,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.router.route`; the backward pass is XLA's."""
    return _route(k, scale, x, weight, bias, image_bias, is_image, valid)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _route(k: int, scale: float, x, weight, bias, image_bias, is_image, valid):
    if x.shape[0] <= _MAX_ROWS and x.shape[1] % _WIDTH == 0:
        parts = product_parts(x, weight)
    else:
        parts = wide_linear(x, weight)[None]
    return choose(parts, bias, image_bias, is_image, valid, k=k, scale=scale)


def _forward(k, scale, x, weight, bias, image_bias, is_image, valid):
    experts, weights = map(choice, _route(k, scale, x, weight, bias, image_bias, is_image, valid))
    return (experts, weights), (x, weight, experts, valid)


def _backward(k, scale, saved, cotangents):
    x, weight, experts, valid = saved

    def again(x, weight):
        # Rows that are nobody's may hold NaN.
        scores = xla.expert_scores(wide_linear(jnp.where(valid[:, None], x, 0), weight))
        return xla.expert_weights(scores, jnp.where(valid[:, None], experts, 0), scale)

    dweights = jnp.where(valid[:, None], cotangents[1], 0)
    return *jax.vjp(again, x, weight)[1](dweights), None, None, None, None


_route.defvjp(_forward, _backward)


def product_parts(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x · weightᵀ in parts of the contraction ``[parts, rows, experts]`` float32, which are to be added up."""
    (rows, width), experts = x.shape, weight.shape[0]
    tile = min(max(pl.next_power_of_2(rows), 16), _ROWS)

    def kernel(x_ref, weight_ref, out_ref):
        row = (pl.program_id(1) * tile + jnp.arange(tile))[:, None]
        expert = pl.program_id(0) * _EXPERTS + jnp.arange(_EXPERTS)
        part = pl.program_id(2)
        total = jnp.zeros((tile, _EXPERTS), jnp.float32)
        for step in range(_WIDTH // _STEP):
            column = (part * _WIDTH + step * _STEP + jnp.arange(_STEP))[None]
            # Rows and experts beyond the end repeat the last one; what comes of them is not stored.
            a = _load(x_ref, jnp.minimum(row, rows - 1), column)
            b = _load(weight_ref, jnp.minimum(expert, experts - 1)[:, None], column)
            total += jnp.dot(a, b.T, preferred_element_type=jnp.float32)
        at = (jnp.broadcast_to(i, total.shape) for i in (row, expert[None]))
        plgpu.store(out_ref.at[(part, *at)], total, mask=(row < rows) & (expert < experts)[None])

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((width // _WIDTH, rows, experts), jnp.float32),
        grid=(pl.cdiv(experts, _EXPERTS), pl.cdiv(rows, tile), width // _WIDTH),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=backend.interpreted(),
        name="router_product",
    )(x, weight)


def _load(ref, row: jax.Array, column: jax.Array) -> jax.Array:
    shape = (row.shape[0], column.shape[1])
    return plgpu.load(ref.at[jnp.broadcast_to(row, shape), jnp.broadcast_to(column, shape)])


def choose(
    parts: jax.Array,
    bias: jax.Array,
    image_bias: jax.Array,
    is_image: jax.Array,
    valid: jax.Array,
    *,
    k: int,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Experts and weights ``[rows, k]`` from parts of the logits ``[parts, rows, experts]`` float32."""
    count, rows, experts = parts.shape
    width, choices = pl.next_power_of_2(experts), pl.next_power_of_2(k)

    def kernel(parts_ref, bias_ref, image_bias_ref, is_image_ref, valid_ref, experts_ref, weights_ref):
        row = pl.program_id(0)
        expert, choice = jnp.arange(width), jnp.arange(choices)
        real = expert < experts
        logits = plgpu.load(parts_ref.at[0, row, expert], mask=real, other=0.0)
        for part in range(1, count):
            logits += plgpu.load(parts_ref.at[part, row, expert], mask=real, other=0.0)
        scores = jnp.sqrt(jnp.maximum(logits, 0) + jnp.log1p(jnp.exp(-jnp.abs(logits))))
        text = plgpu.load(bias_ref.at[expert], mask=real, other=0.0)
        image = plgpu.load(image_bias_ref.at[expert], mask=real, other=0.0)
        biased = scores + jnp.where(is_image_ref[row], image, text)
        keys = jnp.where(real, _key(biased), _TAKEN)

        chosen = jnp.full(choices, experts, jnp.int32)
        for place in range(k):
            best = jnp.min(jnp.where(keys == jnp.max(keys), expert, width))
            keys = jnp.where(expert == best, _TAKEN, keys)
            chosen = jnp.where(choice == place, best, chosen)
        own = jnp.sum(jnp.where(chosen[:, None] == expert[None], scores[None], 0), axis=1)
        own = jnp.where(choice < k, own, 0)
        weights = own / (jnp.sum(own) + xla.TINY) * scale
        is_kept = choice < k
        plgpu.store(experts_ref.at[row, choice], jnp.where(valid_ref[row], chosen, experts), mask=is_kept)
        plgpu.store(weights_ref.at[row, choice], weights, mask=is_kept)

    return pl.pallas_call(
        kernel,
        out_shape=(jax.ShapeDtypeStruct((rows, k), jnp.int32), jax.ShapeDtypeStruct((rows, k), jnp.float32)),
        grid=(rows,),
        compiler_params=plgpu.CompilerParams(num_warps=min(max(width // (32 * _THREAD_SCORES), 1), 16), num_stages=1),
        interpret=backend.interpreted(),
        name="router_choice",
    )(parts, bias, image_bias, is_image, valid)


def _key(x: jax.Array) -> jax.Array:
    """int32 that orders as XLA's top-k does: −0 below +0, NaN above all."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
