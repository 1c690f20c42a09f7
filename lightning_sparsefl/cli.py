"""Command line ``sparsefl``, a LightningCLI for federations."""

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

from jsonargparse import Namespace, set_parsing_settings
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
"""Option groups whose class is chosen by name."""
_FLAGS: dict[str, dict[str, str]] = {
    "profile": {"json": "Print JSON instead of tables."},
    "export": {"check": "Load each file into a new module, score it as the run does, and compare the scores."},
    "replay": {"pdb": "If the fit fails, start Python's debugger where it failed."},
}
"""Flags of subcommands, with their help texts."""
_SUBCOMMANDS = ("fit", "validate", "test", "profile", "replay", "export")
_PARSER_DETAILS = re.compile(
    r"Does not validate|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|Expected a path but"
)


def short_message(message: str) -> str:
    r"""Shorten an error message of jsonargparse to one line without the types that the parser tried.

    Args:
        message: Error message of jsonargparse, of several lines.

    Example:
        >>> short_message("Parser key 'lr':\n  Does not validate\n  Errors:\n    - Expected a <class 'float'>")
        "Parser key 'lr': Expected a <class 'float'>."
    """
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    parts = list(dict.fromkeys(line for line in lines if line and not _PARSER_DETAILS.match(line)))
    text = " ".join(part if part.endswith((":", ".")) else f"{part};" for part in parts).rstrip(";")
    unknown = re.search(r"Expected a dot import path string: (\S+)", text)
    key = re.search(r"NestedArg\(key='(\w+)'", message) or re.search(r'Parser key "(?:\w+\.)*(\w+)"', message)
    if unknown and key and key[1] in _KINDS:
        known = ", ".join(_class_names(_KINDS[key[1]]))
        text = f"`{key[1]}` is {unknown[1]!r}, which is not a known class; expected an import path or one of {known}"
    return text if text.endswith(".") else f"{text}."


def _class_names(kind: type) -> list[str]:
    """Return the names of the classes of this package that can be chosen for an option group."""
    packages = (
        lightning_sparsefl.algorithms,
        lightning_sparsefl.data,
        lightning_sparsefl.models,
        lightning_sparsefl.federated,
    )
    classes = {name: getattr(package, name) for package in packages for name in package.__all__}
    return sorted(n for n, c in classes.items() if isinstance(c, type) and issubclass(c, kind) and c is not kind)


class SparseFLParser(LightningArgumentParser):
    """Parser that reports errors in one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message and exit with code 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        print(f"sparsefl: error: {short_message(message)}", file=sys.stderr)
        print("tip: `sparsefl SUBCOMMAND --help` lists the options.", file=sys.stderr)
        sys.exit(_EXIT_USAGE)


class SparseFLCLI(LightningCLI):
    """LightningCLI for a `FederatedTrainer`, with the option groups `algorithm` and `federation`."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands, each with the arguments that are not added as options of its method."""
        groups = {"model", "datamodule"}
        flags = {name: set(names) for name, names in _FLAGS.items()}
        return {name: groups | flags.get(name, set()) for name in _SUBCOMMANDS}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the option groups; the method of LightningCLI only accepts a subclass of `Trainer`."""
        skip = {"algorithm", "federation", "seed"}
        parser.add_class_arguments(
            self.trainer_class, "trainer", instantiate=False, fail_untyped=False, sub_configs=True, skip=skip
        )
        parser.add_subclass_arguments(FederatedAlgorithm, "algorithm", required=True)
        parser.add_class_arguments(Federation, "federation")
        parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
        parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link `num_classes` and `sample_shape` of the model to those of the data."""
        for name in ("num_classes", "sample_shape"):
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Add flags such as ``--json`` to the parser of a subcommand."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        for name, text in _FLAGS.get(subcommand, {}).items():
            parser.add_argument(f"--{name}", action="store_true", help=text)
            self._subcommand_method_arguments[subcommand].append(name)
        return parser

    def _set_seed(self) -> None:
        """Set the seed as LightningCLI does, and raise its errors as `InvalidOption`."""
        try:
            super()._set_seed()
        except ValueError as error:
            raise InvalidOption(f"`seed_everything`: {error}") from error

    def _parse_ckpt_path(self) -> None:
        """Do nothing: the engine reads checkpoints itself, with its own error messages."""

    def instantiate_classes(self) -> None:
        """Create the objects of the configuration; the parser's wrappers around our exceptions are removed."""
        try:
            super().instantiate_classes()
        except SparseFLError:
            raise
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, SparseFLError):
                cause = cause.__cause__ or cause.__context__
            if cause is None and str(error).startswith(("Does not validate", "Parser key")):
                cause = InvalidOption(short_message(str(error)))  # older jsonargparse versions only keep the text
            if cause is None:
                raise
            raise cause from None

    def instantiate_trainer(self, **kwargs: Any) -> FederatedTrainer:  # type: ignore[override]
        """Create the trainer with the algorithm and the federation of the configuration."""
        groups = {name: self._get(self.config_init, name) for name in ("algorithm", "federation")}
        trainer: Any = super().instantiate_trainer(**groups, **kwargs)
        return trainer  # type: ignore[no-any-return]

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Make the model create a new optimizer for each client, which would otherwise share its state."""
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

        chosen = Namespace(optimizer=optimizer, lr_scheduler=scheduler)  # type: ignore[no-untyped-call]
        # compared when a run resumes
        configure_optimizers.configuration = vars(chosen.as_flat())  # type: ignore[attr-defined]
        self.model.configure_optimizers = MethodType(configure_optimizers, self.model)


def run() -> SparseFLCLI:
    """Parse and run the command line."""
    set_parsing_settings(
        docstring_parse_attribute_docstrings=True
    )  # the docstrings of dataclass fields become help texts
    for plugin in entry_points(group="lightning_sparsefl.plugins"):
        plugin.load()
    return SparseFLCLI(
        trainer_class=FederatedTrainer,  # type: ignore[arg-type]
        parser_class=SparseFLParser,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"default_env": True, "env_prefix": "SPARSEFL"},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script.

    Args:
        argv: Arguments; None for those of the command line.

    Returns:
        Exit code: 0, 2 after an error message, or 130 after an interrupt.
    """
    if argv is not None:
        sys.argv = [sys.argv[0], *argv]
    sys.path.append(str(Path.cwd()))  # for `--model my_models.Net` with a file of the user; it replaces no package
    try:
        run()
    except ClientFailed as error:
        if error.__cause__ is not None:  # the code of the user failed, so show where
            traceback.print_exception(error.__cause__)
        return _report(error)
    except (SparseFLError, MisconfigurationException) as error:
        return _report(error)
    except OSError as error:  # such as a folder without write permission, a full disk, or a download without network
        return _report(error)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0


def _report(error: Exception) -> int:
    orphan = os.getppid() != _PARENT  # rank 0, which reports errors, has ended
    if orphan or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"sparsefl: error: {error}", file=sys.stderr)
    return _EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
