"""The entry point: a trainer that fits a federation."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from pdb import post_mortem
from typing import Any, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import Logger

from lightning_sparsefl.errors import InvalidOption, is_number, is_whole, require, require_type
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.commands.callback_inputs import sorted_callbacks, with_bar
from lightning_sparsefl.federated.commands.cost_tables import Profile
from lightning_sparsefl.federated.commands.dispatch import Verb, dispatch, in_other_processes
from lightning_sparsefl.federated.commands.export import Exported, ExportRequest, Format
from lightning_sparsefl.federated.commands.inputs import (
    ClientData,
    as_client_data,
    check_data,
    check_module,
    make_layers,
)
from lightning_sparsefl.federated.commands.interruption_messages import kept_by_command
from lightning_sparsefl.federated.commands.profile import profile
from lightning_sparsefl.federated.commands.replay import Replay
from lightning_sparsefl.federated.distributed.fabric import build_fabric
from lightning_sparsefl.federated.local.local_options import LocalOptions
from lightning_sparsefl.federated.local.round_lr import RoundLR
from lightning_sparsefl.federated.options import Federation
from lightning_sparsefl.federated.rounds.run_options import RunOptions
from lightning_sparsefl.federated.storage.resume import NEWEST
from lightning_sparsefl.federated.storage.safe_load import load_plain
from lightning_sparsefl.report import silenced
from lightning_sparsefl.seeds import seed_from_environment

_LONGEST = 1e9
"""Largest time limit in seconds, about 30 years; a duration of Python holds little more."""


class FederatedTrainer:  # long because LightningCLI reads every option from its signature and docstring
    """Trainer that fits a `LightningModule` in a federation of clients.

    Arguments of ``lightning.pytorch.Trainer`` have the same meaning here; `max_epochs` is the number of local epochs
    in a round, and for `callbacks` a round is an epoch and a client is a batch.

    Args:
        accelerator: Accelerator, one of the values of `Trainer`.
        devices: Devices, one of the values of `Trainer`. Each device has `federation.workers_per_device` ranks, which
            train different clients.
        num_nodes: Number of machines; ignored under torchrun, whose machines may come and go.
        strategy: Strategy that starts the ranks: ``auto``, ``client_parallel``, ``client_parallel_fork`` or
            ``client_parallel_spawn``.
        precision: Precision, one of the values of `Trainer`.
        max_rounds: Number of rounds of the run.
        max_epochs: Number of local epochs of a client in a round.
        check_val_every_n_round: Number of rounds between two evaluations; the last round is always evaluated.
        fast_dev_run: Whether to run only one round of two clients with one batch each, as a quick test.
        default_root_dir: Folder of all run folders.
        run_dir: Folder of the run; a run that was stopped there goes on. Default: a new folder in `default_root_dir`.
        callbacks: Round-level callbacks.
        client_callbacks: Callbacks of local training, copied for each client.
        logger: Loggers, one of the values of `Trainer`. Default: TensorBoard in the run folder.
        round_lr: Schedule of the learning rates over rounds.
        limit_train_batches: Number (int) or fraction (float) of the training batches of each client.
        limit_val_batches: Number (int) or fraction (float) of the validation batches of each client.
        limit_test_batches: Number (int) or fraction (float) of the test batches of each client.
        gradient_clip_val: Value at which gradients are clipped. Default: no clipping.
        gradient_clip_algorithm: Clipping by ``norm`` or by ``value``. Default: ``norm``.
        accumulate_grad_batches: Number of batches whose gradients are accumulated for one optimizer step.
        validate_locally: Whether to run a client's validation loader after each local epoch, as needed by schedulers
            and callbacks that monitor a validation metric.
        enable_progress_bar: Whether to show the progress over rounds: a bar in a terminal or notebook, elsewhere a line
            for each evaluated round.
        quiet: Whether to print no progress, tables and notes; warnings and errors are still shown.
        num_threads: Number of intra-op threads of every rank; results depend on it.
        deterministic: Whether torch uses deterministic algorithms only, so that a run on a GPU can be repeated.
            ``warn``: operations without a deterministic algorithm are used, too, with a warning.
        timeout: Time that a rank waits for the others, in seconds.
        algorithm: Federated method.
        federation: Options of the federation. Default: ``Federation()``.
        seed: Random seed of the run. Default: the seed of ``seed_everything``, else 0.

    Raises:
        InvalidOption: If an option is not valid.
        WorldSizeMismatch: If the launcher started a different number of processes.

    Example::

        trainer = FederatedTrainer(algorithm=FedSpa(density=0.5), max_rounds=100)
        trainer.fit(module, datamodule)
    """

    def __init__(  # above 60 lines for its arguments, which it only sorts into options
        self,
        *,
        accelerator: str = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        strategy: str = "auto",
        precision: str | int | None = "32-true",
        max_rounds: int = 100,
        max_epochs: int = 1,
        check_val_every_n_round: int = 1,
        fast_dev_run: bool = False,
        default_root_dir: str = "runs",
        callbacks: list[Callback] | Callback | None = None,
        client_callbacks: list[Callback] | Callback | None = None,
        logger: Logger | list[Logger] | bool | None = None,
        round_lr: RoundLR | None = None,
        limit_train_batches: int | float = 1.0,
        limit_val_batches: int | float = 1.0,
        limit_test_batches: int | float = 1.0,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] | None = None,
        accumulate_grad_batches: int = 1,
        validate_locally: bool = False,
        enable_progress_bar: bool = True,
        quiet: bool = False,
        num_threads: int = 1,
        deterministic: bool | Literal["warn"] = False,
        timeout: float = 1800.0,
        algorithm: FederatedAlgorithm,
        federation: Federation | None = None,
        seed: int | None = None,
        run_dir: str | None = None,
    ) -> None:
        for name, value in (
            ("max_rounds", max_rounds),
            ("max_epochs", max_epochs),
            ("check_val_every_n_round", check_val_every_n_round),
            ("num_threads", num_threads),
            ("num_nodes", num_nodes),
        ):
            require(is_whole(value, 1), f"trainer.{name}", value, "a whole number >= 1")
        known = deterministic in (True, False, "warn")
        require(known, "trainer.deterministic", deterministic, "True, False or 'warn'")
        fits = is_number(timeout) and 0 < timeout <= _LONGEST
        require(fits, "trainer.timeout", timeout, f"a number of seconds in (0, {_LONGEST:g}]")
        require(seed is None or is_whole(seed, 0), "seed_everything", seed, "a whole number >= 0")
        if not isinstance(algorithm, FederatedAlgorithm):
            raise _not_a_method(algorithm)
        require_type("federation", federation, Federation | None)
        require_type("trainer.default_root_dir", default_root_dir, str | PathLike)
        require_type("trainer.run_dir", run_dir, str | PathLike | None)
        root = os.path.expanduser(default_root_dir)
        listed = _listed("callbacks", callbacks, Callback), _listed("client_callbacks", client_callbacks, Callback)
        rounds, clients = sorted_callbacks(*listed)
        _listed("logger", None if isinstance(logger, bool) else logger, Logger)
        self.options = RunOptions(
            algorithm=algorithm,
            federation=Federation() if federation is None else federation,
            local=LocalOptions(
                max_epochs=max_epochs,
                gradient_clip_val=gradient_clip_val,
                gradient_clip_algorithm=gradient_clip_algorithm,
                accumulate_grad_batches=accumulate_grad_batches,
                limit_train_batches=limit_train_batches,
                limit_val_batches=limit_val_batches,
                limit_test_batches=limit_test_batches,
                default_root_dir=root,
            ),
            max_rounds=max_rounds,
            check_val_every_n_round=check_val_every_n_round,
            default_root_dir=root,
            run_dir=None if run_dir is None else Path(os.path.expanduser(run_dir)),
            callbacks=with_bar(rounds) if enable_progress_bar and not quiet else rounds,
            client_callbacks=clients,
            logger=logger,
            round_lr=round_lr,
            validate_locally=validate_locally,
            fast_dev_run=fast_dev_run,
            seed=seed_from_environment() if seed is None else seed,
            quiet=quiet,
            num_threads=num_threads,
            deterministic=deterministic,
        )
        self._processes: dict[str, Any] = {
            "accelerator": accelerator,
            "devices": devices,
            "num_nodes": num_nodes,
            "strategy": strategy,
            "precision": precision,
            "timeout": timeout,
            "workers_per_device": self.options.federation.workers_per_device,
        }
        self.fabric = build_fabric(**self._processes)
        self.run_folder: Path | None = None

    @property
    def log_dir(self) -> str | None:
        """Path of the run folder, under the name that Lightning's trainer has for it; None before a run."""
        return None if self.run_folder is None else str(self.run_folder)

    @property
    def algorithm(self) -> FederatedAlgorithm:
        """The federated method."""
        return self.options.algorithm

    @property
    def federation(self) -> Federation:
        """Options of the federation."""
        return self.options.federation

    @property
    def max_rounds(self) -> int:
        """Number of rounds of the run."""
        return self.options.max_rounds

    @property
    def seed(self) -> int:
        """Random seed of the run."""
        return self.options.seed

    @property
    def callbacks(self) -> Sequence[Callback]:
        """Round-level callbacks."""
        return self.options.callbacks

    @property
    def client_callbacks(self) -> Sequence[Callback]:
        """Callbacks of local training, copied for each client."""
        return self.options.client_callbacks

    def fit(
        self,
        model: LightningModule,
        datamodule: ClientData | None = None,
        ckpt_path: str | None = None,
    ) -> dict[str, float]:
        """Train for `max_rounds` rounds.

        Args:
            model: Module that every client trains.
            datamodule: Data of the clients.
            ckpt_path: Checkpoint or run folder to resume from, or ``last`` for the newest run of this algorithm: from
                its last readable checkpoint, or from the start if it has none. A run that has ended, by `max_rounds` or
                by a callback that is still there, is not trained further in its folder. ``auto`` starts a new run where
                ``last`` finds nothing, for launchers that repeat a command. Default: a new run.

        Returns:
            The final scores, totals and counts: all numbers of `summary.json`, without its texts.

        Raises:
            ClientFailed: If a client's local work fails and `federation.on_client_error` is ``raise``.
            CheckpointMismatch: If the checkpoint is damaged or belongs to a different run.
            DiskFull: If there is no disk space for the run.
            KeyboardInterrupt: After Ctrl-C, once the last finished round is committed.
            SystemExit: After SIGTERM, once the last finished round is committed.
            InvalidOption: If the module or the data does not support the options.
        """
        summary: dict[str, Any] = self._dispatch("fit", model, datamodule, ckpt_path)
        if in_other_processes(self.fabric) and self.run_folder is not None:
            self.algorithm.adapt(model)  # as in the other processes, and at their precision
            self.fabric.strategy.precision.convert_module(model)
            model.load_state_dict(load_plain(self.run_folder / "checkpoints" / "last.ckpt")["state_dict"])
        return {name: value for name, value in summary.items() if isinstance(value, int | float)}

    def validate(
        self,
        model: LightningModule,
        datamodule: ClientData | None = None,
        ckpt_path: str | None = None,
    ) -> dict[str, float]:
        """Evaluate the global and the personal models on the validation sets, and return the scores.

        Args:
            model: Module of the run.
            datamodule: Data of the clients.
            ckpt_path: Checkpoint or folder of the run, or ``last``. Default: the run in `run_dir`, whose weights are
                loaded, or else the current weights of the module.
        """
        return dict(self._dispatch("validate", model, datamodule, ckpt_path))

    def test(
        self,
        model: LightningModule,
        datamodule: ClientData | None = None,
        ckpt_path: str | None = None,
    ) -> dict[str, float]:
        """Evaluate the global and the personal models on the test sets, and return the scores.

        Args:
            model: Module of the run.
            datamodule: Data of the clients.
            ckpt_path: Checkpoint or folder of the run, or ``last``. Default: the run in `run_dir`, whose weights are
                loaded, or else the current weights of the module.
        """
        return dict(self._dispatch("test", model, datamodule, ckpt_path))

    def profile(
        self,
        model: LightningModule,
        datamodule: ClientData | None = None,
        ckpt_path: str | None = None,
        json: bool = False,
    ) -> Profile:
        """Estimate parameters, densities, FLOPs and bytes of the whole run without training and without the data.

        Args:
            model: Module of the run.
            datamodule: Data module with `sample_shape`, `batch_size` and `client_sizes`; its data need not be on disk.
            ckpt_path: Checkpoint or folder of the run. On the command line, its configuration is used if no other is
                given; nothing else is read, so that the `config.yaml` of a resumed run can be profiled.
            json: Whether to print JSON instead of tables.
        """
        del ckpt_path
        data = as_client_data(datamodule)
        check_data(data, self.federation)
        make_layers(model, self.seed)
        check_module(model)
        try:
            result = profile(self.options, model, data, self.fabric.strategy.precision)
        except KeyboardInterrupt:
            rank_zero_info(f"SIGINT: {kept_by_command('profile', None)}")
            raise
        with silenced(self._is_silent()):
            print(result.to_json()) if json else result.print()
        return result

    def replay(
        self,
        model: LightningModule,
        datamodule: ClientData | None = None,
        ckpt_path: str | None = None,
        *,
        client: int | str,
        round: int | None = None,
        pdb: bool = False,
    ) -> Replay:
        """Repeat one client's local fit with bit-equal results in this process, without writing files.

        The client gets the same message, seeds and memory as in the run, but no `federation.client_timeout`.

        Args:
            model: Module of the run.
            datamodule: Data of the clients.
            ckpt_path: Checkpoint or folder of the run, or ``last``. Default: the run in `run_dir`, whose weights are
                loaded, or else the current weights of the module.
            client: Number of the client, or its name in `names.csv`, unless that is a number too.
            round: Index of the round, from 0. Default: the round after the checkpoint, or the last one of a finished
                run, which must have committed twice. For a later round, the rounds in between are repeated first; an
                earlier one starts from the previous checkpoint of the run.
            pdb: Whether to open Python's debugger at the error if the fit fails.

        Returns:
            The message that the client received and the update that it would send.

        Raises:
            ClientFailed: If the local fit fails.
            InvalidOption: If the client does not train in that round, or the round is before the checkpoint.
            CheckpointMismatch: If the checkpoint belongs to a different run.
        """
        one = {
            "num_nodes": 1,
            "strategy": "auto",
            "workers_per_device": 1,
            "devices": _first(self._processes["devices"]),
        }
        limit = self.federation.client_timeout and _LONGEST  # with a time limit, clients train one after another
        federation = replace(self.federation, client_timeout=limit)
        options = replace(self.options, federation=federation, quiet=self._is_silent())
        if ckpt_path not in (None, *NEWEST):  # of any run, not only of the one in `run_dir`
            options = replace(options, run_dir=None)
        fabric = build_fabric(**self._processes | one)
        try:
            data = as_client_data(datamodule)
            done = dispatch(options, fabric, "replay", model, data, ckpt_path, client=client, round=round)
        except Exception as error:
            if pdb:
                print(error)
                post_mortem((error.__cause__ or error).__traceback__)
            raise
        if done.stop is not None:
            raise done.stop
        replayed: Replay = done.result
        return replayed

    def export(
        self,
        model: LightningModule,
        datamodule: ClientData | None = None,
        ckpt_path: str | None = None,
        client: int | str | None = None,
        out: str | None = None,
        formats: Sequence[Format] = ("ckpt", "safetensors"),
        check: bool = False,
    ) -> Exported:
        """Export the global model or a client's personal model as Lightning checkpoint, safetensors and ONNX.

        Args:
            model: Module of the run.
            datamodule: Data of the clients.
            ckpt_path: Checkpoint or folder of the run. Default: ``last``, the newest run of this algorithm.
            client: Number of the client whose personal model is exported, or its name in `names.csv`, unless that is
                a number too. Default: the global model; a method that has none, such as `DisPFL`, requires a client.
            out: Folder of the files. Default: ``export/global``, or for example ``export/client-7``, in the run folder.
            formats: Formats of the files: ``ckpt``, ``safetensors`` and ``onnx``, which needs the extra ``onnx``.
            check: Whether to load each file into a new copy of the module, evaluate it as the run does, and compare.

        Returns:
            The paths of the files and, with `check`, their scores.

        Raises:
            CheckpointMismatch: If there is no run, or the checkpoint belongs to a different one.
            InvalidOption: If there is no such client or no global model, or a file cannot be written.
            ExportMismatch: If the scores of a file differ from those of the model in memory.
        """
        make_layers(model, self.seed)
        request = ExportRequest(copy.deepcopy(model), client, out, formats, check)
        request.require(self.algorithm, as_client_data(datamodule).num_clients)
        exported: Exported = self._dispatch("export", model, datamodule, ckpt_path or "last", request=request)
        return exported

    def _is_silent(self) -> bool:
        """Return whether this process prints no tables, since the run is quiet or another process of it prints."""
        return self.options.quiet or not self.fabric.is_global_zero

    def _dispatch(
        self, verb: Verb, model: LightningModule, data: ClientData | None, ckpt_path: str | None, **asked: Any
    ) -> Any:
        require_type("ckpt_path", ckpt_path, str | PathLike | None)
        ckpt_path = None if ckpt_path is None else str(ckpt_path)
        client_data = as_client_data(data)
        done = dispatch(self.options, self.fabric, verb, model, client_data, ckpt_path, **asked)
        self.run_folder = done.folder or self.run_folder
        if done.stop is not None:
            raise done.stop
        return done.result


def _first(devices: int | str | list[int]) -> int | list[int]:
    """Return the first of the devices."""
    return devices[:1] if isinstance(devices, list) else 1


def _not_a_method(value: object) -> InvalidOption:
    given, example = f"of type {type(value).__name__}", ""
    if isinstance(value, type):
        given, example = f"the class `{value.__name__}`", f", such as `{value.__name__}()`"
    return InvalidOption(
        f"`algorithm` is {given}; expected a method of `lightning_sparsefl.algorithms`, or another "
        f"`FederatedAlgorithm`{example}."
    )


def _listed(option: str, values: Iterable[Any] | Any | None, kind: type[Any]) -> list[Any]:
    """Return one or several objects of Lightning as a list.

    Args:
        option: Name of the option.
        values: The objects.
        kind: Class of the objects.
    """
    several = isinstance(values, Iterable) and not isinstance(values, str)
    listed = [] if values is None else list(values) if several else [values]
    for value in listed:
        expected = f"{kind.__name__.lower()}s of Lightning"
        require(isinstance(value, kind), f"trainer.{option}", value, expected)
    return listed
