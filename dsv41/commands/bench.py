"""``dsv41 bench``: decode and prefill speed and compile time, beside what the machine's limits allow."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import NamedTuple

from dsv41.commands.options import OptionError, add_mesh_options, meshes_of, positive

_KERNELS = 40
"""Kernels of a profile that are printed, the costliest first."""


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
        help="config or checkpoint directories; without tensors: random weights; default: a small configuration",
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
    parser.add_argument(
        "--back-end",
        choices=("gpu", "tpu", "xla"),
        nargs="+",
        metavar="NAME",
        help="--widths: gpu, tpu or xla; default: this platform's kernels, then XLA",
    )
    parser.add_argument("--chunk", type=positive, default=1024, metavar="N", help="--widths: tokens of a prefill chunk")
    parser.add_argument(
        "--profile",
        type=pathlib.Path,
        metavar="DIR",
        help="--widths: also write traces of the first back end here, and print the costliest kernels",
    )
    parser.add_argument(
        "--train",
        choices=("off", "cache", "full"),
        metavar="POLICY",
        help="time forward and backward passes of training instead, under this rounding policy (off, cache, full) and "
        "each policy of recomputation, with their memory; --batch is rows, --context their length",
    )
    parser.add_argument("--steps", type=positive, default=64, metavar="N", help="decode steps of one timing")
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help="timings; the median is printed")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    add_mesh_options(parser, several=True)


def run(args: argparse.Namespace) -> int:
    from dsv41.evaluation.speed import machine_limits, measure_model

    if args.widths:
        return _widths(args)
    if args.train:
        return _training(args)
    if args.mesh is not None:
        raise OptionError("--mesh: times widths only; add --widths")
    limits = machine_limits()
    rows = []
    for directory in args.models or [None]:
        for batch in args.batch:
            for context in args.context:
                what = f"{directory or 'small configuration'}, batch {batch}, context {context}"
                print(f"bench: {what} …", file=sys.stderr)
                rows.append(measure_model(directory, batch, context, args.steps, args.repeats, limits))
    return _print(args, rows, limits)


def _widths(args: argparse.Namespace) -> int:
    meshes = meshes_of(args)
    from dsv41.config import load_config
    from dsv41.defaults import default_config
    from dsv41.evaluation.widths import measure_widths, shallow_model
    from dsv41.sharding.parallel import SINGLE
    from pallas_kernels import backend
    from pallas_kernels.benchmark.limits import measure_limits

    rows, limits = [], measure_limits()
    for directory in args.models or [None]:
        config = default_config() if directory is None else load_config(directory)
        print(f"bench: {directory or 'small configuration'}, random weights …", file=sys.stderr)
        models = {name: shallow_model(config, parallel) for name, parallel in (meshes or {"–": SINGLE}).items()}
        names = args.back_end or tuple(dict.fromkeys((backend.preferred(), "xla")))
        options = (names, args.batch, args.context, args.chunk, args.steps, args.repeats, limits, args.profile)
        for row in measure_widths(models, *options):
            print(f"bench: {json.dumps(row)}", file=sys.stderr)
            rows.append(row)
        if args.profile is not None:
            _print_profiles(args.profile)
    return _print(args, rows, limits)


def _training(args: argparse.Namespace) -> int:
    from dsv41.config import load_config
    from dsv41.defaults import NANO_DIRECTORY
    from dsv41.evaluation.training_speed import measure_training
    from dsv41.settings import REMAT

    rows = []
    for directory in args.models or [NANO_DIRECTORY]:
        config = load_config(directory)
        for batch in args.batch:
            for length in args.context:
                for row in measure_training(config, args.train, batch, length, REMAT, args.repeats):
                    print(f"bench: {directory}, {json.dumps(row)}", file=sys.stderr)
                    rows.append({"model": directory.name, **row})
    return _print(args, rows, None)


def _print_profiles(directory: pathlib.Path) -> None:
    from dsv41.evaluation.profile import kernel_times

    for trace in sorted(path for path in directory.iterdir() if path.is_dir()):
        kernels = kernel_times(trace)
        print(f"{trace.name}: {sum(kernel.microseconds for kernel in kernels):.0f} µs on the device", file=sys.stderr)
        for kernel in kernels[:_KERNELS]:
            print(f"  {kernel.microseconds:10.1f} µs {kernel.count:6d} × {kernel.name}", file=sys.stderr)


def _print(args: argparse.Namespace, rows: list[dict], limits: NamedTuple | None) -> int:
    if args.json:
        json.dump({"limits": limits and limits._asdict(), "rows": rows}, sys.stdout, indent=1)
        print()
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table()
    columns = dict.fromkeys(name for row in rows for name in row)
    for name in columns:
        table.add_column(name.replace("_", " "), justify="left" if name == "model" else "right")
    for row in rows:
        table.add_row(*(_text(row.get(name, "")) for name in columns))
    (Console() if sys.stdout.isatty() else Console(width=160, no_color=True)).print(table)
    if limits is not None:
        print("measured here: " + ", ".join(f"{name} {_text(value)}" for name, value in limits._asdict().items()))
    return 0


def _text(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
