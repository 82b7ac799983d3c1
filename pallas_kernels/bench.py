"""Operations at real shapes against the machine's limits: ``python -m pallas_kernels.bench [op …] [--json FILE]``."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import os
import pathlib
import shlex
import sys

from pallas_kernels.benchmark.case import Case

FOLDERS = (
    "sparse_attention",
    "paged_memory",
    "index_select",
    "top_k",
    "expert_matmul",
    "block_linear",
    "mhc",
    "router",
)


def cases(names: list[str]) -> list[Case]:
    """The cases of the named folders, or of all."""
    return [
        case for name in names or FOLDERS for case in importlib.import_module(f"pallas_kernels.{name}.bench").cases()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument("op", nargs="*", choices=[[], *FOLDERS], help=f"of {', '.join(FOLDERS)}; default: all")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the rows here")
    parser.add_argument(
        "--longest-floor",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="skip cases whose floor on this machine is longer (default: 1)",
    )
    args = parser.parse_args(arguments)

    import jax

    from pallas_kernels.benchmark.limits import measure_limits
    from pallas_kernels.benchmark.measure import measure
    from pallas_kernels.benchmark.table import cells, render

    limits = measure_limits()
    rows = []
    for case in cases(args.op):
        print(f"{case.operation}: {case.name} …", file=sys.stderr, flush=True)
        rows.append(measure(case, limits, args.longest_floor))
        print("  " + " | ".join(cells(rows[-1])[2:]), *rows[-1].failed.items(), file=sys.stderr, flush=True)
    versions = f"JAX {jax.__version__}, {jax.devices()[0].device_kind}"
    command = shlex.join(
        ["python", "-m", "pallas_kernels.bench", *(arguments if arguments is not None else sys.argv[1:])]
    )
    title = f"`{command}`, {datetime.date.today().isoformat()}, {versions}"
    print(render(rows, limits, title))
    if args.json:
        record = {
            "title": title,
            "limits": limits._asdict(),
            "rows": [dataclasses.asdict(row) | {"of_floor": row.of_floor} for row in rows],
        }
        partial = args.json.with_name(args.json.name + ".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(partial, args.json)
    return 1 if any(row.failed.get("native") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
