"""What the machine does at best, measured in the same run as the operations."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.benchmark.timing import seconds

# Beyond any cache; a CPU's few threads need less to show their rate.
_COPY_BYTES = {"gpu": 2**32, "cpu": 2**28}
_MATMUL_SIZE = {"gpu": 8192, "cpu": 1024}


class Limits(NamedTuple):
    """Measured rates.

    Attributes:
      copy_bytes_per_s: bytes read plus bytes written a second by a large copy.
      operations_per_s: floating-point operations a second of a large bfloat16 product.
    """

    copy_bytes_per_s: float
    operations_per_s: float

    def floor(self, operations: float, moved: float) -> float:
        """Seconds that no implementation beats by much: the larger of the two times."""
        return max(operations / self.operations_per_s, moved / self.copy_bytes_per_s)


def measure_limits() -> Limits:
    """Times a copy and a square product of random numbers on the default device."""
    platform = jax.default_backend()
    size, rows = _MATMUL_SIZE.get(platform, 8192), _COPY_BYTES.get(platform, 2**32) // 2**20
    source = jax.random.bits(jax.random.key(0), (rows, 2**18), jnp.uint32)
    copy = seconds(jax.jit(lambda x: x ^ 1), [(source,)])
    square = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16)
    product = seconds(jax.jit(jnp.matmul), [(square, square)])
    return Limits(2 * source.nbytes / copy, 2 * size**3 / product)
