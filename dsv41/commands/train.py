"""``dsv41 train``: trains a model, or its drafter, as a configuration file says; goes on where it was interrupted."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys
from typing import TYPE_CHECKING

from dsv41.commands.options import OptionError, add_mesh_options, mesh_of

if TYPE_CHECKING:
    from dsv41.sharding.parallel import Parallel
    from dsv41.training.build import TrainConfig


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model or its drafter",
        description="Trains as a TOML file says. A directory that has a run of the same configuration is gone on with: "
        "its curve and its weights are those of a run that was never interrupted. Ctrl-C and SIGTERM leave a "
        "checkpoint. Exit code 1: loss or gradients were not finite; 128 and the signal's number: interrupted.",
    )
    parser.add_argument("config", type=pathlib.Path, metavar="CONFIG", help="TOML file")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="the run's directory")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="in place of the file's value, as in TOML; nothing after = takes the default; may be repeated",
    )
    parser.add_argument("--fresh", action="store_true", help="refuse a directory that has a run already")
    parser.add_argument(
        "--back-end", choices=("gpu", "tpu", "xla"), help="kernels to take where they can; default: the platform's"
    )
    add_mesh_options(parser)


def run(args: argparse.Namespace) -> int:
    from dsv41.sharding.parallel import SINGLE
    from dsv41.training.build import TrainConfig
    from dsv41.training.config import read_config
    from pallas_kernels import backend

    if args.mesh is not None:
        args.set.append(f"trainer.mesh={args.mesh}")
    config = read_config(args.config, TrainConfig, args.set)
    args.mesh = config.trainer.mesh
    with backend.use(args.back_end) if args.back_end else contextlib.nullcontext():
        return _train(args, config, mesh_of(args) or SINGLE)


def _train(args: argparse.Namespace, config: TrainConfig, parallel: Parallel) -> int:
    import jax

    from dsv41.training.build import build

    exports = {"export": config.trainer.export, "export_plain": config.trainer.export_plain}
    for field, directory in exports.items():
        if directory is not None and directory.exists():
            raise OptionError(f"trainer.{field}: {directory} is there already")
        if directory is not None and jax.process_count() > 1:
            raise OptionError(
                f"trainer.{field}: {directory}: none of {jax.process_count()} processes has the whole model; the same "
                "command in a single one goes on with the run, and exports it"
            )
    made = build(config, args.out, parallel, args.fresh)
    try:
        outcome = made.trainer.run()
    except ModuleNotFoundError as error:
        if error.name != "tensorboardX":
            raise
        raise OptionError("trainer.tensorboard: needs tensorboardX, from the extra dsv41[tensorboard]") from error
    if outcome.reason == "interrupted":
        print(f"dsv41 train: interrupted after step {outcome.step}; the same command goes on", file=sys.stderr)
        return 128 + outcome.signal
    if outcome.reason == "not finite":
        return 1
    for field, directory in exports.items():
        if directory is not None:
            made.export(outcome.state, directory, field == "export_plain")
    return 0
