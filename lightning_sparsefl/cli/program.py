"""The program with a LightningCLI, for the commands that need a model and data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from jsonargparse import set_parsing_settings
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_sparsefl.__about__ import __version__
from lightning_sparsefl.cli.command_line import SparseFLCLI
from lightning_sparsefl.cli.conventions import DESCRIPTION, ENV_PREFIX
from lightning_sparsefl.cli.parser import SparseFLParser
from lightning_sparsefl.cli.run_config import SavedConfig
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import FederatedTrainer

_TEXTS = ("help", "comments", "completion")
"""Parts of the options that show texts of other options."""


def run() -> SparseFLCLI:
    """Parse and run the command line.

    Raises:
        InvalidOption: If an option is not valid, or Lightning refuses a combination of options.
    """
    return _program(SparseFLCLI)


def parse(arguments: Sequence[str]) -> SparseFLCLI:
    """Create the objects of a fit without running it, for programs that run it in another way.

    Args:
        arguments: Options of `sparsefl fit`.

    Returns:
        The command line, with `trainer`, `model`, `datamodule` and the parsed `config`.

    Raises:
        InvalidOption: If an option is not valid, or a group of seeds is asked for.
        SystemExit: If the parser refuses the options, after its message.
    """
    given = sys.argv
    sys.argv = given[:1]  # which belong to the other program; the LightningCLI would warn of them
    try:
        parsed = _program(_Parsed, args=["fit", *arguments])
    finally:
        sys.argv = given
    if parsed.group is not None:
        raise InvalidOption(f"`seeds` asks for {len(parsed.group.seeds)} runs; expected one run (`seed_everything`).")
    return parsed


class _Parsed(SparseFLCLI):
    """Command line that runs nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing."""


def _asks_for_texts(arguments: Sequence[str]) -> bool:
    """Return whether arguments ask for help, shell completion or comments, which alone show texts of options.

    To read the source of every class with options, and of its base classes, takes a second.
    """
    options = [arg for arg in arguments if arg.startswith("-")]
    return any(option == "-h" or any(text in option for text in _TEXTS) for option in options)


def _program(kind: type[SparseFLCLI], **options: Any) -> SparseFLCLI:
    """Parse a command line and run it; where help is asked for, the docstrings of dataclass fields are a part of it."""
    set_parsing_settings(docstring_parse_attribute_docstrings=_asks_for_texts(options.get("args", sys.argv)))
    for plugin in entry_points(group="lightning_sparsefl.plugins"):
        plugin.load()
    try:
        return kind(
            trainer_class=FederatedTrainer,  # type: ignore[arg-type]
            parser_class=SparseFLParser,
            parser_kwargs={
                "prog": "sparsefl",
                "description": DESCRIPTION,
                "version": __version__,
                "default_env": True,
                "env_prefix": ENV_PREFIX,
            },
            **{"save_config_callback": SavedConfig, "save_config_kwargs": {"overwrite": True}, **options},
        )
    except MisconfigurationException as error:
        raise InvalidOption(str(error)) from error
