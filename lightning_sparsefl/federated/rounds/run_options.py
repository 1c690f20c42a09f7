"""The options of a run that the engine reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_sparsefl.errors import InvalidOption, check_types
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.local.local_options import LocalOptions
from lightning_sparsefl.federated.local.round_lr import RoundLR
from lightning_sparsefl.federated.options import Federation


@dataclass(frozen=True)
class RunOptions:
    """What a `FederatedTrainer` was asked for, besides its processes."""

    algorithm: FederatedAlgorithm
    """The federated method."""
    federation: Federation = field(default_factory=Federation)
    """Who trains and what travels."""
    local: LocalOptions = field(default_factory=LocalOptions)
    """How every client trains."""
    max_rounds: int = 100
    """Number of rounds of the run."""
    check_val_every_n_round: int = 1
    """Rounds between two evaluations."""
    default_root_dir: str = "runs"
    """Folder that run folders are made in."""
    run_dir: Path | None = None
    """Folder of the run; None = a new one in `default_root_dir`."""
    callbacks: Sequence[Callback] = ()
    """Round-level callbacks."""
    client_callbacks: Sequence[Callback] = ()
    """Callbacks of local training, copied for each client."""
    logger: Logger | Sequence[Logger] | bool | None = None
    """Loggers as the user gave them."""
    round_lr: RoundLR | None = None
    """Factor of all learning rates by round."""
    validate_locally: bool = False
    """Whether a client runs its validation loader after each local epoch."""
    fast_dev_run: bool = False
    """Whether the run is a trial of one round."""
    seed: int = 0
    """Random seed of the run."""
    quiet: bool = False
    """Whether nothing but warnings and errors is printed."""
    num_threads: int = 1
    """Intra-op threads of every rank."""
    deterministic: bool | Literal["warn"] = False
    """Whether torch uses deterministic algorithms only."""

    def __post_init__(self) -> None:
        check_types(self, "trainer.")
        if self.federation.redraw_capacities and self.algorithm.plans_by_capacity:
            raise InvalidOption(
                f"`federation.redraw_capacities` is True, but {type(self.algorithm).__name__} plans the whole run by "
                "the capacities of the first round; expected False."
            )
        if self.algorithm.has_server_optimizer and self.federation.server_optimizer is not None:
            raise InvalidOption(
                f"`federation.server_optimizer` is {self.federation.server_optimizer}, but "
                f"{type(self.algorithm).__name__} has an optimizer of the server among its own options; expected null."
            )
        if self.algorithm.needs_metrics and self.local.limit_train_batches == 0:
            raise InvalidOption(
                f"`trainer.limit_train_batches` is {self.local.limit_train_batches}, but "
                f"{type(self.algorithm).__name__} learns from what the module logs in training; expected a batch."
            )
        select = self.federation.select or ""
        if select.startswith("global/") and not self.algorithm.has_global_model:
            raise InvalidOption(
                f"`federation.select` is {select!r}, but {type(self.algorithm).__name__} trains no global model; "
                f"expected a key of the clients' own models, such as {select.replace('global', 'personal', 1)!r}."
            )
        self._check_state_keys()

    def _check_state_keys(self) -> None:
        """Raise if two callbacks would be one in a checkpoint, which holds their states by key."""
        stateful = [c for c in self.callbacks if is_overridden("state_dict", c, Callback)]
        for key, count in Counter(callback.state_key for callback in stateful).items():
            if count > 1:
                kind = next(type(callback).__name__ for callback in stateful if callback.state_key == key)
                raise InvalidOption(
                    f"`trainer.callbacks` has {count} {kind} with the state key {key!r}, so that a checkpoint could "
                    "hold the state of one; expected one of them, or other options or another `state_key` in each."
                )

    @property
    def name(self) -> str:
        """Name of the folder that all runs of the algorithm are in."""
        return "fast_dev_run" if self.fast_dev_run else type(self.algorithm).__name__

    def stops_again(self, stopped_by: str) -> bool:
        """Return whether a callback that stopped a run is there and ends it where it stopped.

        A `Timer` does not: it compares its duration, which may be longer now, when the run goes on.

        Args:
            stopped_by: State key of the callback; empty = none stopped the run.
        """
        return stopped_by in {each.state_key for each in self.callbacks if not isinstance(each, Timer)}

    def leave_no_rounds(self, table: Mapping[str, Any]) -> bool:
        """Return whether a run with this final table has ended, by its rounds or by a callback.

        Args:
            table: Final table of the run; empty = it has none.
        """
        return table.get("rounds", 0) >= self.max_rounds or self.stops_again(table.get("stopped_by", ""))

    def shrunk(self, num_clients: int) -> RunOptions:
        """Return the options of a trial: one round of two clients and one batch each.

        Args:
            num_clients: Number of clients of the data.
        """
        few = max(1, min(2, num_clients - self.federation.unseen_clients))
        size = replace(self.federation, clients_per_round=few, min_clients=1, eval_clients=few)
        return replace(
            self,
            max_rounds=1,
            federation=replace(size, local_epochs=None),
            local=replace(self.local, max_epochs=1, limit_train_batches=1, limit_val_batches=1, limit_test_batches=1),
        )

    def users_loggers(self) -> list[Logger]:
        """Return the loggers that the user gave."""
        if isinstance(self.logger, Logger):
            return [self.logger]
        return list(self.logger) if isinstance(self.logger, Sequence) else []
