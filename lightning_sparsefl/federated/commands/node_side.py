"""What the clients' half of a run needs on one process: module, data, worker, and a node that works with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_sparsefl.data import ClientDataModules
from lightning_sparsefl.errors import DataNotFound, InvalidOption
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.exchange.hook_results import check_callbacks
from lightning_sparsefl.federated.exchange.orders import Split
from lightning_sparsefl.federated.local.choice import choose_worker
from lightning_sparsefl.federated.local.engines import local_engine
from lightning_sparsefl.federated.local.isolation import isolate_metrics
from lightning_sparsefl.federated.local.node import Node, NodeOptions, NodeRecords
from lightning_sparsefl.federated.local.stacked.worker import StackedWorker
from lightning_sparsefl.federated.local.worker import ClientWorker, LocalWork
from lightning_sparsefl.federated.rounds.run_options import RunOptions
from lightning_sparsefl.federated.sampling.samplers import Uniform
from lightning_sparsefl.seeds import seed_all
from lightning_sparsefl.wire import Codec


class NodeSide:
    """Sets up module, data and worker, which are all that a process of a deployment needs to carry out orders.

    Args:
        options: Options of the run.
        ranks: Processes of the run, launched.
        module: The user's module.
        data: The clients' data.
        split: Split to score; None = the data's `eval_split`.
        client: Number of a client whose data is here; None = no client's data is.

    Raises:
        DataNotFound: If the data is not on disk.
        InvalidOption: If module, data and options do not fit each other.
    """

    trains_cohorts = False
    """Whether this process trains several clients of a round, which can be a stack."""

    def __init__(
        self,
        options: RunOptions,
        ranks: Ranks,
        module: LightningModule,
        data: Any,
        split: Split | None = None,
        client: int | None = 0,
    ) -> None:
        self.options, self.ranks, self.module, self.data = options, ranks, module, data
        self.federation, self.algorithm = options.federation, options.algorithm
        default: Split = getattr(data, "eval_split", "val")
        self.split: Split = split or default
        sampler = options.federation.sampler or Uniform()
        own = sampler.callbacks()
        check_callbacks(sampler, "callbacks", own)
        self.client_callbacks = [*options.client_callbacks, *own]
        seed_all(options.seed, "data")
        ranks.share(self._prepare_data)
        self._check_scoring(client)
        self._prepare_module()
        several = client is not None and self.trains_cohorts
        self.worker = choose_worker(self.algorithm, self.federation, several, *self._local_work(module))
        self.device, self.layout = self.worker.device, self.worker.flat.layout
        self.codec = Codec(self.worker.initial, self.algorithm.may_vote)
        self.stack_size = self._stack_size()

    def make_node(self, records: NodeRecords, keep_masks: bool) -> Node:
        """Make the node of this process.

        Args:
            records: Records of the node's clients.
            keep_masks: Whether records hold the clients' masks, which orders that arrive as bytes need.
        """
        federation = self.federation
        options = NodeOptions(
            buffers=federation.buffers,
            clip_update=federation.clip_update,
            client_timeout=federation.client_timeout,
            finetune_epochs=federation.finetune_epochs,
            keep_masks=keep_masks,
        )
        return Node(
            self.algorithm,
            self.worker,
            records,
            self.codec,
            self.layout,
            self.worker.initial,
            self.device,
            options,
            self.ranks.rank,
        )

    def _prepare_data(self) -> None:
        """Let local rank 0 download, then set up on all ranks; a failed download reaches the others' barrier too."""
        try:
            try:
                if self.ranks.fabric.local_rank == 0:
                    self.data.prepare_data()
            finally:
                self.ranks.barrier()
            self.data.setup("fit")
        except DataNotFound:
            raise
        except FileNotFoundError as error:
            raise DataNotFound(
                f"`data` is {type(self.data).__name__}, which finds no file or folder that it needs ({error}); "
                "expected options of `data` that say where it is."
            ) from error

    def _check_scoring(self, client: int | None) -> None:
        """Raise :class:`InvalidOption` now if the first evaluation would fail."""
        default = self.split == getattr(self.data, "eval_split", "val")
        hook, command = {"val": ("validation_step", "validate"), "test": ("test_step", "test")}[self.split]
        if not is_overridden(hook, self.module):
            name = type(self.module).__name__
            asked = f"`data.eval_split: {self.split}` scores clients with" if default else f"`{command}` calls"
            other = "define it, or set the other split" if default else "define it"
            raise InvalidOption(f"`{name}` has no `{hook}`, which {asked}; {other}.")
        if client is None:
            return
        instead = "set `data.eval_split: test`" if default else "use `test` for the test sets"
        for each in self._scored_clients(client):
            self._require_set(self.split, each, instead)
        if self.options.validate_locally:
            unset = "set `trainer.validate_locally: false`"
            self._require_validation(client, "which `trainer.validate_locally` calls", unset)
        if self.algorithm.without_validation is not None:
            scores = f"with which {type(self.algorithm).__name__} scores clients in training"
            self._require_validation(client, scores, self.algorithm.without_validation)

    def _require_validation(self, client: int, use: str, instead: str) -> None:
        """Raise :class:`InvalidOption` if clients cannot be validated in training."""
        if not is_overridden("validation_step", self.module):
            raise InvalidOption(f"`{type(self.module).__name__}` has no `validation_step`, {use}; define it.")
        self._require_set("val", client, instead)

    def _scored_clients(self, client: int) -> Iterable[int]:
        """Return the clients whose data is here, is scored, and may lack a set.

        Args:
            client: Number of a client whose data is here, which stands for all if they have the same sets.
        """
        return (client,)

    def _require_set(self, split: Split, client: int, instead: str) -> None:
        if getattr(self.data, f"client_{split}_dataloader")(client) is not None:
            return
        if isinstance(self.data, ClientDataModules):
            raise InvalidOption(
                f"The data module of client {client} has no `{split}_dataloader`; define one, or {instead}."
            )
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
        """Return a worker for a module that trains and scores one client after another, with this run's data.

        Args:
            module: The user's module, or a copy of it.
        """
        return ClientWorker(*self._local_work(module))

    def _local_work(self, module: LightningModule) -> tuple[Any, ...]:
        """Return the arguments of a worker."""
        options, callbacks = self.options, self.client_callbacks
        engine = local_engine(self.federation.local_engine, self.ranks.fabric, options.local, module, callbacks)
        work = LocalWork(callbacks, options.round_lr, options.validate_locally, self.federation.execution)
        return module, self.data, engine, work, self.ranks.fabric.device

    def _stack_size(self) -> int:
        """Return the largest number of clients in a stack; 1 = clients train one after another."""
        return self._together(lambda worker: worker.stack_size(self.federation.clients_per_round))

    def _score_size(self, clients: int) -> int:
        """Return how many of a number of clients are scored together at most; 1 = one after another."""
        return self._together(lambda worker: worker.score_size(clients))

    def _together(self, automatic: Callable[[StackedWorker], int]) -> int:
        """Return the option `federation.stack_size`, or what `auto` stands for; 1 where clients cannot be stacked."""
        worker, size = self.worker, self.federation.stack_size
        if not isinstance(worker, StackedWorker) or not worker.can_stack:
            return 1
        return automatic(worker) if size == "auto" else size
