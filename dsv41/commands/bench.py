"""``dsv41 bench``: decode and prefill speed and compile time, beside what the machine's limits allow."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import TYPE_CHECKING

from dsv41.commands.options import positive

if TYPE_CHECKING:
    from dsv41.evaluation.speed import Limits

_LARGE_WIDTH = 1024
_LARGE_LIMITS = (8192, 2**31)
"""Side of the product and bytes of the read that show an accelerator's limits, for models that are run on one."""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure speed and compile time",
        description="Times decode steps and prefill chunks of each model and compiles them anew. The floor of a decode "
        "step is the larger of bytes over bandwidth and operations over rate, both measured in the same run.",
    )
    parser.add_argument(
        "models",
        type=pathlib.Path,
        nargs="*",
        metavar="DIR",
        help="config or checkpoint directories; without tensors: random weights; default: the embedded small model",
    )
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8], metavar="N", help="decode batches")
    parser.add_argument(
        "--context", type=positive, nargs="+", default=[64], metavar="N", help="tokens before the timed steps"
    )
    parser.add_argument(
        "--widths",
        action="store_true",
        help="time each configuration's widths only: one repetition of each group of layers, random weights and "
        "memory made on the device, this platform's kernels and XLA",
    )
    parser.add_argument("--chunk", type=positive, default=1024, metavar="N", help="--widths: tokens of a prefill chunk")
    parser.add_argument("--steps", type=positive, default=64, metavar="N", help="decode steps of one timing")
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help="timings; the median is printed")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def run(args: argparse.Namespace) -> int:
    from dsv41.evaluation.speed import machine_limits, measure_model

    if args.widths:
        return _widths(args)
    limits = machine_limits()
    rows = []
    for directory in args.models or [None]:
        for batch in args.batch:
            for context in args.context:
                print(f"bench: {directory or 'embedded model'}, batch {batch}, context {context} …", file=sys.stderr)
                rows.append(measure_model(directory, batch, context, args.steps, args.repeats, limits))
    return _print(args, rows, limits)


def _widths(args: argparse.Namespace) -> int:
    from dsv41.config import load_config
    from dsv41.defaults import default_config
    from dsv41.evaluation.speed import machine_limits
    from dsv41.evaluation.widths import measure_widths, random_model

    rows = []
    for directory in args.models or [None]:
        config = default_config() if directory is None else load_config(directory)
        large = config.text.hidden_size >= _LARGE_WIDTH
        limits = machine_limits(config.activation_dtype, *(_LARGE_LIMITS if large else ()))
        print(f"bench: random weights of {directory or 'the embedded model'} …", file=sys.stderr)
        model, variables = random_model(config)
        for batch in args.batch:
            for context in args.context:
                print(f"bench: batch {batch}, context {context} …", file=sys.stderr)
                options = (batch, context, args.chunk, args.steps, args.repeats)
                rows += measure_widths(model, variables, *options, limits)
        del variables
    return _print(args, rows, limits)


def _print(args: argparse.Namespace, rows: list[dict], limits: Limits) -> int:
    if args.json:
        json.dump({"limits": limits._asdict(), "rows": rows}, sys.stdout, indent=1)
        print()
        return 0
    _print_table(rows, limits)
    return 0


def _print_table(rows: list[dict], limits: Limits) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    columns = dict.fromkeys(name for row in rows for name in row)
    for name in columns:
        table.add_column(name.replace("_", " "), justify="left" if name == "model" else "right")
    for row in rows:
        values = (row.get(name, "") for name in columns)
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values))
    (Console() if sys.stdout.isatty() else Console(width=160, no_color=True)).print(table)
    print(
        f"measured here: {limits.bytes_per_s / 1e9:.1f} GB/s read, {limits.operations_per_s / 1e9:.0f} GFLOP/s "
        f"(product of matrices), device {limits.device}"
    )
