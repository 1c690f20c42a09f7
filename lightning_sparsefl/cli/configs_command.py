"""Subcommand ``sparsefl configs``: list, print and copy the configurations of the package."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_sparsefl.cli.conventions import CONFIGS, SUBCOMMANDS
from lightning_sparsefl.cli.packaged import copy, find_file, listing
from lightning_sparsefl.cli.plain_parser import PlainParser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand to its parser.

    Args:
        parser: Parser of the subcommand.
    """
    parser.usage = f"{parser.prog} [PATTERN] [--show NAME | --copy NAME DEST]"
    parser.epilog = "Each name can be given to `--config`: sparsefl fit --config quickstart"
    text = "Text that the listed names contain, or a pattern of shell wildcards. Default: all names."
    parser.add_argument("pattern", nargs="?", metavar="PATTERN", help=text)
    parser.add_argument("--show", metavar="NAME", help="Print the file of this name.")
    text = "Copy the file of this name to a folder or a path, and replace no file."
    parser.add_argument("--copy", nargs=2, metavar=("NAME", "DEST"), help=text)


def run_configs(args: Sequence[str]) -> None:
    """Run the subcommand.

    Args:
        args: Arguments of the command line after the name of the subcommand.

    Raises:
        InvalidOption: If a name or a pattern fits no file, or a copy would replace one.
    """
    parser = PlainParser(CONFIGS, SUBCOMMANDS[CONFIGS])
    add_options(parser)
    print(_answer(parser.parse_args(list(args))))


def _answer(options: argparse.Namespace) -> str:
    """Do what the options ask for, and return what the subcommand prints."""
    if options.copy:
        name, destination = options.copy
        return f"Copied to {copy(name, Path(destination))}"
    if options.show:
        return find_file(options.show).read_text(encoding="utf-8").rstrip()
    return listing(options.pattern or "")
