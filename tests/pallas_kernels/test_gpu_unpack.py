"""The unpacking of packed rows on GPUs: its PTX, run instruction by instruction, against the formats."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.formats import FP4_E4M3, FP8_E8M0, BlockFormat, Packed
from pallas_kernels.gpu import unpack

THREADS = 128
BASE = 4096
GROUPS = (0, 5)
ROWS = [8 * group + row for group in GROUPS for row in range(8)]


def halves(word: int) -> np.ndarray:
    return np.array([word & 0xFFFF, word >> 16], np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def product(a: int, b: int) -> int:
    with np.errstate(invalid="ignore"):
        low, high = (halves(a) * halves(b)).astype(ml_dtypes.bfloat16).view(np.uint16)
    return int(low) | int(high) << 16


def permuted(a: int, b: int, selectors: int) -> int:
    chosen = [selectors >> 4 * i & 15 for i in range(4)]
    # Larger ones would copy a sign bit.
    assert max(chosen) < 8
    return sum(((a | b << 32) >> 8 * c & 255) << 8 * i for i, c in enumerate(chosen))


OPERATIONS = {
    "mov.u32": lambda a: a,
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "add.u32": lambda a, b: a + b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "bfe.u32": lambda a, start, size: a >> start & ((1 << size) - 1),
    "prmt.b32": permuted,
    "mul.rn.bf16x2": product,
}


def run(ptx: str, arguments: list[int], thread: int, memory: dict[int, list[int]]) -> None:
    """Runs a block of straight-line PTX for one thread; 16-byte stores go to ``memory``, each address once."""
    registers: dict[str, int] = {f"${i}": value for i, value in enumerate(arguments)} | {"%tid.x": thread}
    for statement in (part.strip() for part in ptx.strip()[1:-1].split(";")):
        if not statement or statement.startswith("."):
            continue
        operation, rest = statement.split(None, 1)
        if operation == "st.shared.v4.b32":
            register, offset, values = re.fullmatch(r"\[(\w+) \+ (\d+)\], \{(.*)\}", rest).groups()
            address = registers[register] + int(offset)
            assert address % 16 == 0
            assert address not in memory
            memory[address] = [registers[name] for name in values.split(", ")]
            continue
        to, *names = rest.split(", ")
        values = [registers[name] if name in registers else int(name, 0) for name in names]
        if operation == "lop3.b32":
            assert values.pop() == 0xEA  # a & b | c
            result = values[0] & values[1] | values[2]
        else:
            result = OPERATIONS[operation](*values)
        registers[to] = result & 0xFFFFFFFF


def values_of(memory: dict[int, list[int]]) -> np.ndarray:
    """Values ``[rows, 512]`` of the :data:`ROWS` of a tile in 8 × 64 tiles with a 128-byte swizzle."""
    out = np.empty((len(ROWS), 512), np.float32)
    for n, row in enumerate(ROWS):
        for column in range(0, 512, 8):
            chunk = (column % 64 // 8) ^ (row % 8)
            address = (row // 8 * 8 + column // 64) * 1024 + row % 8 * 128 + chunk * 16
            out[n, column : column + 8] = np.concatenate([halves(word) for word in memory[BASE + address]])
    return out


# E8M0 scales so small or large that bfloat16 products would underflow or overflow stand for no entries.
@pytest.mark.parametrize(("fmt", "scales"), [(FP4_E4M3, (0, 256)), (FP8_E8M0, (30, 220))], ids=["fp4", "fp8"])
def test_values_are_the_formats(fmt: BlockFormat, scales: tuple[int, int]):
    rng = np.random.default_rng(0)
    payload = rng.integers(0, 256, (64, fmt.payload_width(512)), np.uint8)
    scale = rng.integers(*scales, (64, fmt.scale_width(512)), np.uint8)
    memory: dict[int, list[int]] = {}
    for group in GROUPS:
        ptx = unpack._unpack_ptx(fmt, group)
        for thread in range(THREADS):
            row, piece = 8 * group + thread % 8, thread // 8
            words = payload[row].reshape(16, -1)[piece].view(np.uint32).tolist()
            scale_word = int.from_bytes(scale[row].reshape(16, -1)[piece].tobytes(), "little")
            run(ptx, [*words, scale_word, BASE], 3 * THREADS + thread, memory)
    wanted = np.asarray(fmt.decode(Packed(payload, scale)))
    np.testing.assert_array_equal(values_of(memory), wanted[ROWS])
