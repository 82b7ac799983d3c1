"""What subcommands share: checked option types and the error for options that do not fit."""

from __future__ import annotations

import argparse
import pathlib


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


def read_text(path: pathlib.Path) -> str:
    """The text of a UTF-8 file, line ends as they are.

    Raises:
      OptionError: the file is not UTF-8.
    """
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise OptionError(f"{path}: not UTF-8 ({error})") from error
