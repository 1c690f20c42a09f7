"""The parts of a run on one process, set up once and handed to a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_sparsefl.cost import Ledger
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.evaluation.scorer import Scorer
from lightning_sparsefl.federated.exchange.orders import Split
from lightning_sparsefl.federated.fleet import Fleet, LazyClientViews, sizes_fact
from lightning_sparsefl.federated.local.engines import local_engine
from lightning_sparsefl.federated.local.example_input import layers_of
from lightning_sparsefl.federated.local.isolation import isolate_metrics
from lightning_sparsefl.federated.local.node import Node, NodeOptions
from lightning_sparsefl.federated.local.wire_node import WireNode
from lightning_sparsefl.federated.local.worker import ClientWorker, LocalWork
from lightning_sparsefl.federated.rounds.cohort import RankCohort
from lightning_sparsefl.federated.rounds.coordinator import Coordinator
from lightning_sparsefl.federated.rounds.merge_policy import MergePolicy
from lightning_sparsefl.federated.rounds.run_options import RunOptions
from lightning_sparsefl.federated.rounds.server import About, Server
from lightning_sparsefl.federated.rounds.workload import Workload
from lightning_sparsefl.federated.sampling import split_unseen
from lightning_sparsefl.federated.storage.checkpoint import (
    CLIENTS,
    Checkpoint,
    as_checkpoint_error,
    identity,
    read_checkpoint,
)
from lightning_sparsefl.federated.storage.homed_records import HomedRecords
from lightning_sparsefl.federated.storage.memory_store import MemoryStore
from lightning_sparsefl.federated.storage.record_store import RecordStore
from lightning_sparsefl.federated.storage.resume import find_resume_point
from lightning_sparsefl.federated.storage.run_folder import RunFolder
from lightning_sparsefl.federated.storage.sqlite_store import SqliteStore
from lightning_sparsefl.seeds import seed_all
from lightning_sparsefl.types import Merged, Message, RunState, ServerState
from lightning_sparsefl.wire import Codec


class AboutClients:
    """Sizes and capacities of all clients, each found when it is asked for.

    Args:
        data: The clients' data.
        capacities: Capacity by client.
    """

    def __init__(self, data: Any, capacities: Any) -> None:
        self._data, self._capacities = data, capacities

    def __getitem__(self, client: int) -> About:
        return About(self._data.num_examples(client), self._capacities[client])


class Run:
    """Sets up the parts of a run: module, stores, node, server, coordinator, scorer.

    Args:
        options: Options of the run.
        ranks: Processes of the run, launched.
        module: The user's module.
        data: The clients' data.
        ckpt_path: A checkpoint to start from, ``last``, or None.
        split: Split to score; None = the data's `eval_split`, for a command that trains.

    Raises:
        InvalidOption: If module, data and options do not fit each other.
        CheckpointMismatch: If there is no checkpoint where one was asked for.
    """

    def __init__(
        self,
        options: RunOptions,
        ranks: Ranks,
        module: LightningModule,
        data: Any,
        ckpt_path: str | None,
        split: Split | None = None,
    ) -> None:
        self.options, self.ranks, self.module, self.data = options, ranks, module, data
        self.federation, self.algorithm = options.federation, options.algorithm
        default: Split = getattr(data, "eval_split", "val")
        self.split: Split = split or default
        self.folder: RunFolder | None = None
        root = Path(options.default_root_dir)
        self.resume_point = ranks.share(lambda: find_resume_point(ckpt_path, root, options.name, split is None))[0]
        seed_all(options.seed, "data")
        ranks.share(self._prepare_data)
        self._check_scoring()
        self._prepare_module()
        self.worker = self.worker_of(module)
        self.device, self.layout = self.worker.device, self.worker.flat.layout
        kind = {"ram": MemoryStore, "disk": SqliteStore}[self.federation.store]
        self.server_records: RecordStore = kind("server", ranks)
        self.node_records: RecordStore = kind("nodes", ranks, divided=True)
        self.workload = self._describe_workload()
        self.ledger = Ledger(counts_flops=self.workload.layers is not None)
        self._connect()
        self.identity = identity(self.algorithm, data.num_clients, self.layout)
        self.training = {"seed": options.seed, **self._training_facts()}

    # ---- set-up

    def _prepare_data(self) -> None:
        """Let local rank 0 download, then set up on all ranks; a failed download reaches the others' barrier too."""
        try:
            if self.ranks.fabric.local_rank == 0:
                self.data.prepare_data()
        finally:
            self.ranks.barrier()
        self.data.setup("fit")

    def _check_scoring(self) -> None:
        """Raise :class:`InvalidOption` now if the first evaluation would fail."""
        default = self.split == getattr(self.data, "eval_split", "val")
        hook, command = {"val": ("validation_step", "validate"), "test": ("test_step", "test")}[self.split]
        if not is_overridden(hook, self.module):
            name = type(self.module).__name__
            asked = f"`data.eval_split: {self.split}` scores clients with" if default else f"`{command}` calls"
            other = "define it, or set the other split" if default else "define it"
            raise InvalidOption(f"`{name}` has no `{hook}`, which {asked}; {other}.")
        self._require_set(self.split, "set `data.eval_split: test`" if default else "use `test` for the test sets")
        if self.options.validate_locally:
            self._require_set("val", "set `trainer.validate_locally: false`")

    def _require_set(self, split: Split, instead: str) -> None:
        if getattr(self.data, f"client_{split}_dataloader")(0) is None:
            more = f"set `data.val_fraction` above 0, or {instead}" if split == "val" else "set `data.eval_split: val`"
            raise InvalidOption(f"The data has no {split} set for a client; {more}.")

    def _prepare_module(self) -> None:
        """Adapt the module, put it on the device, and give all ranks the first rank's weights."""
        seed_all(self.options.seed, "setup")
        self.algorithm.adapt(self.module)
        self.place(self.module)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            self.ranks.broadcast(tensor)

    def place(self, module: LightningModule) -> None:
        """Put a module on this rank's device, at the run's precision.

        Args:
            module: The user's module, or a copy of it.
        """
        fabric = self.ranks.fabric
        fabric.strategy.precision.convert_module(module)  # before the worker makes its vector
        fabric.to_device(module)
        isolate_metrics(module)

    def worker_of(self, module: LightningModule) -> ClientWorker:
        """Return a worker for a module, with this run's data and local engine.

        Args:
            module: The user's module, or a copy of it.
        """
        options = self.options
        engine = local_engine(
            self.federation.local_engine, self.ranks.fabric, options.local, module, options.client_callbacks
        )
        work = LocalWork(
            options.client_callbacks, options.round_lr, options.validate_locally, self.federation.execution
        )
        return ClientWorker(module, self.data, engine, work, self.ranks.fabric.device)

    def _connect(self) -> None:
        """Connect the server's half with this rank's node."""
        options, federation, data = self.options, self.federation, self.data
        seed, num_clients = options.seed, data.num_clients
        training_clients, unseen_clients = split_unseen(seed, num_clients, federation.unseen_clients)
        about = AboutClients(data, federation.fleet_capacities(num_clients, seed))
        codec = Codec(self.worker.initial)
        self.server = Server(
            algorithm=self.algorithm,
            federation=federation,
            layout=self.layout,
            codec=codec,
            workload=self.workload,
            ledger=self.ledger,
            records=self.server_records,
            about=about,
            training_clients=training_clients,
            max_rounds=options.max_rounds,
            seed=seed,
            device=self.device,
        )
        self.visiting = HomedRecords(self.node_records, self.ranks)
        self.node = Node(
            self.algorithm,
            self.worker,
            self.visiting,
            codec,
            self.layout,
            self.worker.initial,
            self.device,
            NodeOptions(
                buffers=federation.buffers,
                clip_update=federation.clip_update,
                client_timeout=federation.client_timeout,
                finetune_epochs=federation.finetune_epochs,
                keep_masks=federation.wire == "encode",
            ),
            self.ranks.rank,
        )
        node = WireNode(self.node) if federation.wire == "encode" else self.node
        raises = federation.on_client_error == "raise"
        self.cohort = RankCohort(self.ranks, node, self.visiting, about, federation.placement, raises)
        merging = MergePolicy(self.algorithm, federation, self.layout, len(training_clients), seed)
        self.coordinator = Coordinator(self.server, self.cohort, merging)
        stores = (self.server_records, self.node_records)
        self.scorer = Scorer(self.coordinator, self.worker, unseen_clients, stores, self.split)

    def _describe_workload(self) -> Workload:
        options = self.options.local
        batch_size = getattr(self.data, "batch_size", None) or self.data.client_train_dataloader(0).batch_size or 1
        return Workload(
            layers=layers_of(self.module, self.data),
            epochs=options.max_epochs,
            batch_size=batch_size,
            max_batches=options.limit_train_batches,
            drop_last=getattr(self.data, "drop_last", False),
            buffers=self.layout.buffers,
            model=self.worker,
        )

    def _training_facts(self) -> dict[str, Any]:
        """Return further facts that the weights depend on, which a run that goes on must share."""
        options, federation = self.options, self.federation
        return {
            "client sizes": sizes_fact(self.data),
            "local epochs": options.local.max_epochs,
            "batch size": self.server.workload.batch_size,
            "clients per round": federation.clients_per_round,
            "buffers": federation.buffers,
            "reducer": None if federation.reducer is None else repr(federation.reducer),
            "clip_update": federation.clip_update,
            "privacy": None if federation.privacy is None else repr(federation.privacy),
            "unseen clients": federation.unseen_clients,
            "monitor": federation.monitor,
            "execution": federation.execution,
            "capacities": federation.capacities,
            "shuffled capacities": federation.shuffle_capacities,
            "wire": federation.wire,
            **({"max_rounds": options.max_rounds} if self.algorithm.fixed_length else {}),
            "round_lr": repr(options.round_lr),
        }

    # ---- state

    def start(self, training: bool = True) -> tuple[RunState, Checkpoint | None]:
        """Return the state to go on from, with its checkpoint if there is one.

        Args:
            training: Whether the run trains on, so that all that its results depend on must agree.
        """
        if self.resume_point.checkpoint is None:
            return RunState(self.algorithm.init(self.worker.initial, self._fleet())), None
        checkpoint = self.resume_point.read(lambda path: self._restore(path, training))
        with as_checkpoint_error(self.resume_point.checkpoint):
            self.scorer.restore(checkpoint.selected)
        return checkpoint.state, checkpoint

    def _restore(self, path: Path, training: bool) -> Checkpoint:
        """Read a checkpoint into the stores and the ledger, which keep their content if it is refused."""
        like = {**self.identity, "training": self.training if training else {}}
        checkpoint = read_checkpoint(path, self.layout, self.device, like, self.module.state_dict())
        moved, folder = self.resume_point.folder is None, path.parent / CLIENTS
        with as_checkpoint_error(path):
            self.server_records.load(checkpoint.server_records, folder, moved)
            self.node_records.load(checkpoint.node_records, folder, moved)
            self.ledger.load_state_dict(checkpoint.ledger)
            self.worker.restore_counters(checkpoint.module)
        return checkpoint

    def _fleet(self) -> Fleet:
        clients = self.server.training_clients
        return Fleet(
            LazyClientViews(clients, lambda i: self.server.view(i, 0)),
            self.layout.buffers,
            self.device,
            self.worker,
            survey=self._survey,
            clients_per_round=self.federation.clients_per_round,
            execution=self.federation.execution,
        )

    def _survey(self, message: Message) -> Merged:
        state = RunState(ServerState(round=0, weights=self.worker.initial))
        return self.coordinator.survey(state, self.server.training_clients, message)

    def module_state(self, state: RunState) -> dict[str, torch.Tensor]:
        """Return the module's ``state_dict`` with the global weights.

        Args:
            state: State of the run.
        """
        self.worker.load(state.server.weights)
        return dict(self.module.state_dict())
