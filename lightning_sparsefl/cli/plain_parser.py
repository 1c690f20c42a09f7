"""Parser of the commands that do not import torch."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any, NoReturn

from lightning_sparsefl.__about__ import __version__
from lightning_sparsefl.cli.conventions import (
    COMPLETION_HELP,
    CONFIG_HELP,
    DESCRIPTION,
    ENV_PREFIX,
    EXIT_USAGE,
    SHELLS,
    SUBCOMMANDS,
    TRAINER_COMMANDS,
)
from lightning_sparsefl.cli.suggestions import did_you_mean, no_subcommand, unknown_subcommand
from lightning_sparsefl.errors import InvalidOption


class PlainParser(argparse.ArgumentParser):
    """Parser that reports errors as that of the other commands does.

    Args:
        command: Name of the command; empty for the program.
        description: Text at the start of its help.
    """

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"sparsefl {command}".rstrip(), description=description, allow_abbrev=False)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments, after the check of the environment.

        Raises:
            InvalidOption: If a variable of the form of an option is of no subcommand that has variables.
        """
        _check_variables()
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        print(f"sparsefl: error: {self._rewritten(message)}", file=sys.stderr)
        listed = "options" if " " in self.prog else "subcommands"
        print(f"tip: `{self.prog} --help` lists the {listed}.", file=sys.stderr)
        sys.exit(EXIT_USAGE)

    def _rewritten(self, message: str) -> str:
        """Return a message of argparse with the option, its value and what was expected."""
        if match := re.fullmatch(r"unrecognized arguments: (\S+).*", message, re.DOTALL):
            name = match[1].partition("=")[0]
            return f"`{name}` is not an option" + (did_you_mean(name, self._option_string_actions) or ".")
        if match := re.fullmatch(r"argument (\S+): invalid float value: (.*)", message, re.DOTALL):
            return f"`{match[1]}` is {match[2]}; expected a number."
        if match := re.fullmatch(r"argument (\S+): expected (\S+) arguments?", message):
            return f"Too few values for `{match[1]}`; expected {self._usage_of(match[1])}."
        if match := re.match(r"argument SUBCOMMAND: invalid choice: (['\"])(.*?)\1 \(", message, re.DOTALL):
            return unknown_subcommand(match[2], SUBCOMMANDS)
        if "required: SUBCOMMAND" in message:
            return no_subcommand(SUBCOMMANDS)
        if "required: RUN" in message:
            return "No value for `RUN`; expected one or more run folders, or folders that contain them."
        return f"{message}."

    def _usage_of(self, option: str) -> str:
        """Return an option with the names of its values."""
        metavar = self._option_string_actions[option].metavar
        return " ".join([option, *([metavar] if isinstance(metavar, str) else metavar or ())])


def _check_variables() -> None:
    """Raise an error for a variable of the form of an option that is of no subcommand with a configuration.

    Only such a subcommand knows its options, since it has imported torch; it checks the rest of the names.
    """
    for name in sorted(os.environ):
        prefix, _, rest = name.partition("_")
        subcommand, inner, _ = rest.partition("__")
        if prefix == ENV_PREFIX and inner and subcommand.lower() not in TRAINER_COMMANDS:
            known = ", ".join(TRAINER_COMMANDS)
            raise InvalidOption(f"The environment variable {name} names no option; only those of {known} have one.")


def program_parser() -> PlainParser:
    """Return a parser with the options of the program before the subcommand, for its help and for a wrong subcommand.

    A parser that can run all subcommands has to import torch and Lightning.
    """
    parser = PlainParser("", DESCRIPTION)
    parser.usage = "sparsefl SUBCOMMAND [options]"
    parser.add_argument("--version", action="version", version=__version__, help="Print the version and exit.")
    parser.add_argument("-c", "--config", metavar="FILE", help=CONFIG_HELP)
    text = "Print the configuration that all other options give, and exit."
    parser.add_argument("--print_config", nargs="?", metavar="=FLAGS", help=text)
    parser.add_argument("--print_completion", choices=SHELLS, help=COMPLETION_HELP)
    subcommands = parser.add_subparsers(
        title="subcommands",
        description="`sparsefl SUBCOMMAND --help` describes one of them.",
        metavar="SUBCOMMAND",
        required=True,
        parser_class=argparse.ArgumentParser,
    )
    for name, text in SUBCOMMANDS.items():
        subcommands.add_parser(name, help=text)
    return parser
