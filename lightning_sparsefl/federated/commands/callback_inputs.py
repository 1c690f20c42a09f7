"""Which callbacks belong to rounds and which to clients' fits, and those of Lightning that fit neither."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ProgressBar,
    StochasticWeightAveraging,
    WeightAveraging,
)

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.tracking.progress_bar import RoundProgressBar

_OF_A_FIT = (
    BaseFinetuning,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
"""Callbacks of Lightning that change how a module is trained, for which a round is not an epoch."""
_OF_ONE_LOGGER = (DeviceStatsMonitor, LearningRateMonitor)
"""Callbacks of Lightning that log what each fit has, where neither a round nor a client has it with a logger."""
_OF_NONE = (
    (BatchSizeFinder,),
    "changes the data module of a fit, and neither rounds nor clients have one of their own; set `data.batch_size`",
)
"""Callbacks of Lightning for neither of the two, and why."""
_REFUSED = {
    "callbacks": (
        (
            _OF_A_FIT,
            "acts on a fit, and rounds have one for each client; pass it in `trainer.client_callbacks`, which acts on "
            "each client's own fit",
        ),
        (
            _OF_ONE_LOGGER,
            "logs the steps of one fit, and rounds have one for each client, without a logger; remove it",
        ),
        _OF_NONE,
    ),
    "client_callbacks": ((_OF_ONE_LOGGER, "needs a logger, and clients' fits have none; remove it"), _OF_NONE),
}
"""Callbacks that each option refuses, and why."""


def sorted_callbacks(rounds: list[Callback], clients: list[Callback]) -> tuple[list[Callback], list[Callback]]:
    """Move this package's callbacks from the round-level callbacks, where a recipe puts them, to the clients'.

    Args:
        rounds: Round-level callbacks.
        clients: Callbacks of local training.

    Raises:
        InvalidOption: If a callback of Lightning needs what neither rounds nor clients' fits have.
    """
    ours = [c for c in rounds if type(c).__module__.startswith("lightning_sparsefl.callbacks.")]
    if ours:
        names = ", ".join(type(callback).__name__ for callback in ours)
        rank_zero_info(f"{names} in `trainer.callbacks` applies to clients: moved to `trainer.client_callbacks`.")
    rounds, clients = [callback for callback in rounds if callback not in ours], [*clients, *ours]
    _require_place("callbacks", rounds)
    _require_place("client_callbacks", clients)
    _require_folders(clients)
    return rounds, clients


def with_bar(rounds: list[Callback]) -> list[Callback]:
    """Add this package's progress bar, unless the user has given one.

    Args:
        rounds: Round-level callbacks.
    """
    has_bar = any(isinstance(callback, ProgressBar) for callback in rounds)
    return rounds if has_bar else [*rounds, RoundProgressBar()]


def _require_place(option: str, callbacks: Sequence[Callback]) -> None:
    """Check that callbacks need nothing that rounds, or clients' fits, do not have."""
    for callback in callbacks:
        reason = next((reason for kinds, reason in _REFUSED[option] if isinstance(callback, kinds)), None)
        if reason is not None:
            raise InvalidOption(f"`trainer.{option}` has {type(callback).__name__}, which {reason}.")


def _require_folders(clients: Sequence[Callback]) -> None:
    if any(isinstance(callback, ModelCheckpoint) and callback.dirpath is None for callback in clients):
        raise InvalidOption(
            "`trainer.client_callbacks` has a ModelCheckpoint without `dirpath`, whose files of all clients and rounds "
            "would lie in one folder; set `dirpath`, or pass it in `trainer.callbacks`, where it saves the "
            "federation's model."
        )
