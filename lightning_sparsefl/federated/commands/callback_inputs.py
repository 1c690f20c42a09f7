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
_OF_NONE = (BatchSizeFinder,)
"""Callbacks of Lightning that need the data module of a fit, which neither a round nor a client has."""


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
    _require_observers(rounds)
    _require_fit_for_clients(clients)
    return rounds, clients


def with_bar(rounds: list[Callback]) -> list[Callback]:
    """Add this package's progress bar, unless the user has given one.

    Args:
        rounds: Round-level callbacks.
    """
    has_bar = any(isinstance(callback, ProgressBar) for callback in rounds)
    return rounds if has_bar else [*rounds, RoundProgressBar()]


def _require_observers(rounds: Sequence[Callback]) -> None:
    """Check that callbacks for rounds only observe them."""
    for callback in rounds:
        name = type(callback).__name__
        if isinstance(callback, _OF_A_FIT):
            raise InvalidOption(
                f"`trainer.callbacks` has {name}, which acts on a fit, and rounds have one for each client; pass it in "
                "`trainer.client_callbacks`, which acts on each client's own fit."
            )
        if isinstance(callback, _OF_ONE_LOGGER):
            raise InvalidOption(
                f"`trainer.callbacks` has {name}, which logs the steps of one fit, and rounds have one for each "
                "client, without a logger; remove it."
            )
        _require_some_place(callback, "callbacks")


def _require_fit_for_clients(clients: Sequence[Callback]) -> None:
    """Check that callbacks for clients need nothing that a client's fit lacks."""
    for callback in clients:
        name = type(callback).__name__
        if isinstance(callback, _OF_ONE_LOGGER):
            raise InvalidOption(
                f"`trainer.client_callbacks` has {name}, which needs a logger, and clients' fits have none; remove it."
            )
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            raise InvalidOption(
                "`trainer.client_callbacks` has a ModelCheckpoint without `dirpath`, whose files of all clients and "
                "rounds would lie in one folder; set `dirpath`, or pass it in `trainer.callbacks`, where it saves the "
                "federation's model."
            )
        _require_some_place(callback, "client_callbacks")


def _require_some_place(callback: Callback, option: str) -> None:
    if isinstance(callback, _OF_NONE):
        raise InvalidOption(
            f"`trainer.{option}` has {type(callback).__name__}, which changes the data module of a fit, and neither "
            "rounds nor clients have one of their own; set `data.batch_size`."
        )
