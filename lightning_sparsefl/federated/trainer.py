"""The front door: a trainer that fits a federation."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from pdb import post_mortem
from typing import Any, Literal

from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_sparsefl.data import ClientDataModules
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Split
from lightning_sparsefl.federated.commands.export import Exported, ExportRequest, Format
from lightning_sparsefl.federated.commands.profile import Profile, profile
from lightning_sparsefl.federated.commands.replay import Replay
from lightning_sparsefl.federated.commands.run import Session, check_data, check_module
from lightning_sparsefl.federated.distributed.launcher import launch
from lightning_sparsefl.federated.distributed.ranks import Ranks, build_fabric, intra_op_threads
from lightning_sparsefl.federated.distributed.signals import Interrupted, exit_exception
from lightning_sparsefl.federated.local.engines import LocalOptions
from lightning_sparsefl.federated.local.round_lr import RoundLR
from lightning_sparsefl.federated.options import Federation
from lightning_sparsefl.federated.storage.atomic_files import load_plain
from lightning_sparsefl.federated.tracking.progress_bar import RoundProgressBar

ClientData = LightningDataModule | Sequence[LightningDataModule]
"""A data module that knows its clients, or one ordinary data module per client."""

Verb = Literal["fit", "validate", "test", "replay", "export"]
_ONE_PROCESS = {"num_nodes": 1, "strategy": "auto", "workers_per_device": 1}
_DOORS = (
    "num_clients",
    "num_examples",
    *(f"client_{split}_dataloader" for split in ("train", "val", "test")),
    "val_dataloader",
    "test_dataloader",
)
"""What the engine asks of client data."""


class FederatedTrainer:
    """Fits a `LightningModule` over many clients.

    Arguments with a name of ``lightning.pytorch.Trainer`` mean what they mean there; `max_epochs` are the local
    epochs of a round, and `callbacks` see rounds as epochs and clients as batches.

    Args:
        accelerator: As in `Trainer`.
        devices: As in `Trainer`; each device is one rank, which trains clients of its own, or
            `federation.workers_per_device` ranks.
        num_nodes: Machines.
        strategy: How ranks are started: ``auto``, ``client_parallel``, or that with ``_fork`` or ``_spawn``.
        precision: As in `Trainer`.
        max_rounds: Rounds of the run.
        max_epochs: Local epochs of a client in a round.
        check_val_every_n_round: Rounds between two evaluations; the last round is always evaluated.
        fast_dev_run: One round of two clients and one batch each, to see whether everything runs.
        default_root_dir: Where run folders are made.
        callbacks: Round-level callbacks.
        client_callbacks: Callbacks of local training, copied for each client.
        logger: As in `Trainer`; default: TensorBoard in the run folder.
        round_lr: Factor of all learning rates as a function of the round.
        limit_train_batches: As in `Trainer`, for each client.
        limit_val_batches: As in `Trainer`, for each client.
        limit_test_batches: As in `Trainer`, for each client.
        gradient_clip_val: As in `Trainer`.
        gradient_clip_algorithm: As in `Trainer`.
        accumulate_grad_batches: As in `Trainer`.
        validate_locally: Whether a client runs its validation loader after each local epoch, which schedulers and
            callbacks that monitor a validation metric need.
        enable_progress_bar: Whether to show the bar over rounds.
        num_threads: Intra-op threads of every rank; they are part of the result, so all ranks have the same number.
        timeout: Seconds that a rank waits for the others.
        algorithm: The federated method.
        federation: Who trains and what travels.
        seed: Of the run; default: what ``seed_everything`` set, else 0.

    Raises:
        InvalidOption: If an option cannot work.
        WorldSizeMismatch: If the launcher started another number of processes.

    Example::

        trainer = FederatedTrainer(algorithm=FedSpa(density=0.5), max_rounds=100)
        trainer.fit(module, datamodule)
    """

    def __init__(
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
        num_threads: int = 1,
        timeout: float = 1800.0,
        algorithm: FederatedAlgorithm,
        federation: Federation | None = None,
        seed: int | None = None,
    ) -> None:
        for name, value in (
            ("max_rounds", max_rounds),
            ("max_epochs", max_epochs),
            ("check_val_every_n_round", check_val_every_n_round),
            ("num_threads", num_threads),
        ):
            if not isinstance(value, int) or value < 1:
                raise InvalidOption(f"`trainer.{name}` is {value}; expected a whole number >= 1.")
        if timeout <= 0:
            raise InvalidOption(f"`trainer.timeout` is {timeout}; expected a number of seconds above 0.")
        if not isinstance(algorithm, FederatedAlgorithm):
            raise InvalidOption(
                f"`algorithm` is a {type(algorithm).__name__}; expected a method of `lightning_sparsefl.algorithms`, "
                "or your own `FederatedAlgorithm`."
            )
        self.algorithm, self.federation = algorithm, federation or Federation()
        self.max_rounds, self.check_val_every_n_round = max_rounds, check_val_every_n_round
        self.default_root_dir, self.logger_option, self.num_threads = default_root_dir, logger, num_threads
        self.round_lr, self.validate_locally, self.fast_dev_run = round_lr, validate_locally, fast_dev_run
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        self.callbacks, self.client_callbacks = _sorted_callbacks(_listed(callbacks), _listed(client_callbacks))
        if enable_progress_bar:
            self.callbacks.append(RoundProgressBar())
        self.local_options = LocalOptions(
            max_epochs=max_epochs,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm,
            accumulate_grad_batches=accumulate_grad_batches,
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            limit_test_batches=limit_test_batches,
            default_root_dir=default_root_dir,
        )
        self._processes: dict[str, Any] = {
            "accelerator": accelerator,
            "devices": devices,
            "num_nodes": num_nodes,
            "strategy": strategy,
            "precision": precision,
            "timeout": timeout,
            "workers_per_device": self.federation.workers_per_device,
        }
        self.fabric = build_fabric(**self._processes)
        self.run_folder: Path | None = None

    def fit(
        self,
        model: LightningModule,
        datamodule: ClientData | None = None,
        ckpt_path: str | None = None,
    ) -> dict[str, float]:
        """Train for `max_rounds` rounds.

        Args:
            model: The module that every client trains.
            datamodule: The clients' data.
            ckpt_path: A checkpoint to go on from, or ``last`` for the newest run of this algorithm: from its last
                good checkpoint, or from the beginning if it has none yet.

        Returns:
            The final table, as in `summary.json`.

        Raises:
            ClientFailed: If a client's local work fails and `federation.on_client_error` is ``raise``.
            CheckpointMismatch: If the checkpoint is damaged or of another run.
            DiskFull: If there is no space to write the run on.
            KeyboardInterrupt: After Ctrl-C, when the last finished round is committed.
            SystemExit: After SIGTERM, likewise.
            InvalidOption: If the module or the data cannot be trained like this.
        """
        summary: dict[str, float] = self._launch("fit", model, datamodule, ckpt_path)
        if self._in_other_processes and self.run_folder is not None:
            self.algorithm.adapt(model)  # as the other processes did with theirs
            model.load_state_dict(load_plain(self.run_folder / "checkpoints" / "last.ckpt")["state_dict"])
        return summary

    def validate(
        self,
        model: LightningModule,
        datamodule: ClientData | None = None,
        ckpt_path: str | None = None,
    ) -> dict[str, float]:
        """Score the global and the personal models on the validation sets.

        Args:
            model: The module.
            datamodule: The clients' data.
            ckpt_path: Of the run, or ``last``; default: the module's weights as they are, before round 0.
        """
        return dict(self._launch("validate", model, datamodule, ckpt_path))

    def test(
        self,
        model: LightningModule,
        datamodule: ClientData | None = None,
        ckpt_path: str | None = None,
    ) -> dict[str, float]:
        """Score the global and the personal models on the test sets.

        Args:
            model: The module.
            datamodule: The clients' data.
            ckpt_path: Of the run, or ``last``; default: the module's weights as they are, before round 0.
        """
        return dict(self._launch("test", model, datamodule, ckpt_path))

    def profile(
        self,
        model: LightningModule,
        datamodule: ClientData | None = None,
        ckpt_path: str | None = None,
        json: bool = False,
    ) -> Profile:
        """Count parameters, densities, FLOPs and bytes of the whole run without training and without the data.

        Args:
            model: The module.
            datamodule: Knows `sample_shape` and the nominal client sizes before its data is there.
            ckpt_path: Not read; accepted so that a run's own `config.yaml` can be profiled.
            json: Print JSON instead of tables.
        """
        del ckpt_path
        data = as_client_data(datamodule)
        check_data(data, self.federation)
        check_module(model)
        result = profile(self.algorithm, self.federation, model, data, self.local_options, self.max_rounds, self.seed)
        print(result.to_json()) if json else result.print()
        return result

    def replay(
        self,
        model: LightningModule,
        datamodule: ClientData | None = None,
        ckpt_path: str | None = None,
        *,
        client: int,
        round: int | None = None,
        pdb: bool = False,
    ) -> Replay:
        """Run one client's local fit again, bit for bit, in this process; nothing is written.

        The client gets the same message, seeds and memory as in the run, and no `federation.client_timeout`.

        Args:
            model: The module.
            datamodule: The clients' data.
            ckpt_path: Of the run, or ``last``; default: the module's weights as they are, before round 0.
            client: Number of the client.
            round: Of the fit; default: the one that the checkpoint stands before. For a later one, the rounds between
                are run again first.
            pdb: If the fit fails, open Python's debugger where it did.

        Returns:
            What the client received, and what it would send.

        Raises:
            ClientFailed: If the local fit fails.
            InvalidOption: If the client does not train in that round, or the round is not ahead of the checkpoint.
            CheckpointMismatch: If the checkpoint is of another run.
        """
        alone = copy.copy(self)
        alone.fabric = build_fabric(**self._processes | _ONE_PROCESS | {"devices": _first(self._processes["devices"])})
        alone.federation = replace(self.federation, on_client_error="raise", client_timeout=None)
        try:
            result: Replay = alone._launch("replay", model, datamodule, ckpt_path, client=client, round=round)
        except Exception as error:
            if pdb:
                print(error)
                post_mortem((error.__cause__ or error).__traceback__)
            raise
        return result

    def export(
        self,
        model: LightningModule,
        datamodule: ClientData | None = None,
        ckpt_path: str | None = None,
        client: int | None = None,
        out: str | None = None,
        formats: Sequence[Format] = ("ckpt", "safetensors"),
        check: bool = False,
    ) -> Exported:
        """Write the global model or a client's own as an ordinary Lightning checkpoint, safetensors and ONNX.

        Args:
            model: The module.
            datamodule: The clients' data.
            ckpt_path: Of the run; default: ``last``, the newest run of this algorithm.
            client: Number of the client whose personal model is written; default: the global model.
            out: Folder of the files; default: ``export/client-7``, or ``export/global``, in the run folder.
            formats: Some of ``ckpt``, ``safetensors`` and ``onnx``; the last needs the extra ``onnx``.
            check: Load each file into a fresh copy of the module, score it as the run does, and compare.

        Raises:
            CheckpointMismatch: If there is no run, or the checkpoint is of another one.
            InvalidOption: If there is no such client, or something cannot be written.
            ExportMismatch: If a file scores otherwise than the model in memory.
        """
        request = ExportRequest(copy.deepcopy(model), client, out, tuple(formats), check)
        request.require(as_client_data(datamodule).num_clients)
        exported: Exported = self._launch("export", model, datamodule, ckpt_path or "last", request=request)
        return exported

    @property
    def _in_other_processes(self) -> bool:
        """Whether fork or spawn does the work, so that this process's module is not the one that trains."""
        launcher = self.fabric.strategy.launcher
        return self.fabric.world_size > 1 and type(launcher).__name__ == "_MultiProcessingLauncher"

    def _launch(
        self,
        verb: Verb,
        model: LightningModule,
        data: ClientData | None,
        ckpt_path: str | None,
        **asked: Any,
    ) -> Any:
        client_data = as_client_data(data)
        if self.fabric.world_size > client_data.num_clients:
            raise InvalidOption(
                f"`trainer.devices`, `trainer.num_nodes` and `federation.workers_per_device` ask for "
                f"{self.fabric.world_size} ranks, but the data has {client_data.num_clients} clients; "
                "expected at most one rank per client."
            )
        settings = self._fast_dev_settings(client_data) if self.fast_dev_run else self
        check_data(client_data, settings.federation)
        check_module(model)
        result = launch(self.fabric, partial(_work, settings, verb, model, client_data, ckpt_path, asked))
        self.run_folder = None if result["folder"] is None else Path(result["folder"])
        if result["signal"] is not None:
            raise exit_exception(result["signal"], self._in_other_processes or self.fabric.is_global_zero)
        return result["summary"]

    def _fast_dev_settings(self, data: Any) -> FederatedTrainer:
        """This trainer, shrunk to one round of two clients and one batch each."""
        few = min(2, data.num_clients)
        small = copy.copy(self)
        small.max_rounds = 1
        small.federation = replace(self.federation, clients_per_round=few, min_clients=1, eval_clients=few)
        small.local_options = replace(
            self.local_options, max_epochs=1, limit_train_batches=1, limit_val_batches=1, limit_test_batches=1
        )
        return small


