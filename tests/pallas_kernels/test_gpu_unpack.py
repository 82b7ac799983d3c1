"""The unpacking of packed rows on GPUs: its PTX, run instruction by instruction, against the formats."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.formats import FP4_E4M3, FP8_E8M0, BlockFormat, Packed
from pallas_kernels.gpu import unpack
from tests.pallas_kernels.base import ptx

THREADS = 128
BASE = 4096
GROUPS = (0, 5)
ROWS = [8 * group + row for group in GROUPS for row in range(8)]


def values_of(memory: dict[int, int]) -> np.ndarray:
    """Values ``[rows, 512]`` of the :data:`ROWS` of a tile in 8 × 64 tiles with a 128-byte swizzle."""
    out = np.empty((len(ROWS), 512), np.float32)
    for n, row in enumerate(ROWS):
        for column in range(0, 512, 8):
            chunk = (column % 64 // 8) ^ (row % 8)
            address = (row // 8 * 8 + column // 64) * 1024 + row % 8 * 128 + chunk * 16
            words = [memory[BASE + address + 4 * word] for word in range(4)]
            out[n, column : column + 8] = np.concatenate([ptx.halves(word) for word in words])
    return out


# E8M0 scales so small or large that bfloat16 products would underflow or overflow stand for no entries.
@pytest.mark.parametrize(("fmt", "scales"), [(FP4_E4M3, (0, 256)), (FP8_E8M0, (30, 220))], ids=["fp4", "fp8"])
def test_values_are_the_formats(fmt: BlockFormat, scales: tuple[int, int]):
    rng = np.random.default_rng(0)
    payload = rng.integers(0, 256, (64, fmt.payload_width(512)), np.uint8)
    scale = rng.integers(*scales, (64, fmt.scale_width(512)), np.uint8)
    memory = ptx.Memory()
    for group in GROUPS:
        program = unpack._unpack_ptx(fmt, group)
        for thread in range(THREADS):
            row, piece = 8 * group + thread % 8, thread // 8
            words = payload[row].reshape(16, -1)[piece].view(np.uint32).tolist()
            scale_word = int.from_bytes(scale[row].reshape(16, -1)[piece].tobytes(), "little")
            ptx.run(program, [*words, scale_word, BASE], 3 * THREADS + thread, memory)
    wanted = np.asarray(fmt.decode(Packed(payload, scale)))
    np.testing.assert_array_equal(values_of(memory.shared), wanted[ROWS])
