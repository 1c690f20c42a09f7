"""Commands that read run folders, and need neither a model nor data."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from lightning_sparsefl.cli.conventions import EXIT_USAGE, QUIET, QUIET_HELP
from lightning_sparsefl.cli.suggestions import did_you_mean
from lightning_sparsefl.report import Report, load_runs, print_line

COMMANDS = {
    "report": "Write tables, figures and a page about one or many runs.",
    "compare": "Print a table of runs, with one row for each method and setting.",
}
"""Names of the commands, with their help texts."""


class RunCommandParser(argparse.ArgumentParser):
    """Parser that reports errors as the other commands do.

    Args:
        command: Name of the command.
    """

    def __init__(self, command: str) -> None:
        super().__init__(prog=f"sparsefl {command}", description=COMMANDS[command], allow_abbrev=False)
        self.add_argument("runs", nargs="+", metavar="RUN", help="Run folder, or folder that contains run folders.")
        if command == "report":
            text = "Folder of the report; files of an earlier report are replaced (default: %(default)s)."
            self.add_argument("--out", metavar="DIR", default="report", help=text)
        for name, kind, metavar, text in _OPTIONS:
            self.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
        for name, metavar, text in _REPEATED:
            self.add_argument(f"--{name}", action="append", metavar=metavar, help=text)
        self.add_argument("--different_data", action="store_true", help="Report runs on different data together.")
        self.add_argument(QUIET, action="store_true", help=QUIET_HELP)

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
        if "required: RUN" in message:
            return "No value for `RUN`; expected one or more run folders, or folders that contain them."
        return f"{message}."


_OPTIONS: tuple[tuple[str, type, str, str], ...] = (
    ("metric", str, "NAME", "Metric to report, such as test_acc (default: the first of which higher is better)."),
    (
        "target",
        float,
        "SCORE",
        "Score whose bytes and FLOPs are reported (default: the best one that every run has reached).",
    ),
)
_REPEATED = (
    (
        "by",
        "OPTION",
        "Option to group runs by, such as algorithm.density; can be repeated (default: the method and all options "
        "that differ, except for seeds).",
    ),
    ("group", "NAME", "Name of a group to report, as `sparsefl compare` prints it; can be repeated (default: all)."),
)


def run_command(args: Sequence[str]) -> None:
    """Run a command that reads run folders.

    Args:
        args: Arguments of the command line, of which the first one is the name of the command.

    Raises:
        InvalidOption: If a folder is not a run folder, or an option is not valid.
    """
    options = RunCommandParser(args[0]).parse_args(list(args[1:]))
    report = Report(
        load_runs(options.runs),
        metric=options.metric,
        target=options.target,
        by=options.by,
        only=options.group,
        different_data=options.different_data,
    )
    page = report.write(options.out) if args[0] == "report" else None
    report.print()
    if page is not None:
        print_line(f"Report: {page}")
