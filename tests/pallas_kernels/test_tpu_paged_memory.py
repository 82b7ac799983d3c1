"""The paged memory's TPU kernels in interpret mode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.formats import FP4_E4M3, FP4_E8M0, FP8_E8M0, DenseFormat
from pallas_kernels.paged_memory import reference, tpu
from pallas_kernels.tpu import pool
from tests.pallas_kernels.base.common import poisoned, same_bytes
from tests.pallas_kernels.base.paged_memory import PagedMemoryTests


@pytest.fixture(autouse=True, scope="module")
def _interpreted():
    # Unrolled loops only take longer to compile here.
    with pytest.MonkeyPatch.context() as patch, backend.interpret():
        patch.setattr(pool, "_UNROLL", 1)
        yield


class TestPagedMemory(PagedMemoryTests):
    backend = "tpu"
    # Entries and pages of whole words.
    width, page_entries = 128, 4

    @pytest.mark.parametrize(
        "fmt",
        [
            pytest.param(FP4_E4M3, id="fp4_e4m3"),
            pytest.param(FP4_E8M0, id="fp4_e8m0"),
            pytest.param(FP8_E8M0, id="fp8_e8m0"),
            pytest.param(DenseFormat("bfloat16"), id="bf16"),
        ],
    )
    def test_pages_share_tiles_of_scales(self, fmt):
        """Entries go to the same slots of pages of one tile of the pages-last layout, which has three tiles."""
        rng = np.random.default_rng(1)
        stored = poisoned(fmt, (300, self.page_entries), self.width, rng)
        table = np.array([[3, 1, 256], [131, 0, 2], [4, 299, 7]], np.int32)
        start, count = np.array([2, 2, 5], np.int32), np.array([9, 7, 0], np.int32)
        values = rng.standard_normal((3, 9, self.width)).astype(np.float32)
        written = jax.jit(tpu.append, static_argnums=1)(stored, fmt, table, start, count, values)
        same_bytes(written, reference.append(stored, fmt, table, start, count, values))
        entries = np.where(np.arange(9) < count[:, None], start[:, None] + np.arange(9), -1).astype(np.int32)
        read = jax.jit(tpu.gather, static_argnums=(1, 4))(written, fmt, table, entries, jnp.float32)
        np.testing.assert_array_equal(read, reference.gather(written, fmt, table, entries))