def _work(
    trainer: FederatedTrainer,
    verb: Verb,
    model: LightningModule,
    data: Any,
    ckpt_path: str | None,
    asked: dict[str, Any],
    fabric: Fabric,
) -> dict[str, Any]:
    """One process's part; what it returns is small and plain, since it may cross a pipe."""
    rank_zero_info(f"{fabric.world_size} rank(s), {trainer.num_threads} intra-op thread(s) each")
    split: dict[str, Split] = {"validate": "val", "test": "test", "export": getattr(data, "eval_split", "val")}
    with intra_op_threads(trainer.num_threads), isolate_rng():
        session = Session(trainer, Ranks(fabric), model, data, ckpt_path, split.get(verb))
        work: dict[Verb, Callable[..., Any]] = {"fit": session.fit, "replay": session.replay, "export": session.export}
        signal, summary = None, {}
        try:
            summary = work.get(verb, session.score)(**asked)
        except Interrupted as stop:
            signal = stop.number
    folder = None if session.folder is None else str(session.folder.path)
    return {"summary": summary, "folder": folder, "signal": signal}


def as_client_data(data: ClientData | None) -> Any:
    """A data module that knows its clients.

    Args:
        data: One, or a sequence of ordinary data modules, one per client.

    Raises:
        InvalidOption: If it is neither.
    """
    if isinstance(data, Sequence):
        strangers = [type(part).__name__ for part in data if not isinstance(part, LightningDataModule)]
        if strangers:
            raise InvalidOption(f"`data` lists a {strangers[0]}; expected one LightningDataModule per client.")
        data = ClientDataModules(list(data))
    missing = [name for name in _DOORS if not hasattr(data, name)]
    if missing:
        raise InvalidOption(
            f"`data` is a {type(data).__name__} without `{missing[0]}`; expected a `FederatedDataModule`, "
            "or a list with one LightningDataModule per client."
        )
    return data


def _first(devices: int | str | list[int]) -> int | list[int]:
    """One of the devices."""
    return devices[:1] if isinstance(devices, list) else 1


def _listed(callbacks: list[Callback] | Callback | None) -> list[Callback]:
    return [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])


def _sorted_callbacks(rounds: list[Callback], clients: list[Callback]) -> tuple[list[Callback], list[Callback]]:
    """Ours that stand in `callbacks`, where a recipe puts them, belong to the clients."""
    ours = [c for c in rounds if type(c).__module__.startswith("lightning_sparsefl.callbacks.")]
    if ours:
        names = ", ".join(type(callback).__name__ for callback in ours)
        rank_zero_info(f"{names} in `trainer.callbacks` works on clients: moved to `trainer.client_callbacks`.")
    return [callback for callback in rounds if callback not in ours], [*clients, *ours]
