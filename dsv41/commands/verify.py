"""``dsv41 verify``: compares this machine's numbers with the public reference's, or its kernels with XLA."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from dsv41.commands.options import add_mesh_options, mesh_of

if TYPE_CHECKING:
    from dsv41.verification.table import Row


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="compare with the public reference's numbers, or kernels with XLA",
        description="Runs a golden directory (config.json, checkpoint, expected*.safetensors) on the present back end "
        "and compares every tensor that it has; or runs one layer of each kind of a configuration, with random "
        "weights, with this platform's kernels and with XLA. Exit code 1 if any comparison fails.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--kernels",
        type=pathlib.Path,
        metavar="DIR",
        help="a directory with config.json, whose widths are used; its tensors are not read",
    )
    what.add_argument(
        "--golden",
        type=pathlib.Path,
        metavar="DIR",
        help="a flavour folder; token_map.npy may lie in its parent",
    )
    parser.add_argument(
        "--checkpoint",
        type=pathlib.Path,
        metavar="DIR",
        help="weights from here, e.g. the packed flavour multiplied out for the float one; default: the golden folder",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_mesh_options(parser)


def run(args: argparse.Namespace) -> int:
    import jax

    from dsv41.verification.table import failed
    from pallas_kernels import backend

    rows = _rows(args, lambda stage: print(f"verify: {stage} …", file=sys.stderr))
    platform, back_ends = jax.devices()[0], backend.report()
    device = f"{platform.platform} ({platform.device_kind})"
    if args.json:
        json.dump(
            {"device": device, "back_ends": back_ends, "rows": [dataclasses.asdict(row) for row in rows]},
            sys.stdout,
            indent=1,
        )
        print()
    else:
        _print_table(rows)
        print(f"\ndevice: {device}, JAX {jax.__version__}")
        for operation, names in sorted(back_ends.items()):
            print(f"{operation}: {'; '.join(names)}")
        counts = {state: sum(row.passed is state for row in rows) for state in (True, False, None)}
        print(f"{counts[True]} passed, {counts[False]} failed, {counts[None]} reported or skipped")
    return 1 if failed(rows) else 0


def _rows(args: argparse.Namespace, progress: Callable[[str], None]) -> list[Row]:
    if args.kernels is not None:
        from dsv41.config import load_config
        from dsv41.verification.kernels import verify_kernels

        return verify_kernels(load_config(args.kernels), progress=progress)
    from dsv41.verification.golden import Golden

    golden = Golden(args.golden, args.checkpoint)
    if (parallel := mesh_of(args)) is not None:
        from dsv41.verification.meshed import verify_on_mesh
        from dsv41.verification.run import PAGE_TOKENS

        return verify_on_mesh(golden, parallel, PAGE_TOKENS, progress)
    from dsv41.verification.run import verify

    return verify(golden, progress)


def _print_table(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=200, no_color=True)
    table = Table()
    for name, right in (
        ("run", False),
        ("tensor", False),
        ("measure", False),
        ("value", True),
        ("limit", True),
        ("", False),
        ("note", False),
    ):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    verdicts = {True: "pass", False: "[bold red]FAIL[/]", None: ""}
    group = None
    for row in rows:
        if group not in (None, row.group):
            table.add_section()
        numbers = ("" if value is None else f"{value:.3g}" for value in (row.error, row.limit))
        table.add_row(
            "" if row.group == group else row.group, row.name, row.measure, *numbers, verdicts[row.passed], row.note
        )
        group = row.group
    console.print(table)
