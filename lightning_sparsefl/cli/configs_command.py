"""Subcommand ``sparsefl configs``: list, print and copy the configurations of the package; and their use by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, Namespace

from lightning_sparsefl.cli.packaged import copy, find_file, listing, packaged_config
from lightning_sparsefl.cli.parser import SparseFLParser
from lightning_sparsefl.errors import InvalidOption

NAME = "configs"
SUMMARY = "List, print or copy the configurations that are installed with the package."


class ConfigFileOrName(ActionConfigFile):
    """Option for a configuration file, or for the name of one that is installed with the package."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Apply the file of that path if there is one, else that of the package.

        Raises:
            InvalidOption: If the file has no options.
        """
        packaged = packaged_config(values) if isinstance(values, str) else None
        if isinstance(values, str) and packaged is None and Path(values).is_file():
            _require_options(Path(values))
        super().__call__(parser, cfg, packaged or values, option_string)  # type: ignore[no-untyped-call]


def _require_options(path: Path) -> None:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = "" if mark is None else f", as line {mark.line + 1}, column {mark.column + 1} shows: {problem}"
        raise InvalidOption(f"`--config` is '{path}', which is not YAML{place}; repair it.") from None
    if not isinstance(content, Mapping | NoneType):
        raise InvalidOption(
            f"`--config` is '{path}', which has a {type(content).__name__}; expected options by name, as "
            "`sparsefl configs --show quickstart` prints them."
        )


def add_configs(parser: Any) -> None:
    """Add the subcommand.

    Args:
        parser: Parser of the command line, which has subcommands.
    """
    subparser = SparseFLParser(description=SUMMARY, default_env=False)
    parser._subcommands_action.add_subcommand(NAME, subparser, help=SUMMARY)
    subparser.prog = f"{parser.prog} {NAME}"
    subparser.usage = f"{subparser.prog} [PATTERN] [--show NAME | --copy NAME DEST]"
    subparser.epilog = "Each name can be given to `--config`: sparsefl fit --config quickstart"
    text = "Text that the listed names contain, or a pattern of shell wildcards. Default: all names."
    subparser.add_argument("pattern", nargs="?", metavar="PATTERN", help=text)
    subparser.add_argument("--show", metavar="NAME", help="Print the file of this name.")
    text = "Copy the file of this name to a folder or a path, and replace no file."
    subparser.add_argument("--copy", nargs=2, metavar=("NAME", "DEST"), help=text)


def run_configs(arguments: Namespace) -> str:
    """Run the subcommand, and return what it prints.

    Args:
        arguments: Values of its options.

    Raises:
        InvalidOption: If a name or a pattern fits no file, or a copy would replace one.
    """
    if arguments.copy:
        name, destination = arguments.copy
        return f"Copied to {copy(name, Path(destination))}"
    if arguments.show:
        return find_file(arguments.show).read_text().rstrip()
    return listing(arguments.pattern or "")
