"""The Triton kernels of the paged memory: interpreted, and on a card."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend, paged_memory
from pallas_kernels.formats import FP4_E4M3, FP4_E8M0, FP8_E8M0, BlockFormat, DenseFormat
from pallas_kernels.paged_memory import gpu
from tests.pallas_kernels.base.common import same_bytes
from tests.pallas_kernels.base.paged_memory import PagedMemoryTests

PACKED = [FP4_E4M3, FP4_E8M0, FP8_E8M0]
NAMES = ["fp4_e4m3", "fp4_e8m0", "fp8_e8m0"]


def hard_values(fmt: BlockFormat, dtype: str) -> jax.Array:
    """Rows at and beside every halfway case of elements and scales, over many magnitudes, zeros and signs."""
    rng = np.random.default_rng(0)
    halves = np.arange(0, 2 * 448) / 2 if fmt.element == "e4m3" else np.arange(0, 6 * 8 + 1) / 8
    x = rng.choice(halves, (24, 1, fmt.block)) * rng.choice([-1, 1], (24, 1, fmt.block))
    # The largest of a block decides its scale: multiples of the limit by halfway cases of E4M3, and powers of two.
    factor = np.concatenate([2.0 ** np.arange(-30, 20), np.arange(1, 65) / 16, np.arange(0, 18) * 2.0**-10])
    x = (x * factor[:, None]).astype(np.float32)
    x[::3, :, 0] = halves[-1] * factor
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(0))])
    x = np.concatenate([x, rng.standard_normal((8, len(factor), fmt.block)).astype(np.float32)])
    flat = x.reshape(-1)
    return jnp.asarray(flat[: flat.size // 128 * 128].reshape(1, -1, 128), dtype)


append = jax.jit(paged_memory.append, static_argnums=1)
gather = jax.jit(paged_memory.gather, static_argnums=(1, 4))


class PackedMemoryTests(PagedMemoryTests):
    """The public functions, as the back end of packed pools is chosen; pools of floats are XLA's."""

    backend = "gpu"

    def functions(self):
        def within(function):
            def call(*args):
                with self.context():
                    return function(*args)

            return call

        return within(append), within(gather)

    def run(self, operation: str, arrays: dict, **static):
        gather = self.functions()[1]
        assert operation == "paged_gather"
        return gather(arrays["pool"], static["fmt"], arrays["page_table"], arrays["indices"], static["dtype"])

    @pytest.mark.parametrize("fmt", PACKED, ids=NAMES)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_bytes_and_values_are_the_formats(self, fmt: BlockFormat, dtype: str):
        values = hard_values(fmt, dtype)
        rows = values.shape[1]
        table, zero = jnp.arange(-(-rows // 64), dtype=jnp.int32)[None], jnp.zeros(1, jnp.int32)
        pool = fmt.zeros((table.shape[1], 64), 128)
        append, gather = self.functions()
        written = append(pool, fmt, table, zero, zero + rows, values)
        same_bytes(written.map(lambda leaf: leaf.reshape(1, -1, leaf.shape[-1])[:, :rows]), jax.jit(fmt.encode)(values))
        read = gather(written, fmt, table, jnp.arange(rows, dtype=jnp.int32)[None], jnp.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(read), np.asarray(jax.jit(fmt.round)(values)))


class TestInterpreted(PackedMemoryTests):
    @contextlib.contextmanager
    def context(self):
        with backend.use("gpu"), backend.interpret():
            yield


@pytest.mark.gpu
class TestOnACard(PackedMemoryTests):
    def context(self):
        return backend.use("gpu")


def test_floats_are_for_xla():
    fmt = DenseFormat("bfloat16")
    pool, table, one = fmt.zeros((2, 4), 64), jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    assert "not packed" in gpu.append_unsupported(pool, fmt, table, one, one, jnp.ones((1, 2, 64)))
    assert "not packed" in gpu.gather_unsupported(pool, fmt, table, one[None], jnp.bfloat16)
