"""Commands that read run folders, and need neither a model nor data."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from lightning_sparsefl.cli.conventions import QUIET, QUIET_HELP, SUBCOMMANDS
from lightning_sparsefl.cli.plain_parser import PlainParser
from lightning_sparsefl.errors import require
from lightning_sparsefl.report import Report, load_runs, print_line
from lightning_sparsefl.report.measures.prefix import amount
from lightning_sparsefl.report.measures.summary import BUDGETS, Budget

_OPTIONS: tuple[tuple[str, type, str, str], ...] = (
    ("metric", str, "NAME", "Metric to report, such as test_acc (default: the first of which higher is better)."),
    (
        "target",
        float,
        "SCORE",
        "Score whose bytes and FLOPs are reported (default, for each model: the best one that all runs have reached).",
    ),
    (
        "budget",
        str,
        "BYTES",
        "Bytes in both directions, such as 170kB, within which the last evaluated score is reported (default: none).",
    ),
    (
        "flops_budget",
        str,
        "FLOPS",
        "FLOPs of local training, such as 2G, within which the last evaluated score is reported (default: none).",
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
    options = _parser(args[0]).parse_args(list(args[1:]))
    budgets = {budget.option: _number(budget, getattr(options, budget.option)) for budget in BUDGETS.values()}
    report = Report(
        load_runs(options.runs),
        metric=options.metric,
        target=options.target,
        by=options.by,
        only=options.group,
        different_data=options.different_data,
        **budgets,
    )
    page = report.write(options.out) if args[0] == "report" else None
    report.print()
    if page is not None:
        print_line(f"Report: {page}")


def _number(budget: Budget, text: str | None) -> float | None:
    """Return the number above 0 that the option of a budget states, or None if it is not set."""
    if text is None:
        return None
    value = amount(text, budget.unit)
    require(0 < value < math.inf, budget.option, text, budget.expected)
    return value


def _parser(command: str) -> PlainParser:
    parser = PlainParser(command, SUBCOMMANDS[command])
    add_options(parser, command)
    return parser


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of a command to its parser.

    Args:
        parser: Parser of the command.
        command: Name of the command.
    """
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Run folder, or folder that contains run folders.")
    if command == "report":
        text = "Folder of the report; files of an earlier report are replaced (default: %(default)s)."
        parser.add_argument("--out", metavar="DIR", default="report", help=text)
    for name, kind, metavar, text in _OPTIONS:
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    for name, metavar, text in _REPEATED:
        parser.add_argument(f"--{name}", action="append", metavar=metavar, help=text)
    parser.add_argument("--different_data", action="store_true", help="Report runs on different data together.")
    parser.add_argument(QUIET, action="store_true", help=QUIET_HELP)
