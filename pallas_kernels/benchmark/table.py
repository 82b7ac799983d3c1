"""The benchmark's table as text."""

from __future__ import annotations

from collections.abc import Sequence

from pallas_kernels.benchmark.limits import Limits
from pallas_kernels.benchmark.measure import Row

_HEAD = (
    "operation",
    "case",
    "ms",
    "TFLOP/s",
    "TB/s",
    "floor ms",
    "of floor",
    "XLA ms",
    "over XLA",
    "torch ms",
    "error",
)


def render(rows: Sequence[Row], limits: Limits, title: str) -> str:
    """A Markdown table with its measured limits above and its notes and failures below."""
    lines = [
        title,
        "",
        f"Measured limits: copy {limits.copy_bytes_per_s / 1e12:.2f} TB/s (read + written), "
        f"bfloat16 product {limits.operations_per_s / 1e12:.0f} TFLOP/s. "
        "Floor: the larger of bytes over the one and operations over the other.",
        "Times are those of a call within one compiled program that makes many after each other, each waiting for the "
        "one before, on sets of arguments in turn; what an operation updates in place is not copied. PyTorch's calls "
        "are queued by the host.",
        "",
        "| " + " | ".join(_HEAD) + " |",
        "| --- | --- |" + " ---: |" * (len(_HEAD) - 2),
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
        "",
    ]
    for row in rows:
        where = f"{row.operation}, {row.name}"
        if row.back_end.startswith("xla ("):
            lines.append(f"- **{where}: ran on {row.back_end}.**")
        lines += [f"- **{where}: no time of {what}: {why}**" for what, why in row.failed.items()]
        if row.note:
            lines.append(f"- {where}: {row.note}")
    for operation in dict.fromkeys(row.operation for row in rows):
        lines += _torch_lines([row for row in rows if row.operation == operation and row.torch_s is not None])
    return "\n".join(lines) + "\n"


def _torch_lines(rows: Sequence[Row]) -> list[str]:
    """How PyTorch did an operation, if it did."""
    if not rows:
        return []
    errors = [row.torch_error for row in rows if row.torch_error is not None]
    parts = [rows[0].torch_note] if rows[0].torch_note else []
    parts += [f"largest error {max(errors):.1e}"] if errors else []
    return [f"- PyTorch's {rows[0].operation}: {'; '.join(parts)}"] if parts else []


def cells(row: Row) -> list[str]:
    """A row's entries in the table, as text."""

    def number(value: float | None, factor: float, digits: int) -> str:
        return "–" if value is None else f"{value * factor:.{digits}f}"

    rate = None if row.seconds is None or not row.operations else row.operations / row.seconds
    moved = None if row.seconds is None else row.bytes / row.seconds
    over_xla = None if row.seconds is None or row.xla_s is None else row.xla_s / row.seconds
    return [
        row.operation,
        row.name,
        number(row.seconds, 1e3, 3),
        number(rate, 1e-12, 0),
        number(moved, 1e-12, 2),
        number(row.floor_s, 1e3, 3),
        number(row.of_floor, 100, 0) + " %" if row.seconds else "–",
        number(row.xla_s, 1e3, 3),
        number(over_xla, 1, 1) + "×" if over_xla else "–",
        number(row.torch_s, 1e3, 3),
        "–" if row.error is None else f"{row.error:.1e}",
    ]
