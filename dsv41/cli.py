"""The command ``dsv41``: parses arguments, runs one subcommand, turns user errors into one line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = ("inspect", "plan", "aot", "generate", "verify", "eval", "bench", "train", "curves")
"""Modules of :mod:`dsv41.commands`. They import what is heavy in ``run``, so that ``--help`` is instant."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0, what the subcommand says, or 2 for a user error.

    Raises:
      SystemExit: wrong usage (2) or ``--help`` (0), from argparse.
    """
    parser = argparse.ArgumentParser(prog="dsv41", description="DeepSeek-V4.1-Flash in JAX.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name in COMMANDS:
        importlib.import_module(f"dsv41.commands.{name}").add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        code = importlib.import_module(f"dsv41.commands.{args.command}").run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("dsv41: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has left; without this the interpreter complains once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if not _is_user_error(error):
            raise
        message = "; ".join(line.strip() for line in str(error).splitlines())
        print(f"dsv41: error: {message}", file=sys.stderr)
        return 2


def _is_user_error(error: Exception) -> bool:
    """Whether the user can mend it (input, files, options); anything else is a bug and shows its trace."""
    from dsv41.checkpoint import CheckpointError
    from dsv41.commands.options import OptionError
    from dsv41.config import ConfigError
    from dsv41.inference.requests import RequestError
    from dsv41.pictures.files import PictureError
    from dsv41.sharding.rules import MeshError
    from dsv41.tokens.chat import ChatError
    from dsv41.tokens.tokenizer import TokenizerError
    from dsv41.training.config import TrainConfigError
    from dsv41.training.corpora import DataError
    from dsv41.verification.golden import GoldenError

    own = (CheckpointError, ChatError, ConfigError, DataError, GoldenError, MeshError, OptionError, PictureError)
    return isinstance(error, (*own, RequestError, TokenizerError, TrainConfigError, OSError))


if __name__ == "__main__":
    sys.exit(main())
