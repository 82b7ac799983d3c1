"""The Triton kernels of the sparse attention over float entries: interpreted, and on a card."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.formats import FP4_E4M3, FP8_E8M0, DenseFormat, Packed
from pallas_kernels.sparse_attention import gpu_triton, reference
from tests.pallas_kernels.base.common import compiled
from tests.pallas_kernels.base.sparse_attention import F32, WINDOW, SparseAttentionTests, case

BF16 = DenseFormat("bfloat16")


def relative_rms(a: jax.Array, b: jax.Array) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))


def static(fmt=F32, probability_dtype="float32") -> dict:
    return {
        "local_fmt": fmt,
        "pool_fmt": fmt,
        "window": WINDOW,
        "scale": 0.3,
        "probability_dtype": jnp.dtype(probability_dtype),
    }


class FloatEntriesTests(SparseAttentionTests):
    backend = "gpu"

    def test_bfloat16_queries_and_probabilities(self):
        # A running maximum rounds the probabilities elsewhere, 2^-9 each; the result is rounded once, 2^-8 of it.
        arrays = case(BF16, BF16, dtype="bfloat16")
        self.check(arrays, BF16, BF16, "bfloat16", tolerance=2.0**-9 + 2.0**-8)


class TestInterpreted(FloatEntriesTests):
    def run(self, operation: str, arrays: dict, **static):
        with backend.interpret():
            return compiled(gpu_triton.sparse_attention, arrays, **static)

    def test_more_heads_than_a_block(self):
        # 18 heads in blocks of 16: both blocks add to the same entries' gradients.
        arrays = case(heads=18, queries=3)
        arrays |= {name: Packed(jnp.nan_to_num(arrays[name].payload), None) for name in ("local", "pool")}
        self.check(arrays)

        def loss(function, pool):
            return jnp.sum(function(arrays | {"pool": Packed(pool, None)}) ** 2)

        mine = jax.grad(lambda pool: loss(lambda a: self.run("sparse_attention", a, **static()), pool))
        wanted = jax.grad(lambda pool: loss(lambda a: compiled(reference.sparse_attention, a, **static()), pool))
        pool = arrays["pool"].payload
        np.testing.assert_allclose(np.asarray(mine(pool)), np.asarray(wanted(pool)), rtol=1e-4, atol=1e-4)

    def test_a_loop_over_layers_can_be_differentiated(self):
        arrays = case(queries=2)

        def loss(function):
            def layer(queries, sink):
                return function(arrays | {"queries": queries, "sink": sink}), None

            sinks = jnp.stack([arrays["sink"], arrays["sink"] + 1])
            return lambda queries: jnp.sum(jax.lax.scan(layer, queries, sinks)[0] ** 2)

        mine = jax.grad(loss(lambda a: self.run("sparse_attention", a, **static())))(arrays["queries"])
        arrays |= {name: Packed(jnp.nan_to_num(arrays[name].payload), None) for name in ("local", "pool")}
        wanted = jax.grad(loss(lambda a: compiled(reference.sparse_attention, a, **static())))(arrays["queries"])
        assert relative_rms(mine, wanted) < 1e-5


def check_bfloat16_gradients(width: int, heads: int) -> None:
    """Output and gradients in bfloat16 against the float32 reference on the same values."""
    arrays = case(BF16, BF16, dtype="bfloat16", width=width, heads=heads, queries=4)
    kept = np.asarray(arrays["local_valid"])
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(arrays["queries"].shape), jnp.bfloat16)

    def results(function, arrays, dtype):
        def f(queries, local, pool, sink):
            changed = {"queries": queries, "local": Packed(local, None), "pool": Packed(pool, None), "sink": sink}
            return function(arrays | changed)

        start = [jnp.asarray(x, dtype) for x in (arrays["queries"], arrays["local"].payload, arrays["pool"].payload)]
        out, back = jax.vjp(f, *start, arrays["sink"])
        return [out, *back(cotangent.astype(dtype))]

    mine = results(lambda a: compiled(gpu_triton.sparse_attention, a, **static(BF16, "bfloat16")), arrays, jnp.bfloat16)
    clean = {name: Packed(jnp.nan_to_num(arrays[name].payload), None) for name in ("local", "pool")}
    wanted = results(lambda a: compiled(reference.sparse_attention, a, **static()), arrays | clean, jnp.float32)
    assert not np.asarray(mine[2], np.float32)[~kept].any()
    *errors, sink_error = (relative_rms(*pair) for pair in zip(mine, wanted, strict=True))
    # The output is rounded to 8 bits once; gradients multiply probabilities and logits' gradients of 8 bits.
    assert max(errors) < 2.0**-7, errors
    # Few sums of products with the rounded output: nothing averages out.
    assert sink_error < 2.0**-6


def test_bfloat16_gradients_are_near_float32s():
    with backend.interpret():
        check_bfloat16_gradients(width=32, heads=2)


def test_what_is_not_for_the_kernel():
    bf16 = dict(case(BF16, BF16, dtype="bfloat16", width=32))
    kwargs = static(BF16, "bfloat16")
    assert gpu_triton.unsupported(**bf16, **kwargs) is None
    assert "probabilities" in gpu_triton.unsupported(**bf16, **(kwargs | {"probability_dtype": jnp.float32}))
    packed = case(FP8_E8M0, FP4_E4M3, dtype="bfloat16")
    assert "packed" in gpu_triton.unsupported(**packed, **(kwargs | {"local_fmt": FP8_E8M0, "pool_fmt": FP4_E4M3}))
    assert "head_dim 24" in gpu_triton.unsupported(**case(width=24), **static())
    wide = case(width=256, queries=1)
    assert "head_dim 256" in gpu_triton.unsupported(**wide, **static())


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU in this process")
class TestOnACard(FloatEntriesTests):
    def run(self, operation: str, arrays: dict, **static):
        return compiled(gpu_triton.sparse_attention, arrays, **static)

    def test_bfloat16_gradients_at_the_official_width(self):
        check_bfloat16_gradients(width=512, heads=64)
