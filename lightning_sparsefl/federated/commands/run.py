"""The parts of a run on one process, set up once and handed to a command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage

from lightning_sparsefl.cost import Ledger
from lightning_sparsefl.data import ClientDataModules
from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.aggregation.server_optimizer import require_no_moments
from lightning_sparsefl.federated.commands.node_side import NodeSide
from lightning_sparsefl.federated.commands.run_facts import (
    SIZES,
    STACK_SIZE,
    identity,
    report_other_samples,
    reported_facts,
    require_equal_stacks,
    training_facts,
)
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.evaluation.scorer import Scorer
from lightning_sparsefl.federated.exchange.hook_results import check_plain, check_state
from lightning_sparsefl.federated.exchange.orders import Split
from lightning_sparsefl.federated.fleet import Fleet, LazyClientViews
from lightning_sparsefl.federated.local.example_input import layers_of
from lightning_sparsefl.federated.local.fast.batches import num_batches
from lightning_sparsefl.federated.local.node import Node
from lightning_sparsefl.federated.local.stacked.worker import StackedWorker
from lightning_sparsefl.federated.local.wire_node import WireNode
from lightning_sparsefl.federated.local.worker import require_batches
from lightning_sparsefl.federated.rounds.about import AboutClients
from lightning_sparsefl.federated.rounds.cohort import Cohort, RankCohort
from lightning_sparsefl.federated.rounds.coordinator import Coordinator
from lightning_sparsefl.federated.rounds.merge_policy import MergePolicy
from lightning_sparsefl.federated.rounds.run_options import RunOptions
from lightning_sparsefl.federated.rounds.server import Server
from lightning_sparsefl.federated.rounds.workload import Workload
from lightning_sparsefl.federated.sampling.cohort_draw import CohortDraw
from lightning_sparsefl.federated.sampling.draws import evaluated_clients, split_unseen
from lightning_sparsefl.federated.sampling.samplers import Uniform
from lightning_sparsefl.federated.storage.checkpoint import (
    CLIENTS,
    Checkpoint,
    as_checkpoint_error,
    read_checkpoint,
    report_changes,
)
from lightning_sparsefl.federated.storage.folder_lock import FolderLock
from lightning_sparsefl.federated.storage.homed_records import HomedRecords
from lightning_sparsefl.federated.storage.initial_weights import InitialWeights
from lightning_sparsefl.federated.storage.memory_store import MemoryStore
from lightning_sparsefl.federated.storage.record_store import RecordStore
from lightning_sparsefl.federated.storage.resume import ResumePoint, find_resume_point, lock_resume_point
from lightning_sparsefl.federated.storage.run_folder import RunFolder
from lightning_sparsefl.federated.storage.sqlite_store import SqliteStore
from lightning_sparsefl.federated.tracking.phase_progress import PhaseProgress
from lightning_sparsefl.federated.tracking.progress_bar import RoundProgressBar
from lightning_sparsefl.federated.tracking.run_loggers import runs_of_loggers
from lightning_sparsefl.seeds import random_identifier
from lightning_sparsefl.types import Merged, Message, RunState, ServerState


class Run(NodeSide):
    """Sets up the parts of a run: module, stores, node, server, coordinator, scorer.

    Args:
        options: Options of the run.
        ranks: Processes of the run, launched.
        module: The user's module.
        data: The clients' data.
        ckpt_path: A checkpoint to start from, ``last``, or None.
        split: Split to score; None = the data's `eval_split`, for a command that trains.
        connect: Function that makes the cohort of clients elsewhere; None = the processes of the run are the nodes.

    Raises:
        InvalidOption: If module, data and options do not fit each other.
        CheckpointMismatch: If there is no checkpoint where one was asked for.
    """

    trains_cohorts = True
    node: Node
    """This process's node; a run that is connected to other nodes has none."""
    visiting: HomedRecords
    """Records that the node works with."""

    def __init__(
        self,
        options: RunOptions,
        ranks: Ranks,
        module: LightningModule,
        data: Any,
        ckpt_path: str | None,
        split: Split | None = None,
        connect: Callable[[Run], Cohort] | None = None,
    ) -> None:
        self.sampler = options.federation.sampler or Uniform()
        self.folder: RunFolder | None = None
        self.has_begun = False  # rounds of a fit, which say themselves what a signal leaves
        root = Path(options.default_root_dir)
        self.lock: FolderLock | None = None
        logged = partial(runs_of_loggers, options.users_loggers(), options.name)
        self._find = partial(find_resume_point, ckpt_path, root, options.name, split is None, options.run_dir, logged)
        self.resume_point = ranks.share(self._find)[0]  # raises now if there is nothing to resume
        super().__init__(options, ranks, module, data, split, None if connect is not None else 0)
        self._make_cohort, self._is_data_here = connect or Run._cohort_here, connect is None
        kind = {"ram": MemoryStore, "disk": SqliteStore}[self.federation.store]
        self.server_records: RecordStore = kind("server", ranks)
        self.node_records: RecordStore = kind("nodes", ranks, divided=True)
        self.initial = InitialWeights(self.worker.initial, self.layout)
        self.workload = self._describe_workload()
        self.ledger = Ledger(counts_flops=self.workload.layers is not None)
        self._connect()
        self.phases = self._show_progress()
        self.identity = identity(self.algorithm, data.num_clients, self.layout)
        precision = str(ranks.fabric.strategy.precision.precision)
        self.training = training_facts(options, self.workload, data, precision, self.stack_size)
        self.reported = reported_facts(options, module, data)

    # ---- set-up

    def _connect(self) -> None:
        """Connect the server's half with the nodes."""
        options, federation, data = self.options, self.federation, self.data
        seed, num_clients = options.seed, data.num_clients
        training_clients, unseen_clients = split_unseen(seed, num_clients, federation.unseen_clients)
        self.about = AboutClients(federation, data.num_examples, num_clients, seed)
        merging = MergePolicy(self.algorithm, federation, self.layout, len(training_clients), self.sampler.late_merge())
        timed = federation.availability is not None
        secret = None if federation.privacy is None else lambda: merging.secret
        self.server = Server(
            algorithm=self.algorithm,
            federation=federation,
            layout=self.layout,
            codec=self.codec,
            workload=self.workload,
            ledger=self.ledger,
            records=self.server_records,
            about=self.about,
            sampler=CohortDraw(training_clients, federation.clients_per_round, seed, self.sampler, secret, timed),
            max_rounds=options.max_rounds,
            seed=seed,
            device=self.device,
        )
        self.cohort = self._make_cohort(self)
        self.coordinator = Coordinator(self.server, self.cohort, merging, options.round_lr)
        stores = (self.server_records, self.node_records)
        self.scorer = Scorer(self.coordinator, self.worker, unseen_clients, stores, self.split)

    def _scored_clients(self, client: int) -> Iterable[int]:
        """Return one client, or with a data module for each client all that are scored."""
        if not isinstance(self.data, ClientDataModules):
            return super()._scored_clients(client)
        seed, federation = self.options.seed, self.federation
        groups = split_unseen(seed, self.data.num_clients, federation.unseen_clients)
        return [each for group in groups for each in evaluated_clients(seed, group, federation.eval_clients)]

    def _cohort_here(self) -> RankCohort:
        """Make this rank's node, and the cohort of the nodes of all ranks."""
        federation, encodes = self.federation, self.federation.wire == "encode"
        self.visiting = HomedRecords(self.node_records, self.ranks)
        self.node = self.make_node(self.visiting, keep_masks=encodes)
        node = WireNode(self.node) if encodes else self.node
        raises = federation.on_client_error == "raise"
        return RankCohort(
            self.ranks,
            node,
            self.visiting,
            self.about,
            federation.placement,
            raises,
            self.stack_size,
            self._score_size,
        )

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
        batch_size = getattr(self.data, "batch_size", None)
        batch_size = batch_size or getattr(self.data.client_train_dataloader(0), "batch_size", None) or 1
        return Workload(
            layers=layers_of(self.module, self.data),
            epochs=options.max_epochs,
            batch_size=batch_size,
            max_batches=options.limit_train_batches,
            drop_last=getattr(self.data, "drop_last", False),
            buffers=self.layout.buffers,
            model=self.worker,
            own=getattr(self.data, "own_batches", {}),
        )

    def require_batches(self) -> None:
        """Check that each client that trains has a batch, so that no run ends where it first draws one without.

        Raises:
            InvalidOption: If a client has fewer samples than a full batch, or its batches are limited to less than one.
        """
        limit, workload = self.options.local.limit_train_batches, self.workload
        may_lack = workload.drop_last or workload.own or (isinstance(limit, float) and 0 < limit < 1)
        clients = self.server.training_clients if may_lack and self._is_data_here else ()
        for client in sorted(clients, key=self.data.num_examples):  # what suits the smallest suits all
            samples = self.data.num_examples(client)
            if limit and workload.samples(client, samples) == 0:  # unless its sampler draws more samples than it has
                batches = require_batches(self.data.client_train_dataloader(client), client, samples)
                if batches is not None:
                    num_batches(RunningStage.TRAINING, batches, limit)

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
            first = self.layout.tree(self.worker.initial.vector.clone())  # a method may change its state in place
            server = self.algorithm.init(first, self._fleet(run))
            server = check_state(self.algorithm, "init", server, self.layout)
            require_no_moments(server, type(self.algorithm).__name__)
            sampler = self.sampler.start()
            check_plain(self.sampler, "start", sampler)
            return RunState(server, sampler, run=run), None
        checkpoint = self.resume_point.read(lambda path: self._restore_on_all(path, training))
        with as_checkpoint_error(self.resume_point.checkpoint):
            self.scorer.restore(checkpoint.selected)
        path = self.resume_point.checkpoint
        if training:
            report_changes(path, checkpoint.reported, self.reported)
        else:
            report_other_samples(path, checkpoint.reported, self.reported)
        return checkpoint.state, checkpoint

    def _identify(self, run: str) -> str:
        """Give the stores the identifier of the run, and return it."""
        self.server_records.run = self.node_records.run = run
        return run

    def _restore_on_all(self, path: Path, training: bool) -> Checkpoint:
        """Read a checkpoint on all ranks, or on none: a rank may refuse a file of records that no other rank reads."""
        outcome: list[Checkpoint | CheckpointMismatch] = []

        def attempt() -> str:
            try:
                outcome.append(self._restore(path, training))
            except CheckpointMismatch as refused:
                outcome.append(refused)
            return str(outcome[0]) if isinstance(outcome[0], CheckpointMismatch) else ""

        refusals = self.ranks.share(attempt)
        if isinstance(outcome[0], CheckpointMismatch):
            raise outcome[0]
        for refused in filter(None, refusals):
            raise CheckpointMismatch(refused)
        return outcome[0]

    def _restore(self, path: Path, training: bool) -> Checkpoint:
        """Read a checkpoint into the stores and the ledger, which keep their content if it is refused."""
        facts = {name: fact for name, fact in self.training.items() if training and name != STACK_SIZE}
        facts[SIZES] = self.training[SIZES]  # other sizes are of other clients, whose models nobody has trained
        like = {**self.identity, "training": facts}
        checkpoint = read_checkpoint(path, self.layout, self.device, like, self.module.state_dict())
        if training:
            self._agree_on_stacks(path, checkpoint.training)
        self._identify(checkpoint.state.run)
        self.initial.restore(path, checkpoint.initial, checkpoint.initial_weights)
        moved, folder = self.resume_point.folder is None, path.parent / CLIENTS
        with as_checkpoint_error(path):
            self.server_records.load(checkpoint.server_records, folder, moved)
            self.node_records.load(checkpoint.node_records, folder, moved)
            self.ledger.load_state_dict(checkpoint.ledger)
            self.worker.restore_counters(checkpoint.module)
        return checkpoint

    def _agree_on_stacks(self, path: Path, theirs: Mapping[str, Any]) -> None:
        """Train one client after another if the run did so, and `local_engine: auto` has chosen otherwise now."""
        begun_alone = theirs.get(STACK_SIZE) == 1 < self.stack_size and self.federation.local_engine == "auto"
        if begun_alone and isinstance(self.worker, StackedWorker) and isinstance(self.cohort, RankCohort):
            self.worker.train_alone("the run began so")
            self.stack_size = self.cohort.stack_size = self.training[STACK_SIZE] = 1
        require_equal_stacks(path, theirs.get(STACK_SIZE), self.stack_size)

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
            samples=self.workload.round_samples,
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
        tensors: dict[str, torch.Tensor] = self.module.state_dict()
        return tensors
