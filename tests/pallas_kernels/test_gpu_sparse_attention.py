"""The Hopper kernel of the sparse attention, on a card; what it refuses, anywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import FP4_E4M3, FP8_E8M0, DenseFormat, Packed
from pallas_kernels.sparse_attention import gpu, reference, xla
from tests.pallas_kernels.base.common import compiled, paged
from tests.pallas_kernels.base.sparse_attention import WINDOW, SparseAttentionTests, case

BF16 = DenseFormat("bfloat16")


def static(local_fmt=FP8_E8M0, pool_fmt=FP4_E4M3, window=WINDOW, probability_dtype="bfloat16", scale=0.3) -> dict:
    formats = {"local_fmt": local_fmt, "pool_fmt": pool_fmt}
    return formats | {"window": window, "scale": scale, "probability_dtype": jnp.dtype(probability_dtype)}


def test_what_no_kernel_takes():
    packed = case(FP8_E8M0, FP4_E4M3, dtype="bfloat16", width=512)
    assert gpu.unsupported(**packed, **static()) is None
    assert "queries are float32" in gpu.unsupported(**case(FP8_E8M0, FP4_E4M3, width=512), **static())
    narrow = case(FP8_E8M0, FP4_E4M3, dtype="bfloat16", width=64)
    assert "head_dim 64 is not 512" in gpu.unsupported(**narrow, **static())
    assert "probabilities are float32" in gpu.unsupported(**packed, **static(probability_dtype="float32"))
    many = packed | {"queries": jnp.zeros((2, 9, 128, 512), jnp.bfloat16)}
    assert "128 heads" in gpu.unsupported(**many, **static())
    long = packed | {"indices": jnp.zeros((2, 9, 4096), jnp.int32)}
    assert "65 tiles of entries" in gpu.unsupported(**long, **static())
    reach = {"reach": jnp.zeros((2, 9), jnp.int32)}
    assert "not a reach; the pool is packed" in gpu.unsupported(**packed, **reach, **static())
    # Narrow float entries are for the other kernel, and so is a reach.
    assert gpu.unsupported(**case(BF16, BF16, dtype="bfloat16", width=512), **reach, **static(BF16, BF16)) is None
    assert gpu.unsupported(**case(BF16, BF16, dtype="bfloat16"), **static(BF16, BF16)) is None


@pytest.mark.gpu
class TestSparseAttention(SparseAttentionTests):
    backend = "gpu"
    supports_reach = False
    local_fmt, pool_fmt = FP8_E8M0, FP4_E4M3
    dtype = "bfloat16"
    width = 512
    # The reference subtracts the maximum of all entries and the kernel a running one, so that probabilities round
    # elsewhere (2^-9 each), as does the result (2^-9); entries reach about 8.
    tolerance = 2.0**-6
    # The golden data is narrower; gradients of float entries are the other kernel's.
    test_outputs_are_the_references = None
    test_gradients_are_the_references_and_finite_beside_poison = None
    test_gradients_through_parts_are_those_of_the_whole = None

    @pytest.mark.parametrize(("local_fmt", "pool_fmt"), [(BF16, BF16), (FP8_E8M0, FP4_E4M3)], ids=["bf16", "packed"])
    def test_float32(self, local_fmt, pool_fmt):
        self.check(self.case(local_fmt, pool_fmt), local_fmt, pool_fmt)

    def test_official_sizes_and_more_queries_than_processors(self):
        rng = np.random.default_rng(0)
        window, total, entries, chosen = 128, 200, 3000, 512
        values = jnp.asarray(rng.standard_normal((1, window + total, 512)), jnp.float32)
        pool, table = paged(rng, FP4_E4M3, rng.standard_normal((1, entries, 512)).astype(np.float32), [entries], 64)
        arrays = {
            "queries": jnp.asarray(rng.standard_normal((1, total, 64, 512)), jnp.bfloat16),
            "local": FP8_E8M0.encode(values),
            "local_valid": jnp.asarray(np.arange(window + total) >= 30)[None],
            "pool": pool,
            "page_table": table,
            "indices": jnp.asarray(rng.integers(-1, entries, (1, total, chosen)), jnp.int32),
            "sink": jnp.asarray(rng.standard_normal(64), jnp.float32),
        }
        options = static(window=window, scale=512**-0.5)
        out = np.asarray(self.run("sparse_attention", arrays, **options), np.float32)
        wanted = np.asarray(compiled(xla.sparse_attention, arrays, **options), np.float32)
        error = np.sqrt(np.mean((out - wanted) ** 2) / np.mean(wanted**2))
        assert error < 2.0**-8

    def test_every_code_and_scale_is_decoded_exactly(self):
        # One query that sees one entry, so strongly that its probability is one: the output is the entry.
        codes = np.arange(256, dtype=np.uint8)
        payload = np.stack([np.roll(codes, 8 * i) for i in range(128)])[None]
        scales = np.resize(np.arange(1, 127, dtype=np.uint8), (1, 128, 32))
        pool = Packed(jnp.asarray(payload), jnp.asarray(scales))
        values = FP4_E4M3.decode(pool)[0]
        queries = jnp.sign(values)[None, :, None].astype(jnp.bfloat16)
        arrays = {
            "queries": queries,
            "local": FP8_E8M0.zeros((1, 1 + 128), 512),
            "local_valid": jnp.zeros((1, 1 + 128), bool),
            "pool": pool,
            "page_table": jnp.zeros((1, 1), jnp.int32),
            "indices": jnp.arange(128, dtype=jnp.int32)[None, :, None],
            "sink": jnp.full(1, -1e4, jnp.float32),
        }
        out = self.run("sparse_attention", arrays, **static(window=1))
        np.testing.assert_array_equal(np.asarray(out[0, :, 0], np.float32), np.asarray(values))

    def test_gradients_of_queries_and_sink(self):
        arrays = self.case()
        cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(arrays["queries"].shape), jnp.bfloat16)

        def gradients(function, dtype, options):
            def loss(queries, sink):
                return jnp.sum(function(arrays | {"queries": queries, "sink": sink}, options) * cotangent)

            return jax.grad(loss, argnums=(0, 1))(arrays["queries"].astype(dtype), arrays["sink"])

        mine = gradients(lambda a, options: self.run("sparse_attention", a, **options), jnp.bfloat16, static())
        exact = static(probability_dtype="float32")
        wanted = gradients(lambda a, options: compiled(reference.sparse_attention, a, **options), jnp.float32, exact)
        for left, right in zip(mine, wanted, strict=True):
            left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
            assert np.sqrt(np.mean((left - right) ** 2) / np.mean(right**2)) < 2.0**-6
