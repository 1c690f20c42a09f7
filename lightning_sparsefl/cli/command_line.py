"""The LightningCLI for federations."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, MethodType
from typing import Any

import lightning
from jsonargparse import Namespace
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, instantiate_class

from lightning_sparsefl.__about__ import __version__
from lightning_sparsefl.cli import configs_command, run_commands
from lightning_sparsefl.cli.classes import NotCreated, described
from lightning_sparsefl.cli.completion import PrintCompletion
from lightning_sparsefl.cli.config_files import ConfigFileOrName, with_pipes_read
from lightning_sparsefl.cli.conventions import (
    CONFIG_HELP,
    CONFIGS,
    ENV_PREFIX,
    FOLDER_COMMANDS,
    QUIET,
    QUIET_HELP,
    SUBCOMMANDS,
    TRAINER_COMMANDS,
)
from lightning_sparsefl.cli.help import TITLES, class_list
from lightning_sparsefl.cli.messages import short_message
from lightning_sparsefl.cli.parser import ListedParser, QuietAction
from lightning_sparsefl.cli.run_config import with_run_config
from lightning_sparsefl.cli.seeds import OWN_KEYS, SeedGroup, group_of
from lightning_sparsefl.errors import InvalidOption, SparseFLError
from lightning_sparsefl.federated import FederatedAlgorithm, FederatedTrainer, Federation
from lightning_sparsefl.federated.tracking.run_loggers import close_loggers
from lightning_sparsefl.report import silenced

_FLAGS: dict[str, dict[str, str]] = {
    "profile": {"json": "Print JSON instead of tables."},
    "export": {"check": "Load each file into a new module, score it as the run does, and compare the scores."},
    "replay": {"pdb": "If the fit fails, start Python's debugger where it failed."},
}
"""Flags of subcommands, with their help texts."""
_OF_THE_DATA = ("num_classes", "sample_shape")
"""Options of the model that are those of the data."""
_SEEDS_HELP = (
    "Seeds of a group of runs, such as 0,1,2, which end with one table of means and standard deviations. The same "
    "command goes on with a group that was stopped. (default: one run with `seed_everything`)"
)


class SparseFLCLI(LightningCLI):
    """LightningCLI for a `FederatedTrainer`, with the option groups `algorithm` and `federation`."""

    group: SeedGroup | None = None
    """Group of runs that `--seeds` asks for."""
    _seed: int | None = None
    """Seed of the current run of the group."""
    _given: Mapping[str, Any] = MappingProxyType({})
    """Options of the model that the user has set."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands, each with the arguments that are not added as options of its method."""
        groups = {"model", "datamodule"}
        flags = {name: set(names) for name, names in _FLAGS.items()}
        return {name: groups | flags.get(name, set()) for name in TRAINER_COMMANDS}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Create a parser whose configurations start with the versions that made them."""
        kwargs.setdefault("dump_header", [f"lightning-sparsefl=={__version__}", f"lightning=={lightning.__version__}"])
        parser = self.parser_class(**kwargs)
        parser.add_argument("-c", "--config", action=ConfigFileOrName, metavar="FILE", help=CONFIG_HELP)
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the seed, which is 0 by default."""
        text = "Random seed of the run, a whole number >= 0. With false, the random generators are not seeded."
        parser.add_argument(QUIET, action=QuietAction, help=QUIET_HELP)
        parser.add_argument("--seed_everything", type=bool | int, default=0, help=text)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the option groups; the method of LightningCLI only accepts a subclass of `Trainer`."""
        skip = {"algorithm", "federation", "seed", "run_dir"}
        parser.add_class_arguments(
            self.trainer_class, "trainer", instantiate=False, fail_untyped=False, sub_configs=True, skip=skip
        )
        parser.add_subclass_arguments(FederatedAlgorithm, "algorithm", required=True)
        parser.add_class_arguments(Federation, "federation")
        parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
        parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link `num_classes` and `sample_shape` of the model to those of the data."""
        for name in _OF_THE_DATA:
            parser.link_to_the_data(name)  # type: ignore[attr-defined]

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        """Add the subcommands, with the names of their programs as they are typed."""
        parser.add_argument("--print_completion", action=PrintCompletion)
        super()._add_subcommands(parser, **kwargs)
        for name, subparser in self._subcommand_parsers.items():
            subparser.prog = f"{parser.prog} {name}"
            subparser.usage = f"{subparser.prog} [--config FILE] [options]"
            prefix = f"{ENV_PREFIX}_{name.upper()}__"
            subparser.epilog = (
                "The options of the configuration that are listed here can also be set by environment variables: "
                f"--trainer.max_rounds by {prefix}TRAINER__MAX_ROUNDS. Those of a class are set with the class: "
                f"{prefix}ALGORITHM='{{class_path: FedSpa, init_args: {{density: 0.3}}}}'. A variable of this form "
                "that names no option is refused."
            )
        for name in (CONFIGS, *FOLDER_COMMANDS):
            listed = ListedParser(default_env=False)
            parser._subcommands_action.add_subcommand(name, listed, help=SUBCOMMANDS[name])  # type: ignore[union-attr]
            listed.prog = f"{parser.prog} {name}"
            if name == CONFIGS:
                configs_command.add_options(listed)
            else:
                run_commands.add_options(listed, name)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Add flags such as ``--json`` to the parser of a subcommand."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        for group, title in TITLES.items():
            (parser.groups or {})[group].title = title
        if subcommand == "fit":
            parser.add_argument("--seeds", type=int | list[int] | str | None, default=None, help=_SEEDS_HELP)
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
        if isinstance(args, dict | Namespace):
            super().parse_arguments(parser, args)
            return
        given = args
        if args is None:
            sys.argv[1:] = with_pipes_read(sys.argv[1:])  # with which further ranks are started
            given = with_run_config(sys.argv[1:], TRAINER_COMMANDS)
        self.config = parser.parse_args(given)
        # without the defaults of the model's class, which the links replace
        parsed = parser.parse_args(given, defaults=False)
        options = parsed.get(f"{parsed.subcommand}.model.init_args")
        self._given = {} if options is None else vars(options)

    def _set_seed(self) -> None:
        """Set the seed as LightningCLI does, or the first one of a group, and raise errors as `InvalidOption`."""
        if self.subcommand == "fit" and self.group is None:
            self.group = self._find_group()
        if self.group is not None and self._seed is None:
            self._choose_seed(self.group.seeds[0])
        try:
            with silenced(self._get(self.config, "trainer")["quiet"]):
                super()._set_seed()
        except ValueError as error:
            raise InvalidOption(f"`seed_everything`: {error}") from error

    def _find_group(self) -> SeedGroup | None:
        """Return the group of runs that the configuration asks for; each run's own configuration does not name it."""
        config, parser = self.config["fit"], self._parser("fit")
        shared = config.clone()
        for key in OWN_KEYS:
            shared.pop(key, None)
        text = parser.dump(shared, skip_none=False, skip_validation=True)
        algorithm = str(config["algorithm"]["class_path"]).rpartition(".")[2]
        root, ckpt_path = Path(os.path.expanduser(config["trainer"]["default_root_dir"])), config.get("ckpt_path")
        group = group_of(config.pop("seeds", None), ckpt_path, root, algorithm, text)
        if group is not None:
            config["ckpt_path"] = None
        return group

    def _choose_seed(self, seed: int) -> None:
        self._seed = self.config["fit"]["seed_everything"] = seed

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the subcommand, once for each seed of a group."""
        if self.group is None:
            super()._run_subcommand(subcommand)
            return
        self.group.require_alike()
        rank_zero_only(self.group.write)()
        try:
            for seed in self.group.seeds:
                if seed != self._seed:
                    self._choose_seed(seed)
                    self._set_seed()
                    self.instantiate_classes()
                trainer: Any = self.trainer
                done = trainer.options.leave_no_rounds(self.group.finished().get(seed, {}))
                which = f"Seed {seed} of {', '.join(map(str, self.group.seeds))}"
                rank_zero_info(f"{which}{' is finished' if done else ''}: {self.group.run_dir(seed)}")
                with silenced(done):  # the advice to train longer is for a run of its own
                    super()._run_subcommand(subcommand)
                close_loggers(trainer.options.users_loggers())
                rank_zero_only(self.group.write_config)()  # which the run has accepted
        except BaseException:
            count, folder = len(self.group.finished()), self.group.folder
            rank_zero_info(
                f"{count} of {len(self.group.all_seeds)} runs are finished; the same command, or "
                f"`--ckpt_path {folder}`, goes on."
            )
            raise
        if trainer.fabric.is_global_zero:
            with silenced(trainer.options.quiet):
                self.group.print()

    def _parse_ckpt_path(self) -> None:
        """Do nothing: the engine reads checkpoints itself, with its own error messages."""

    def _add_instantiators(self) -> None:
        """Add functions that create the objects of all classes, so that errors name the class."""
        super()._add_instantiators()
        self.parser.add_instantiator(lambda kind, *args, **kwargs: kind(*args, **kwargs), object)

    def instantiate_classes(self) -> None:
        """Create the objects of the configuration; the parser's wrappers around our exceptions are removed."""
        try:
            super().instantiate_classes()
        except SparseFLError:
            raise
        except Exception as error:
            text, cause = str(error), _own_cause(error)
            of_group = cause is None or (isinstance(cause, NotCreated) and "Given value: Namespace(" in text)
            if of_group and text.startswith(("Does not validate", "Parser key")):
                cause = InvalidOption(short_message(_with_type(text, error)))  # which names the option as well
            if cause is None:
                raise
            raise cause from None
        self._check_links()

    def _check_links(self) -> None:
        """Refuse an option of the model that the user has set to another value than the data's, which replaces it."""
        for name in _OF_THE_DATA:
            given, known = self._given.get(name), getattr(self.datamodule, name, None)
            if None not in (given, known) and _as_list(given) != _as_list(known):
                raise InvalidOption(
                    f"`model.{name}` is {given!r}, but the data has {known!r}; leave the option out, since the "
                    "model takes it from the data."
                )

    def instantiate_trainer(self, **kwargs: Any) -> FederatedTrainer:  # type: ignore[override]
        """Create the trainer with the algorithm and the federation of the configuration."""
        groups = {name: self._get(self.config_init, name) for name in ("algorithm", "federation")}
        if getattr(self._parser(self.subcommand), "is_quiet", False):
            kwargs["quiet"] = True
        if self.group is not None and self._seed is not None:
            kwargs["run_dir"] = str(self.group.run_dir(self._seed))
        trainer: Any = super().instantiate_trainer(**groups, **kwargs)
        return trainer  # type: ignore[no-any-return]

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Make the model create a new optimizer for each client, which would otherwise share its state."""
        if not self.auto_configure_optimizers:
            return
        optimizer = self._get(self.config_init, "optimizer")
        scheduler = self._get(self.config_init, "lr_scheduler")
        if scheduler and not optimizer:
            name = scheduler["class_path"].rpartition(".")[2]
            raise InvalidOption(f"`lr_scheduler` is {name}, but `optimizer` is not set; expected both, or neither.")
        if not optimizer or "optimizer" not in self._parser(subcommand)._optimizers:
            return

        def configure_optimizers(module: LightningModule) -> Any:
            made = _create("optimizer", module.parameters(), optimizer)
            return LightningCLI.configure_optimizers(
                module, made, _create("lr_scheduler", made, scheduler) if scheduler else None
            )

        chosen = Namespace(optimizer=optimizer, lr_scheduler=scheduler)  # type: ignore[no-untyped-call]
        # compared when a run resumes
        configure_optimizers.configuration = vars(chosen.as_flat())  # type: ignore[attr-defined]
        if any(True for _ in self.model.parameters()):
            configure_optimizers(self.model)  # raises now what torch refuses, and not in the first client
        self.model.configure_optimizers = MethodType(configure_optimizers, self.model)


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _create(option: str, argument: Any, chosen: Any) -> Any:
    """Create an optimizer or a scheduler, and raise what it refuses as `InvalidOption`."""
    try:
        return instantiate_class(argument, chosen)
    except Exception as error:
        name = chosen["class_path"].rpartition(".")[2]
        raise InvalidOption(f"`{option}` is {name}, which cannot be created ({described(error)}).") from error


def _own_cause(error: BaseException | None) -> SparseFLError | None:
    """Return the exception of this package that led to another one, or None."""
    while error is not None and not isinstance(error, SparseFLError):
        error = error.__cause__ or error.__context__
    return error


def _with_type(text: str, error: BaseException) -> str:
    """Add the type of its cause to an error of the parser, which a function in the place of a class leaves out."""
    cause = error.__cause__
    if cause is None or isinstance(cause, SparseFLError):
        return text
    return text.replace(f"- {cause}\n", f"- {described(cause)}\n", 1)
