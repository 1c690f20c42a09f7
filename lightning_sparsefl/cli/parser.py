"""Parser of the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import Namespace, add_instantiator
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.cli import LightningArgumentParser

from lightning_sparsefl.cli.classes import call_function, defaults_of, naming_the_class
from lightning_sparsefl.cli.config_files import checked_config
from lightning_sparsefl.cli.conventions import ENV_PREFIX, EXIT_USAGE
from lightning_sparsefl.cli.help import HelpFormatter
from lightning_sparsefl.cli.messages import options_elsewhere, options_of, short_message, where_listed
from lightning_sparsefl.cli.run_config import checkpoint_without_config
from lightning_sparsefl.errors import InvalidOption, nearest, require

_GROUPS = {"trainer": "max_rounds", "federation": "clients_per_round"}
"""Groups of options without a class to choose, each with one of its options."""


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
        self.folder = Path.cwd()
        self._of_the_data: list[str] = []

    def link_to_the_data(self, name: str) -> None:
        """Link an option of the model to that of the data, whose value it takes unless the data has none.

        Args:
            name: Name of the option of both.
        """
        self._of_the_data.append(f"model.init_args.{name}")
        self.link_arguments(f"data.{name}", self._of_the_data[-1], apply_on="instantiate")

    def dump(self, namespace: Namespace, *args: Any, **kwargs: Any) -> str:
        """Return a configuration as text, in which linked options of the model stay if the user has set them.

        The parser of jsonargparse leaves them out, so that the text would be that of another model.
        """
        if self._of_the_data and kwargs.get("skip_link_targets", True):
            if not kwargs.get("skip_validation"):
                self.validate(namespace.clone(with_meta=False))
            namespace = self._without_defaults(namespace)
            kwargs |= {"skip_link_targets": False, "skip_validation": True}
        text: str = super().dump(namespace, *args, **kwargs)
        return text

    def _without_defaults(self, namespace: Namespace) -> Namespace:
        """Return a copy without linked options of the model that have the default of its class."""
        shown, defaults = namespace.clone(), defaults_of(namespace.get("model.class_path"))
        for key in self._of_the_data:
            parent, _, name = key.rpartition(".")
            if _with_lists(shown.get(key)) == _with_lists(defaults.get(name)):
                shown.pop(key, None)
            if parent in shown and not shown[parent]:
                del shown[parent]
        return shown

    def add_instantiator(self, instantiator: Any, *args: Any, **kwargs: Any) -> None:
        """Add a function that creates the objects of a class, with the name of the class in its errors."""
        super().add_instantiator(naming_the_class(instantiator), *args, **kwargs)

    def add_function_arguments(self, function: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Add the options of a function in the place of a class, with the name of the function in its errors.

        The options of other groups to which its own are linked are accepted, as for a class.
        """
        add_instantiator(naming_the_class(call_function), function, subclasses=False)
        kwargs.pop("linked_targets", None)  # jsonargparse makes these options optional afterwards
        added: list[str] = super().add_function_arguments(function, *args, **kwargs)
        return added

    def _load_env_vars(self, env: Any, defaults: bool) -> Any:
        """Read the environment, in which a configuration can be named and is checked as after `--config`."""
        name = f"{self.env_prefix}_config".upper()
        if name in env:
            env = {**env, name: checked_config(env[name], name)}
        return super()._load_env_vars(env, defaults)

    def _parse_common(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        """Check what jsonargparse accepts: unknown variables, one value for a group, defaults that are no text."""
        action = self._subcommands_action
        if action is not None:
            _check_variables(_variables(self))
        name = None if action is None else cfg.get(action.dest)
        parser, given = (self, cfg) if action is None or name is None else (action.choices[name], cfg.get(name))
        for group, option in _GROUPS.items():
            if given is not None and f"--{group}.{option}" in parser._option_string_actions and group in given:
                value = given[group]
                require(isinstance(value, Namespace), group, value, f"options by name, such as `{group}.{option}`")
        for key, value in cfg.items():
            if isinstance(value, str) and isinstance(value, Enum):  # a default, as of `Timer`, that YAML cannot hold
                cfg[key] = str(value.value)
        return super()._parse_common(cfg, *args, **kwargs)

    def _dump_delete_default_entries(self, subcfg: Any, subdefaults: Any) -> None:
        """Remove unchanged options; a default that is a tuple is compared as the list that a configuration has."""
        super()._dump_delete_default_entries(subcfg, _with_lists(subdefaults))  # type: ignore[no-untyped-call]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message and exit with code 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        reporter = getattr(ex, "subcommand_parser", None) or self
        program = " ".join([reporter.prog, *_subcommand_given(reporter)])
        ckpt_path = checkpoint_without_config(sys.argv[1:], program.rpartition(" ")[2])
        text = short_message(message, options_of(reporter), options_elsewhere(reporter), self.folder, ckpt_path)
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


def _with_lists(value: Any) -> Any:
    """Return a default, or defaults by name, with lists for tuples."""
    if isinstance(value, dict):
        return {name: _with_lists(item) for name, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _subcommand_given(parser: LightningArgumentParser) -> list[str]:
    """Return the subcommand on the command line, for an error before it; empty if the parser's program has it."""
    action = parser._subcommands_action
    return [] if action is None else [arg for arg in sys.argv[1:] if arg in action.choices][:1]


def _variables(parser: LightningArgumentParser) -> list[str]:
    """Return the environment variables of the options of a parser and of its subcommands."""
    action = parser._subcommands_action
    inner = [] if action is None else [p for p in action.choices.values() if not isinstance(p, ListedParser)]
    read = [option.dest for option in parser._actions if option.default != argparse.SUPPRESS]
    own = [f"{parser.env_prefix}_{name}".replace(".", "__").upper() for name in read]
    return own + [name for subparser in inner for name in _variables(subparser)]


def _check_variables(known: Sequence[str]) -> None:
    """Raise an error for a variable of the form of an option that names none, and warn of other misspelt ones.

    A variable without ``__`` may be of another program: Kubernetes sets SPARSEFL_PORT for a service of that name.
    """
    for name in sorted(set(os.environ).difference(known)):
        prefix, _, rest = name.partition("_")
        if prefix != ENV_PREFIX:
            continue
        if "__" in rest:
            raise InvalidOption(f"The environment variable {name} names no option{_intended(name, known)}")
        near = nearest(rest, (other.removeprefix(f"{ENV_PREFIX}_") for other in known if "__" not in other))
        if near is not None:
            rank_zero_warn(f"The environment variable {name} is not read; did you mean {ENV_PREFIX}_{near}?")


def _intended(name: str, known: Sequence[str]) -> str:
    """Return what an unknown variable may have been meant for, to be appended to a message."""
    outer = max((other for other in known if name.startswith(f"{other}__")), key=len, default=None)
    if outer is not None and not any(other.startswith(f"{outer}__") for other in known):
        return (
            f"; options of a class are set with it, as in {outer}='{{class_path: NAME, init_args: {{OPTION: VALUE}}}}'."
        )
    start = f"{name.partition('__')[0]}__"
    beside = [other.removeprefix(start) for other in known if other.startswith(start)]
    near = nearest(name.removeprefix(start), beside) if beside else None
    found = f"{start}{near}" if near is not None else nearest(name, () if beside else known)
    return (
        f"; did you mean {found}?" if found is not None else f"; expected one as {ENV_PREFIX}_FIT__TRAINER__MAX_ROUNDS."
    )
