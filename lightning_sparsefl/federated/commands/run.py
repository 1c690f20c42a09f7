"""The parts of a run on one process, set up once and handed to a command."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_sparsefl.cost import Ledger
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.commands.run_facts import reported_facts, training_facts
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.evaluation.scorer import Scorer
from lightning_sparsefl.federated.exchange.orders import Split
from lightning_sparsefl.federated.fleet import Fleet, LazyClientViews
from lightning_sparsefl.federated.local.engines import local_engine
from lightning_sparsefl.federated.local.example_input import layers_of
from lightning_sparsefl.federated.local.isolation import isolate_metrics
from lightning_sparsefl.federated.local.node import Node, NodeOptions
from lightning_sparsefl.federated.local.stacked.worker import StackedWorker
from lightning_sparsefl.federated.local.wire_node import WireNode
from lightning_sparsefl.federated.local.worker import ClientWorker, LocalWork
from lightning_sparsefl.federated.rounds.about import AboutClients
from lightning_sparsefl.federated.rounds.cohort import RankCohort
from lightning_sparsefl.federated.rounds.coordinator import Coordinator
from lightning_sparsefl.federated.rounds.merge_policy import MergePolicy
from lightning_sparsefl.federated.rounds.run_options import RunOptions
from lightning_sparsefl.federated.rounds.server import Server
from lightning_sparsefl.federated.rounds.workload import Workload
from lightning_sparsefl.federated.sampling.cohort_draw import CohortDraw
from lightning_sparsefl.federated.sampling.draws import split_unseen
from lightning_sparsefl.federated.sampling.samplers import Uniform
from lightning_sparsefl.federated.storage.checkpoint import (
    CLIENTS,
    Checkpoint,
    as_checkpoint_error,
    identity,
    read_checkpoint,
    report_changes,
)
from lightning_sparsefl.federated.storage.folder_lock import FolderLock
from lightning_sparsefl.federated.storage.homed_records import HomedRecords
from lightning_sparsefl.federated.storage.memory_store import MemoryStore
from lightning_sparsefl.federated.storage.record_store import RecordStore
from lightning_sparsefl.federated.storage.resume import ResumePoint, find_resume_point, lock_resume_point
from lightning_sparsefl.federated.storage.run_folder import RunFolder
from lightning_sparsefl.federated.storage.sqlite_store import SqliteStore
from lightning_sparsefl.federated.tracking.phase_progress import PhaseProgress
from lightning_sparsefl.federated.tracking.progress_bar import RoundProgressBar
from lightning_sparsefl.seeds import random_identifier, seed_all
from lightning_sparsefl.types import Merged, Message, RunState, ServerState
from lightning_sparsefl.wire import Codec


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
        self.sampler = options.federation.sampler or Uniform()
        default: Split = getattr(data, "eval_split", "val")
        self.split: Split = split or default
        self.folder: RunFolder | None = None
        root = Path(options.default_root_dir)
        self.lock: FolderLock | None = None
        self._find = partial(find_resume_point, ckpt_path, root, options.name, split is None, options.run_dir)
        self.resume_point = ranks.share(self._find)[0]  # raises now if there is nothing to resume
        seed_all(options.seed, "data")
        ranks.share(self._prepare_data)
        self._check_scoring()
        self._prepare_module()
        self.worker = self.worker_of(module)
        self.device, self.layout = self.worker.device, self.worker.flat.layout
        self.stack_size = self._stack_size()
        kind = {"ram": MemoryStore, "disk": SqliteStore}[self.federation.store]
        self.server_records: RecordStore = kind("server", ranks)
        self.node_records: RecordStore = kind("nodes", ranks, divided=True)
        self.workload = self._describe_workload()
        self.ledger = Ledger(counts_flops=self.workload.layers is not None)
        self._connect()
        self.phases = self._show_progress()
        self.identity = identity(self.algorithm, data.num_clients, self.layout)
        precision = str(ranks.fabric.strategy.precision.precision)
        self.training = training_facts(options, self.workload, data, precision, self.stack_size)
        self.reported = reported_facts(options, module, data)

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
        options, callbacks = self.options, [*self.options.client_callbacks, *self.sampler.callbacks()]
        engine = local_engine(self.federation.local_engine, self.ranks.fabric, options.local, module, callbacks)
        work = LocalWork(callbacks, options.round_lr, options.validate_locally, self.federation.execution)
        kind = StackedWorker if self.federation.local_engine == "stacked" else ClientWorker
        return kind(module, self.data, engine, work, self.ranks.fabric.device)

    def _stack_size(self) -> int:
        """Return the largest number of clients in a stack; 1 = clients train one after another."""
        worker, size, cohort = self.worker, self.federation.stack_size, self.federation.clients_per_round
        if not isinstance(worker, StackedWorker) or not worker.can_stack:
            return 1
        return worker.stack_size(cohort) if size == "auto" else size

    def _score_size(self, clients: int) -> int:
        """Return how many of a number of clients are scored together at most; 1 = one after another."""
        worker, size = self.worker, self.federation.stack_size
        if not isinstance(worker, StackedWorker) or not worker.can_stack:
            return 1
        return worker.score_size(clients) if size == "auto" else size

    def _connect(self) -> None:
        """Connect the server's half with this rank's node."""
        options, federation, data = self.options, self.federation, self.data
        seed, num_clients = options.seed, data.num_clients
        training_clients, unseen_clients = split_unseen(seed, num_clients, federation.unseen_clients)
        about = AboutClients(federation, data.num_examples, num_clients, seed)
        codec = Codec(self.worker.initial, self.algorithm.may_vote)
        merging = MergePolicy(self.algorithm, federation, self.layout, len(training_clients), self.sampler.late_merge())
        timed = federation.availability is not None
        secret = None if federation.privacy is None else lambda: merging.secret
        self.server = Server(
            algorithm=self.algorithm,
            federation=federation,
            layout=self.layout,
            codec=codec,
            workload=self.workload,
            ledger=self.ledger,
            records=self.server_records,
            about=about,
            sampler=CohortDraw(training_clients, federation.clients_per_round, seed, self.sampler, secret, timed),
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
        self.cohort = RankCohort(
            self.ranks,
            node,
            self.visiting,
            about,
            federation.placement,
            raises,
            self.stack_size,
            self._score_size,
        )
        self.coordinator = Coordinator(self.server, self.cohort, merging)
        stores = (self.server_records, self.node_records)
        self.scorer = Scorer(self.coordinator, self.worker, unseen_clients, stores, self.split)

    def _show_progress(self) -> PhaseProgress:
        """Let the progress bar watch the clients; return the progress of other work, which is hidden without a bar."""
        bar = next((each for each in self.options.callbacks if isinstance(each, RoundProgressBar)), None)
        if bar is None:
            return PhaseProgress(shown=False)
        if not self.ranks.first:
            bar.disable()
        self.cohort.watch = bar.on_client_end
        return bar.phases

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

    # ---- state

    def lock_folder(self) -> None:
        """Lock the folder that the run continues in, before its checkpoint is read."""
        self.resume_point = self.ranks.share(self._lock_folder if self.ranks.first else self._find)[0]

    def _lock_folder(self) -> ResumePoint:
        found, self.lock = lock_resume_point(self._find)
        return found

    def start(self, training: bool = True) -> tuple[RunState, Checkpoint | None]:
        """Return the state to go on from, with its checkpoint if there is one.

        Args:
            training: Whether the run trains on, so that all that its results depend on must agree.
        """
        if self.resume_point.notice:
            rank_zero_info(self.resume_point.notice)
        if self.resume_point.checkpoint is None:
            run = self._identify(self.ranks.share(random_identifier)[0])
            server = self.algorithm.init(self.worker.initial, self._fleet(run))
            return RunState(server, self.sampler.start(), run=run), None
        checkpoint = self.resume_point.read(lambda path: self._restore(path, training))
        with as_checkpoint_error(self.resume_point.checkpoint):
            self.scorer.restore(checkpoint.selected)
        if training:
            report_changes(self.resume_point.checkpoint, checkpoint.reported, self.reported)
        return checkpoint.state, checkpoint

    def _identify(self, run: str) -> str:
        """Give the stores the identifier of the run, and return it."""
        self.server_records.run = self.node_records.run = run
        return run

    def _restore(self, path: Path, training: bool) -> Checkpoint:
        """Read a checkpoint into the stores and the ledger, which keep their content if it is refused."""
        like = {**self.identity, "training": self.training if training else {}}
        checkpoint = read_checkpoint(path, self.layout, self.device, like, self.module.state_dict())
        self._identify(checkpoint.state.run)
        moved, folder = self.resume_point.folder is None, path.parent / CLIENTS
        with as_checkpoint_error(path):
            self.server_records.load(checkpoint.server_records, folder, moved)
            self.node_records.load(checkpoint.node_records, folder, moved)
            self.ledger.load_state_dict(checkpoint.ledger)
            self.worker.restore_counters(checkpoint.module)
        return checkpoint

    def _fleet(self, run: str) -> Fleet:
        clients = self.server.training_clients
        return Fleet(
            LazyClientViews(clients, lambda i: self.server.view(i, 0)),
            self.layout.buffers,
            self.device,
            self.worker,
            survey=lambda message: self._survey(run, message),
            clients_per_round=self.federation.clients_per_round,
            execution=self.federation.execution,
            batches=self.workload.batches,
            layers=self.workload.layers or (),
        )

    def _survey(self, run: str, message: Message) -> Merged:
        state = RunState(ServerState(round=0, weights=self.worker.initial), run=run)
        with self.cohort.interrupts:
            return self.coordinator.survey(state, self.server.training_clients, message)

    def module_state(self, state: RunState) -> dict[str, torch.Tensor]:
        """Return the module's ``state_dict`` with the global weights.

        Args:
            state: State of the run.
        """
        self.worker.load(state.server.weights)
        return dict(self.module.state_dict())
