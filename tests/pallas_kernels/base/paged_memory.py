"""What the paged memory promises."""

from __future__ import annotations

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.formats import FP4_E4M3, FP4_E8M0, FP8_E8M0, DenseFormat, Packed
from pallas_kernels.paged_memory import reference
from tests.pallas_kernels.base.common import STRAY_PAGES, OperationTests, poisoned, same_bytes

FORMATS = [FP4_E4M3, FP4_E8M0, FP8_E8M0, DenseFormat("float32")]
NAMES = ["fp4_e4m3", "fp4_e8m0", "fp8_e8m0", "f32"]
PAGES, TABLE_PAGES, BATCH, GROUP = 7, 3, 2, 4


@functools.cache
def functions(name: str):
    """Compiled append and gather of a back end, kept so that every example reuses them."""
    append = jax.jit(backend.implementation("paged_append", name), static_argnums=1)
    return append, jax.jit(backend.implementation("paged_gather", name), static_argnums=(1, 4))


rounded = jax.jit(lambda fmt, x: fmt.round(x), static_argnums=0)


class PagedMemoryTests(OperationTests):
    """Promises of the operation.

    Attributes:
      width, page_entries: of the pools.
    """

    width, page_entries = 32, 3

    def functions(self):
        """Append and gather under test."""
        return functions(self.backend)

    @pytest.mark.parametrize("fmt", FORMATS, ids=NAMES)
    @hypothesis.given(data=st.data())
    @hypothesis.settings(
        max_examples=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.differing_executors]
    )
    def test_any_layout_is_written_and_read_as_by_loops(self, fmt, data):
        append, gather = self.functions()
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        capacity = self.page_entries * TABLE_PAGES
        table = rng.permutation(PAGES)[: BATCH * TABLE_PAGES].reshape(BATCH, TABLE_PAGES).astype(np.int32)
        allocated = [data.draw(st.integers(0, TABLE_PAGES)) for _ in range(BATCH)]
        for b, pages in enumerate(allocated):
            table[b, pages:] = rng.choice([p for p in STRAY_PAGES if not 0 <= p < PAGES], TABLE_PAGES - pages)
        start = np.array([data.draw(st.integers(0, capacity + 2)) for _ in range(BATCH)], np.int32)
        count = np.array([data.draw(st.integers(0, GROUP)) for _ in range(BATCH)], np.int32)
        values = rng.standard_normal((BATCH, GROUP, self.width)).astype(np.float32)
        values[np.arange(GROUP) >= np.asarray(count)[:, None]] = np.nan
        pool = poisoned(fmt, (PAGES, self.page_entries), self.width, rng)

        written = append(pool, fmt, table, start, count, values)
        same_bytes(written, reference.append(pool, fmt, table, start, count, values))

        mine = np.where(np.arange(GROUP) < count[:, None], start[:, None] + np.arange(GROUP), -1).astype(np.int32)
        read = gather(written, fmt, table, mine, jnp.float32)
        stored = (mine >= 0) & (mine < np.asarray(allocated)[:, None] * self.page_entries)
        expected = np.where(stored[..., None], np.asarray(rounded(fmt, values)), 0)
        np.testing.assert_array_equal(np.asarray(read), expected)

    @pytest.mark.parametrize("fmt", FORMATS, ids=NAMES)
    def test_indices_that_name_nothing_read_zero(self, fmt):
        rng = np.random.default_rng(0)
        pool = poisoned(fmt, (2, self.page_entries), self.width, rng)
        table = jnp.asarray([[-1, 2, 10**6]], jnp.int32)
        indices = jnp.asarray([[[-1, 0, 3], [8, 9, -(2**31)], [2**31 - 1, -9, 6]]], jnp.int32)
        out = self.functions()[1](pool, fmt, table, indices, jnp.bfloat16)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.zeros((1, 3, 3, self.width)))

    def test_gradient_stays_finite_beside_poison(self):
        if not self.supports_gradient:
            pytest.skip("no gradient on this back end")
        fmt = DenseFormat("float32")
        payload = np.full((3, 2, 4), np.nan, np.float32)
        payload[1] = 2.0
        table, indices = jnp.asarray([[1, 7]], jnp.int32), jnp.asarray([[0, -1, 2, 1, 0]], jnp.int32)

        def total(payload):
            arrays = {"pool": Packed(payload, None), "page_table": table, "indices": indices}
            return jnp.sum(self.run("paged_gather", arrays, fmt=fmt, dtype=jnp.float32) ** 2)

        gradient = np.asarray(jax.jit(jax.grad(total))(payload))
        np.testing.assert_array_equal(gradient[1], [[8.0] * 4, [4.0] * 4])
        np.testing.assert_array_equal(gradient[[0, 2]], 0)
