"""Option ``--print_completion``: a script that completes subcommands, options and names in a shell."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from jsonargparse import ActionConfigFile

from lightning_sparsefl.cli.classes import own_classes
from lightning_sparsefl.cli.conventions import COMPLETION_HELP, SHELLS
from lightning_sparsefl.cli.help import KINDS
from lightning_sparsefl.cli.packaged import config_names, packaged_files
from lightning_sparsefl.errors import InvalidOption

_FUNCTION = "_sparsefl_config"
_PREAMBLE = {
    "bash": f'{_FUNCTION}() {{ compgen -f -- "$1"; compgen -W "%s" -- "$1"; }}',
    "zsh": f"{_FUNCTION}() {{ _files; compadd -- %s; }}",
}
"""Shell function that completes paths of files and the names of packaged configurations."""


class PrintCompletion(argparse.Action):
    """Option that prints the script for a shell and ends the program.

    jsonargparse can print such a script as well, but lists the options of every class that an option can have, which
    takes minutes for the classes of torch and Lightning.
    """

    def __init__(self, option_strings: list[str], **_: Any) -> None:
        suppressed = argparse.SUPPRESS
        super().__init__(option_strings, dest=suppressed, default=suppressed, choices=SHELLS, help=COMPLETION_HELP)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Print the script."""
        print(completion_script(parser, values))
        parser.exit()


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for a shell.

    Args:
        parser: Parser with the subcommands; the choices that the script offers are written to its options.
        shell: Name of the shell, one of `SHELLS`.

    Raises:
        InvalidOption: If shtab is not installed.
    """
    try:
        shtab: Any = import_module("shtab")
    except ImportError as error:
        raise InvalidOption(
            "`--print_completion` needs shtab; install it with `pip install 'lightning-sparsefl[completion]'`."
        ) from error
    for subparser in parser._subcommands_action.choices.values():  # type: ignore[attr-defined]
        for action in subparser._actions:
            _offer(action)
    script: str = shtab.complete(parser, shell, preamble={shell: _PREAMBLE[shell] % " ".join(config_names())})
    return script


def _offer(action: Any) -> None:
    """Give an option the values that the script offers."""
    if isinstance(action, ActionConfigFile):
        action.complete = dict.fromkeys(SHELLS, _FUNCTION)  # type: ignore[attr-defined]
    elif action.dest in KINDS:
        action.choices = list(own_classes(KINDS[action.dest]))
    elif action.dest in ("show", "copy"):
        action.choices = list(packaged_files())
