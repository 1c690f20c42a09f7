"""The command line: ``sparsefl fit | validate | test | profile | replay | export``."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn

from jsonargparse import set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, instantiate_class
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_sparsefl.algorithms
import lightning_sparsefl.callbacks
import lightning_sparsefl.data
import lightning_sparsefl.federated
import lightning_sparsefl.models
from lightning_sparsefl.data import Partition
from lightning_sparsefl.errors import ClientFailed, InvalidOption, SparseFLError
from lightning_sparsefl.federated import FederatedAlgorithm, FederatedTrainer, Federation, Reducer

_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
_PARENT = os.getppid()


_KINDS: dict[str, type] = {
    "algorithm": FederatedAlgorithm,
    "model": LightningModule,
    "data": LightningDataModule,
    "partition": Partition,
    "reducer": Reducer,
}
"""Groups whose class the user chooses by name."""
_FLAGS: dict[str, dict[str, str]] = {
    "profile": {"json": "Print JSON instead of tables."},
    "export": {"check": "Load each file into a fresh module, score it as the run does, and compare."},
    "replay": {"pdb": "If the fit fails, open Python's debugger where it did."},
}
"""Arguments of verbs that take no value."""
_VERBS = ("fit", "validate", "test", "profile", "replay", "export")
_NOISE = re.compile(
    r"Does not validate|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|Expected a path but"
)


def one_sentence(message: str) -> str:
    r"""What is wrong, without the parser's inner types.

    Args:
        message: Of jsonargparse, many lines.

    Example:
        >>> one_sentence("Parser key 'lr':\n  Does not validate\n  Errors:\n    - Expected a <class 'float'>")
        "Parser key 'lr': Expected a <class 'float'>."
    """
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    parts = list(dict.fromkeys(line for line in lines if line and not _NOISE.match(line)))
    text = " ".join(part if part.endswith((":", ".")) else f"{part};" for part in parts).rstrip(";")
    unknown = re.search(r"Expected a dot import path string: (\S+)", text)
    key = re.search(r"NestedArg\(key='(\w+)'", message) or re.search(r'Parser key "(?:\w+\.)*(\w+)"', message)
    if unknown and key and key[1] in _KINDS:
        known = ", ".join(_known(_KINDS[key[1]]))
        text = f"`{key[1]}`: there is no class {unknown[1]!r}; known by short name: {known}"
    return text if text.endswith(".") else f"{text}."


def _known(kind: type) -> list[str]:
    """Names of this package's classes of a kind that a user may choose."""
    packages = (
        lightning_sparsefl.algorithms,
        lightning_sparsefl.data,
        lightning_sparsefl.models,
        lightning_sparsefl.federated,
    )
    classes = {name: getattr(package, name) for package in packages for name in package.__all__}
    return sorted(n for n, c in classes.items() if isinstance(c, type) and issubclass(c, kind) and c is not kind)


class SparseFLParser(LightningArgumentParser):
    """Refuses in one sentence."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the sentence and exit with code 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        print(f"sparsefl: error: {one_sentence(message)}", file=sys.stderr)
        print("tip: `sparsefl VERB --help` lists the options.", file=sys.stderr)
        sys.exit(_EXIT_USAGE)


class SparseFLCLI(LightningCLI):
    """LightningCLI over a `FederatedTrainer`, with the groups `algorithm` and `federation`."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The verbs, and which of their arguments are groups of the configuration."""
        groups = {"model", "datamodule"}
        flags = {verb: set(names) for verb, names in _FLAGS.items()}
        return {verb: groups | flags.get(verb, set()) for verb in _VERBS}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the groups; Lightning's own way accepts nothing but a `Trainer`."""
        skip = {"algorithm", "federation", "seed"}
        parser.add_class_arguments(
            self.trainer_class, "trainer", instantiate=False, fail_untyped=False, sub_configs=True, skip=skip
        )
        parser.add_subclass_arguments(FederatedAlgorithm, "algorithm", required=True)
        parser.add_class_arguments(Federation, "federation")
        parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
        parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """A model that asks for `num_classes` or `sample_shape` gets the data's."""
        for name in ("num_classes", "sample_shape"):
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Some arguments are plain flags, such as ``--json``."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        for name, text in _FLAGS.get(subcommand, {}).items():
            parser.add_argument(f"--{name}", action="store_true", help=text)
            self._subcommand_method_arguments[subcommand].append(name)
        return parser

    def _set_seed(self) -> None:
        """Seed as Lightning does; refuse in a sentence what it refuses."""
        try:
            super()._set_seed()
        except ValueError as error:
            raise InvalidOption(f"`seed_everything`: {error}") from error

    def _parse_ckpt_path(self) -> None:
        """The engine reads checkpoints itself, and says in a sentence what is wrong with one."""

    def instantiate_classes(self) -> None:
        """Build what the configuration names; the sentence of a refused option passes through the parser unchanged."""
        try:
            super().instantiate_classes()
        except SparseFLError:
            raise
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, SparseFLError):
                cause = cause.__cause__ or cause.__context__
            if cause is None and str(error).startswith(("Does not validate", "Parser key")):
                cause = InvalidOption(one_sentence(str(error)))  # older jsonargparse keeps the text alone
            if cause is None:
                raise
            raise cause from None

    def instantiate_trainer(self, **kwargs: Any) -> FederatedTrainer:  # type: ignore[override]
        """Build the trainer with the algorithm and the federation of the configuration."""
        groups = {name: self._get(self.config_init, name) for name in ("algorithm", "federation")}
        trainer: Any = super().instantiate_trainer(**groups, **kwargs)
        return trainer  # type: ignore[no-any-return]

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """A fresh optimizer for each client; Lightning's way would share one, and its momentum."""
        if not self.auto_configure_optimizers:
            return
        optimizer = self._get(self.config_init, "optimizer")
        scheduler = self._get(self.config_init, "lr_scheduler")
        if not optimizer or "optimizer" not in self._parser(subcommand)._optimizers:
            return

        def configure_optimizers(module: LightningModule) -> Any:
            made = instantiate_class(module.parameters(), optimizer)
            return LightningCLI.configure_optimizers(
                module, made, instantiate_class(made, scheduler) if scheduler else None
            )

        self.model.configure_optimizers = MethodType(configure_optimizers, self.model)


def run() -> SparseFLCLI:
    """Parse and run the command line."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)  # help for the fields of dataclasses
    for plugin in entry_points(group="lightning_sparsefl.plugins"):
        plugin.load()
    return SparseFLCLI(
        trainer_class=FederatedTrainer,  # type: ignore[arg-type]
        parser_class=SparseFLParser,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"default_env": True, "env_prefix": "SPARSEFL"},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The console script.

    Args:
        argv: Instead of the command line's.

    Returns:
        0, or 2 after a sentence that says what is wrong.
    """
    if argv is not None:
        sys.argv = [sys.argv[0], *argv]
    sys.path.insert(0, str(Path.cwd()))  # so that `--model my_models.Net` finds the user's own file
    try:
        run()
    except ClientFailed as error:
        if error.__cause__ is not None:  # the user's own code failed: show where
            traceback.print_exception(error.__cause__)
        return _refuse(error)
    except (SparseFLError, MisconfigurationException) as error:
        return _refuse(error)
    except OSError as error:  # a folder that cannot be written, a full disk, a download without a network
        return _refuse(error)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0


def _refuse(error: Exception) -> int:
    orphan = os.getppid() != _PARENT  # the first rank, which would speak, is gone
    if orphan or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"sparsefl: error: {error}", file=sys.stderr)
    return _EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
