"""``dsv41 curves``: draws what ``dsv41 train`` has measured, of one run or of several on the same axes."""

from __future__ import annotations

import argparse
import pathlib

from dsv41.commands.options import OptionError


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "curves",
        help="draw the curves of training runs",
        description="Draws loss, bits per byte, learning rate, expert load, gradient norm and acceptance of training "
        "runs, finished or not.",
    )
    parser.add_argument("runs", type=pathlib.Path, nargs="+", metavar="DIR", help="a run's directory")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE", help="picture, .png or .svg")


def run(args: argparse.Namespace) -> int:
    from dsv41.training.metrics import read_metrics
    from dsv41.training.plots import plot_runs

    if args.out.suffix not in (".png", ".svg"):
        raise OptionError(f"--out {args.out}: neither .png nor .svg")
    runs = {str(path): read_metrics(path) for path in args.runs}
    try:
        plot_runs(runs, args.out)
    except ValueError as error:
        raise OptionError(str(error)) from error
    except ModuleNotFoundError as error:
        raise OptionError("curves: needs matplotlib, from the extra dsv41[plot]") from error
    return 0
