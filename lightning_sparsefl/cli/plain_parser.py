"""Parser of the commands that do not import torch."""

from __future__ import annotations

import argparse
import re
import sys
from typing import NoReturn

from lightning_sparsefl.cli.conventions import EXIT_USAGE
from lightning_sparsefl.cli.suggestions import did_you_mean


class PlainParser(argparse.ArgumentParser):
    """Parser that reports errors as that of the other commands does.

    Args:
        command: Name of the command.
        description: Text at the start of its help.
    """

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"sparsefl {command}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        print(f"sparsefl: error: {self._rewritten(message)}", file=sys.stderr)
        print(f"tip: `{self.prog} --help` lists the options.", file=sys.stderr)
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
        if "required: RUN" in message:
            return "No value for `RUN`; expected one or more run folders, or folders that contain them."
        return f"{message}."

    def _usage_of(self, option: str) -> str:
        """Return an option with the names of its values."""
        metavar = self._option_string_actions[option].metavar
        return " ".join([option, *([metavar] if isinstance(metavar, str) else metavar or ())])
