"""Parser of the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_sparsefl.cli.classes import naming_the_class
from lightning_sparsefl.cli.config_files import checked_config
from lightning_sparsefl.cli.conventions import EXIT_USAGE
from lightning_sparsefl.cli.help import HelpFormatter
from lightning_sparsefl.cli.messages import options_elsewhere, options_of, short_message, where_listed
from lightning_sparsefl.errors import require

_GROUPS = {"trainer": "max_rounds", "federation": "clients_per_round"}
"""Groups of options that are no class to choose, each with one of its options."""


class QuietAction(argparse.Action):
    """Option that is not part of the configuration, so that the `config.yaml` of a quiet run is not quiet."""

    def __init__(self, option_strings: Sequence[str], **kwargs: Any) -> None:
        super().__init__(
            option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=kwargs["help"]
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Mark the parser of the subcommand."""
        parser.is_quiet = True  # type: ignore[attr-defined]


class SparseFLParser(LightningArgumentParser):
    """Parser that reports errors in one line, and accepts no abbreviated options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)  # also in the parsers of classes, which jsonargparse creates
        kwargs.setdefault("formatter_class", HelpFormatter)
        if str(kwargs.get("description", "")).startswith("Help for --"):  # of one class, which has no program
            kwargs.setdefault("usage", argparse.SUPPRESS)
        super().__init__(*args, **kwargs)
        self.is_quiet = False

    def add_instantiator(self, instantiator: Any, *args: Any, **kwargs: Any) -> None:
        """Add a function that creates the objects of a class, with the name of the class in its errors."""
        super().add_instantiator(naming_the_class(instantiator), *args, **kwargs)

    def _load_env_vars(self, env: Any, defaults: bool) -> Any:
        """Read the environment, in which a configuration can be named and is checked as after `--config`."""
        name = f"{self.env_prefix}_config".upper()
        if name in env:
            env = {**env, name: checked_config(env[name], name)}
        return super()._load_env_vars(env, defaults)

    def _parse_common(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse one value for all options of a group, which jsonargparse accepts and prints as a configuration."""
        action = self._subcommands_action
        name = None if action is None else cfg.get(action.dest)
        parser, given = (self, cfg) if action is None or name is None else (action.choices[name], cfg.get(name))
        for group, option in _GROUPS.items():
            if given is not None and f"--{group}.{option}" in parser._option_string_actions and group in given:
                value = given[group]
                require(isinstance(value, Namespace), group, value, f"options by name, such as `{group}.{option}`")
        return super()._parse_common(cfg, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message and exit with code 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        reporter = getattr(ex, "subcommand_parser", None) or self
        program = " ".join([reporter.prog, *_subcommand_given(reporter)])
        text = short_message(message, options_of(reporter), options_elsewhere(reporter))
        print(f"sparsefl: error: {text}", file=sys.stderr)
        print(f"tip: {where_listed(message, program)}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


class ListedParser(SparseFLParser):
    """Parser of a command that runs without it, for the help of the program and for completion.

    Only an option or a variable of the environment before the name of the command leads here.
    """

    def parse_args(self, *_: Any, **__: Any) -> NoReturn:
        """Report the error."""
        self.error(
            f"`{self.prog}` has no configuration and no environment variables; expected no option before the name of "
            "the command"
        )

    parse_env = parse_args


def _subcommand_given(parser: LightningArgumentParser) -> list[str]:
    """Return the subcommand on the command line, for an error before it; empty if the parser's program has it."""
    action = parser._subcommands_action
    return [] if action is None else [arg for arg in sys.argv[1:] if arg in action.choices][:1]
