"""The LightningCLI for federations."""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

import lightning
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, instantiate_class

from lightning_sparsefl.__about__ import __version__
from lightning_sparsefl.cli.help import TITLES, class_list
from lightning_sparsefl.cli.messages import short_message
from lightning_sparsefl.cli.parser import QUIET, QuietAction
from lightning_sparsefl.cli.run_config import with_run_config
from lightning_sparsefl.errors import InvalidOption, SparseFLError
from lightning_sparsefl.federated import FederatedAlgorithm, FederatedTrainer, Federation

_FLAGS: dict[str, dict[str, str]] = {
    "profile": {"json": "Print JSON instead of tables."},
    "export": {"check": "Load each file into a new module, score it as the run does, and compare the scores."},
    "replay": {"pdb": "If the fit fails, start Python's debugger where it failed."},
}
"""Flags of subcommands, with their help texts."""
_SUBCOMMANDS = ("fit", "validate", "test", "profile", "replay", "export")


class SparseFLCLI(LightningCLI):
    """LightningCLI for a `FederatedTrainer`, with the option groups `algorithm` and `federation`."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands, each with the arguments that are not added as options of its method."""
        groups = {"model", "datamodule"}
        flags = {name: set(names) for name, names in _FLAGS.items()}
        return {name: groups | flags.get(name, set()) for name in _SUBCOMMANDS}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Create a parser whose configurations start with the versions that made them."""
        kwargs.setdefault("dump_header", [f"lightning-sparsefl=={__version__}", f"lightning=={lightning.__version__}"])
        return super().init_parser(**kwargs)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the seed, which is 0 by default."""
        text = "Random seed of the run, a whole number >= 0. With false, the random generators are not seeded."
        parser.add_argument(QUIET, action=QuietAction, help="Print nothing but warnings and errors.")
        parser.add_argument("--seed_everything", type=bool | int, default=0, help=text)

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

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        """Add the subcommands, with the names of their programs as they are typed."""
        super()._add_subcommands(parser, **kwargs)
        for name, subparser in self._subcommand_parsers.items():
            subparser.prog = f"{parser.prog} {name}"
            subparser.usage = f"{subparser.prog} [--config FILE] [options]"
            subparser.epilog = (
                "Each option can also be set by an environment variable: --trainer.max_rounds by "
                f"SPARSEFL_{name.upper()}__TRAINER__MAX_ROUNDS."
            )

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Add flags such as ``--json`` to the parser of a subcommand."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        for group, title in TITLES.items():
            (parser.groups or {})[group].title = title
        for name, text in _FLAGS.get(subcommand, {}).items():
            parser.add_argument(f"--{name}", action="store_true", help=text)
            self._subcommand_method_arguments[subcommand].append(name)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the command line, with the configuration of the run that `--ckpt_path` belongs to."""
        classes = class_list(sys.argv[1:]) if args is None else None
        if classes is not None:
            print(classes)
            parser.exit()
        if args is None:
            self.config = parser.parse_args(with_run_config(sys.argv[1:], _SUBCOMMANDS))
        else:
            super().parse_arguments(parser, args)

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
        if getattr(self._parser(self.subcommand), "is_quiet", False):
            kwargs["quiet"] = True
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
