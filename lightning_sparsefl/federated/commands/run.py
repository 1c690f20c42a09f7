"""One process's part of a fit, a validation, a test or a replay."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.parameter import UninitializedParameter

from lightning_sparsefl.cost import Ledger
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.client import ClientWorker, LocalWork, Split, require_set
from lightning_sparsefl.federated.commands.export import Exported, ExportRequest, export
from lightning_sparsefl.federated.commands.fit import Fit
from lightning_sparsefl.federated.commands.replay import Replay, replay_client
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.evaluation.scorer import Scorer
from lightning_sparsefl.federated.exchange.flat import require_trainable
from lightning_sparsefl.federated.fleet import Fleet, LazyClientViews, sizes_fact
from lightning_sparsefl.federated.local.engines import isolate_metrics, local_engine
from lightning_sparsefl.federated.local.example_input import layers_of
from lightning_sparsefl.federated.options import Federation
from lightning_sparsefl.federated.rounds.coordinator import Coordinator, Workload
from lightning_sparsefl.federated.storage import checkpoint
from lightning_sparsefl.federated.storage.records import MemoryStore
from lightning_sparsefl.federated.storage.resume import find_resume_point
from lightning_sparsefl.federated.storage.run_folder import RunFolder
from lightning_sparsefl.federated.storage.sqlite_store import SqliteStore
from lightning_sparsefl.report import print_table, summary_rows
from lightning_sparsefl.seeds import seed_all
from lightning_sparsefl.types import ServerState
from lightning_sparsefl.wire import Codec

if TYPE_CHECKING:
    from lightning_sparsefl.federated.trainer import FederatedTrainer


def check_data(data: Any, federation: Federation) -> None:
    """Raise :class:`InvalidOption` where the options do not fit the data."""
    federation.check_fleet(data.num_clients)
    split = getattr(data, "eval_split", "val")
    if split not in ("val", "test"):
        raise InvalidOption(f"`data.eval_split` is {split!r}; expected 'val' or 'test'.")


def check_module(module: LightningModule) -> None:
    """Raise :class:`InvalidOption` where a module cannot be trained."""
    if not isinstance(module, LightningModule):
        raise InvalidOption(
            f"`model` is a {type(module).__module__}.{type(module).__name__}; expected a `lightning.LightningModule` "
            "(one of the package `pytorch_lightning` is another class)."
        )
    for hook in ("training_step", "configure_optimizers"):
        if not is_overridden(hook, module):
            raise InvalidOption(f"`{type(module).__name__}` has no `{hook}`; define it to train (option `model`).")
    require_trainable(module)
    if any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters()):
        raise InvalidOption(
            f"`{type(module).__name__}` has lazy layers; expected layers of known shapes, since clients share them "
            "(option `model`)."
        )


class Session:
    """Sets the parts up and drives the rounds.

    Args:
        trainer: The options.
        ranks: The processes, launched.
        module: The user's module.
        data: The clients' data.
        ckpt_path: A checkpoint to start from, ``last``, or None.
        split: That is scored; default: the data's `eval_split`.
    """

    def __init__(
        self,
        trainer: FederatedTrainer,
        ranks: Ranks,
        module: LightningModule,
        data: Any,
        ckpt_path: str | None,
        split: Split | None = None,
    ) -> None:
        self.trainer, self.ranks, self.module, self.data = trainer, ranks, module, data
        self.federation, self.algorithm, self.seed = trainer.federation, trainer.algorithm, trainer.seed
        default: Split = getattr(data, "eval_split", "val")
        self.split: Split = split or default
        self.folder: RunFolder | None = None
        root = Path(trainer.default_root_dir)
        self.origin = ranks.share(lambda: find_resume_point(ckpt_path, root, self.name, training=split is None))[0]
        seed_all(self.seed, "data")
        ranks.share(self._prepare_data)
        self._check_scoring()
        seed_all(self.seed, "setup")
        self.algorithm.adapt(module)
        ranks.fabric.strategy.precision.convert_module(module)  # before the engine makes its vector
        ranks.fabric.to_device(module)
        isolate_metrics(module)
        for tensor in (*module.parameters(), *module.buffers()):
            ranks.broadcast(tensor)
        self.bench = self.bench_of(module)
        self.store = {"ram": MemoryStore, "disk": SqliteStore}[self.federation.store](self.bench.device)
        self.ledger = Ledger()
        self.coordinator = Coordinator(
            algorithm=self.algorithm,
            federation=self.federation,
            bench=self.bench,
            ranks=ranks,
            store=self.store,
            codec=Codec(self.bench.initial),
            workload=self._workload(),
            ledger=self.ledger,
            max_rounds=trainer.max_rounds,
            seed=self.seed,
        )
        self.scorer = Scorer(self.coordinator, self.split)
        self.identity = checkpoint.identity(self.algorithm, self.bench)
        self.settings = {"seed": self.seed, **self._settings()}

    def _settings(self) -> dict[str, Any]:
        """Further facts that the weights depend on, which a run that goes on must share."""
        return {
            "client sizes": sizes_fact(self.data),
            "local epochs": self.trainer.local_options.max_epochs,
            "batch size": self.coordinator.workload.batch_size,
            "clients per round": self.federation.clients_per_round,
            "buffers": self.federation.buffers,
            "reducer": None if self.federation.reducer is None else repr(self.federation.reducer),
            "clip_update": self.federation.clip_update,
            "privacy": None if self.federation.privacy is None else repr(self.federation.privacy),
            "unseen clients": self.federation.unseen_clients,
            "monitor": self.federation.monitor,
            "execution": self.federation.execution,
            "capacities": self.federation.capacities,
            "shuffled capacities": self.federation.shuffle_capacities,
            **({"max_rounds": self.trainer.max_rounds} if self.algorithm.fixed_length else {}),
            "round_lr": repr(self.trainer.round_lr),
        }

    @property
    def name(self) -> str:
        """Name of the runs' common folder."""
        return "fast_dev_run" if self.trainer.fast_dev_run else type(self.algorithm).__name__

    def _prepare_data(self) -> None:
        """Local rank 0 downloads, then all set up; also a download that fails meets the others at the barrier."""
        try:
            if self.ranks.fabric.local_rank == 0:
                self.data.prepare_data()
        finally:
            self.ranks.barrier()
        self.data.setup("fit")

    def _check_scoring(self) -> None:
        """Raise :class:`InvalidOption` now if the first evaluation would fail."""
        hook = {"val": "validation_step", "test": "test_step"}[self.split]
        if not is_overridden(hook, self.module):
            raise InvalidOption(
                f"`{type(self.module).__name__}` has no `{hook}`, which `data.eval_split: {self.split}` scores clients "
                "with; define it, or set the other split."
            )
        needed: set[Split] = {self.split, "val"} if self.trainer.validate_locally else {self.split}
        for split in sorted(needed):
            require_set(getattr(self.data, f"client_{split}_dataloader")(0), split)

    def bench_of(self, module: LightningModule) -> ClientWorker:
        """A bench for a module, with this run's data and local engine."""
        trainer = self.trainer
        engine = local_engine(
            self.federation.local_engine,
            self.ranks.fabric,
            trainer.local_options,
            module,
            trainer.client_callbacks,
        )
        work = LocalWork(
            trainer.client_callbacks, trainer.round_lr, trainer.validate_locally, self.federation.execution
        )
        return ClientWorker(module, self.data, engine, work, self.ranks.fabric.device)

    def _workload(self) -> Workload:
        options = self.trainer.local_options
        batch_size = getattr(self.data, "batch_size", None) or self.data.client_train_dataloader(0).batch_size or 1
        return Workload(
            layers=layers_of(self.module, self.data),
            epochs=options.max_epochs,
            batch_size=batch_size,
            max_batches=options.limit_train_batches,
            drop_last=getattr(self.data, "drop_last", False),
            buffers=self.bench.flat.layout.buffers,
            model=self.bench,
        )

    # ---- verbs

    def fit(self) -> dict[str, float]:
        """Run the rounds that are left; returns the final table."""
        server, resumed = self.start()
        if self._has_ended(server):
            return self._finished(server)
        return Fit(self, server, resumed).run()

    def _has_ended(self, server: ServerState) -> bool:
        """Whether the run that is to go on has its final table, and no rounds are left."""
        return server.round >= self.trainer.max_rounds and self.final_table().get("rounds") == server.round

    def final_table(self) -> dict[str, Any]:
        """The table of the run that goes on in its folder."""
        return {} if self.origin.folder is None else RunFolder(self.origin.folder).read_summary()

    def _finished(self, server: ServerState) -> dict[str, float]:
        """A run that has no rounds left keeps its table."""
        assert self.origin.folder is not None
        self.bench.load(server.weights)
        self.folder = RunFolder(self.origin.folder)
        rank_zero_info(
            f"{self.folder.path} has finished its {self.trainer.max_rounds} rounds; raise `trainer.max_rounds`."
        )
        return self.folder.read_summary()

    def score(self) -> dict[str, float]:
        """Score the models of a checkpoint, or the initial ones."""
        server, _ = self.start(training=False)
        scores = self.scorer.scores(server).summary()
        if self.ranks.first:
            print_table(
                f"{type(self.algorithm).__name__}, {self.split} sets, round {server.round}",
                ("", ""),
                summary_rows(scores),
            )
        return scores

    def export(self, request: ExportRequest) -> Exported:
        """Write one model of a checkpoint as files; the first rank works, and the others wait for it."""
        server, _ = self.start(training=False)
        exported = self.ranks.share(lambda: export(self, server, request) if self.ranks.first else None)[0]
        assert exported is not None
        return exported

    def replay(self, client: int, round: int | None = None) -> Replay:
        """Run one local fit again; nothing is written."""
        again = replay_client(self, self.start()[0], client, round)
        again.print()
        return again

    def start(self, training: bool = True) -> tuple[ServerState, checkpoint.Resumed | None]:
        """The state to go on from."""
        if self.origin.checkpoint is not None:
            settings, moved = self.settings if training else {}, self.origin.folder is None
            resumed = self.origin.read(
                lambda path: checkpoint.restore(
                    path, self.bench, self.ledger, self.store, self.identity, settings, moved
                )
            )
            with checkpoint.as_checkpoint_error(self.origin.checkpoint):
                self.scorer.restore(resumed.selected)
            return resumed.server, resumed
        views = LazyClientViews(self.coordinator.training_clients, lambda i: self.coordinator.view(i, 0))
        fleet = Fleet(
            views,
            self.bench.flat.layout.buffers,
            self.bench.device,
            self.bench,
            client=lambda i: self.coordinator.client(i, 0),
            ranks=self.ranks,
            clients_per_round=self.federation.clients_per_round,
            execution=self.federation.execution,
        )
        return self.algorithm.init(self.bench.initial, fleet), None
