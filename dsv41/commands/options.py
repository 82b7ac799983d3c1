"""What subcommands share: checked option types and the error for options that do not fit."""

from __future__ import annotations

import argparse
import os
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv41.sharding.parallel import Parallel


class OptionError(ValueError):
    """Command-line options that do not fit together or do not fit the model."""


def positive(text: str) -> int:
    """An option value that must be an integer above 0."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 on")
    return int(text)


def add_mesh_options(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Options of a model that is divided over devices; :func:`mesh_of`, or :func:`meshes_of` if several, reads them."""
    group = parser.add_argument_group(
        "mesh",
        "Divides the model over all devices. On several hosts the same command runs on each of them; TPU pods, Slurm "
        "and Open MPI tell the processes of each other, elsewhere the last three options do.",
    )
    preset = "a preset's name (configs/meshes) or a JSON file"
    if several:
        group.add_argument("--mesh", nargs="+", metavar="PRESET", help=f"{preset}; several are measured in turn")
    else:
        group.add_argument("--mesh", metavar="PRESET", help=preset)
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 waits for the others")
    group.add_argument("--processes", type=positive, metavar="N", help="how many there are")
    group.add_argument("--process", type=_not_negative, metavar="I", help="which one this is, from 0")


def mesh_of(args: argparse.Namespace) -> Parallel | None:
    """The mesh that the options name, over the devices of all processes; None without ``--mesh``.

    It joins the processes, so nothing may have used a device before.

    Raises:
      OptionError: options of several processes without a mesh.
      MeshError: no such preset, a number of devices that is not the mesh's, or processes that cannot find each other.
    """
    found = meshes_of(argparse.Namespace(**vars(args) | {"mesh": None if args.mesh is None else [args.mesh]}))
    return next(iter(found.values()), None)


def meshes_of(args: argparse.Namespace) -> dict[str, Parallel]:
    """:func:`mesh_of` of every mesh that is named, by their names; empty without ``--mesh``."""
    if args.mesh is None:
        for name in ("coordinator", "processes", "process"):
            if getattr(args, name) is not None:
                raise OptionError(f"--{name} needs --mesh")
        return {}
    from dsv41.sharding.distributed import initialize
    from dsv41.sharding.mesh import load_preset

    presets = [load_preset(name) for name in args.mesh]
    initialize(args.coordinator, args.processes, args.process)
    return {preset.name: preset.parallel() for preset in presets}


def read_text(path: pathlib.Path) -> str:
    """The text of a UTF-8 file, line ends as they are.

    Raises:
      OptionError: the file is not UTF-8.
    """
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise OptionError(f"{path}: not UTF-8 ({error})") from error


def write_file(path: pathlib.Path, data: bytes) -> None:
    """A file that is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)
