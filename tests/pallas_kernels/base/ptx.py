"""Runs blocks of straight-line PTX, as the GPU kernels have them inline, one thread after another."""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np


def halves(word: int) -> np.ndarray:
    """The two bfloat16 values of a register, as float32."""
    return np.array([word & 0xFFFF, word >> 16], np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def _product(a: int, b: int) -> int:
    with np.errstate(invalid="ignore"):
        low, high = (halves(a) * halves(b)).astype(ml_dtypes.bfloat16).view(np.uint16)
    return int(low) | int(high) << 16


def _permuted(a: int, b: int, selectors: int) -> int:
    chosen = [selectors >> 4 * i & 15 for i in range(4)]
    # Larger ones would copy a sign bit.
    assert max(chosen) < 8
    return sum(((a | b << 32) >> 8 * c & 255) << 8 * i for i, c in enumerate(chosen))


def _both(a: int, b: int, c: int, table: int) -> int:
    assert table == 0xEA  # a & b | c
    return a & b | c


def _signed(a: int) -> int:
    return a - 2**32 if a >= 2**31 else a


_OPERATIONS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("mov.u32", "mov.b32", "mov.s32", "mov.b16", "cvt.u64.u32"), lambda a: a),
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    **dict.fromkeys(("add.u32", "add.s32", "add.u64"), lambda a, b: a + b),
    "sub.u32": lambda a, b: a - b,
    **dict.fromkeys(("mad.lo.u32", "mad.lo.s32", "mad.wide.u32"), lambda a, b, c: a * b + c),
    "div.u32": lambda a, b: a // b,
    "rem.u32": lambda a, b: a % b,
    "bfe.u32": lambda a, start, size: a >> start & ((1 << size) - 1),
    "lop3.b32": _both,
    "prmt.b32": _permuted,
    "mul.rn.bf16x2": _product,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.lt.u32": lambda a, b: a < b,
    "setp.ge.u32": lambda a, b: a >= b,
    "setp.ne.and.u16": lambda a, b, c: (a != b) & c,
    "setp.ge.and.s32": lambda a, b, c: (_signed(a) >= b) & c,
}
_SIZES = {"u8": 1, "s32": 4}


class Memory:
    """Device memory that is read, and shared memory that is written.

    Attributes:
      device: bytes, from address 0.
      shared: 32-bit words by address. A store to what is there already is a mistake unless ``rewritable`` names it.
      largest: by warp, the largest value that its threads have brought to a reduction. A thread that runs before
        others sees too little: run all twice, the second time with what the first has left here.
    """

    def __init__(
        self, device: bytes = b"", rewritable: tuple[int, ...] = (), largest: dict[int, int] | None = None
    ) -> None:
        self.device = device
        self.shared: dict[int, int] = {}
        self.largest = {} if largest is None else largest
        self._rewritable = rewritable

    def load(self, address: int, kind: str) -> int:
        assert 0 <= address <= len(self.device) - _SIZES[kind], address
        return int.from_bytes(self.device[address : address + _SIZES[kind]], "little")

    def store(self, address: int, values: list[int]) -> None:
        assert address % (4 * len(values)) == 0
        for i, value in enumerate(values):
            assert address + 4 * i not in self.shared or address in self._rewritable
            self.shared[address + 4 * i] = value


def run(ptx: str, arguments: list[int], thread: int, memory: Memory) -> None:
    """Runs a block for one thread of which ``arguments`` are the operands."""
    registers: dict[str, int] = {f"${i}": value for i, value in enumerate(arguments)} | {"%tid.x": thread}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0) & 0xFFFFFFFF

    def address(text: str) -> int:
        register, offset = re.fullmatch(r"\[([\w$]+)(?: \+ (\d+))?\]", text).groups()
        return registers[register] + int(offset or 0)

    for statement in (part.strip() for part in ptx.strip()[1:-1].split(";")):
        if not statement or statement.startswith(".") or statement.startswith("bar.sync"):
            continue
        if statement.startswith("@"):
            predicate, statement = statement[1:].split(None, 1)
            if not registers[predicate]:
                continue
        operation, rest = statement.split(None, 1)
        if operation.startswith("st.shared"):
            at, names = rest.split(", ", 1)
            memory.store(address(at), [value(name) for name in names.strip("{}").split(", ")])
            continue
        to, *names = rest.split(", ")
        if operation == "red.shared.max.s32":
            at = address(to)
            memory.store(at, [max(memory.shared[at], value(names[0]))])
            continue
        if operation == "redux.sync.max.s32":
            warp = thread // 32
            memory.largest[warp] = max(memory.largest.get(warp, 0), _signed(value(names[0])))
            registers[to] = memory.largest[warp] & 0xFFFFFFFF
            continue
        if operation.startswith("ld.global.nc."):
            registers[to] = memory.load(address(names[0]), operation.rsplit(".", 1)[1])
            continue
        result = _OPERATIONS[operation](*map(value, names))
        registers[to] = result if operation.startswith("setp") or "64" in operation else result & 0xFFFFFFFF
