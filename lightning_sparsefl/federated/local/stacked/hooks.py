"""Hooks of a module that are called once for all clients of a stack."""

from __future__ import annotations

from lightning_sparsefl.federated.exchange.failures import is_out_of_memory
from lightning_sparsefl.federated.local.fast.hooks import Hooks
from lightning_sparsefl.federated.local.stacked.leaves import StackedModule
from lightning_sparsefl.federated.local.stacked.logs import NotStackable, StackedLog
from lightning_sparsefl.federated.local.stacked.metrics.states import MetricStates
from lightning_sparsefl.federated.local.stacked.reasons import reason_of

_TIMES = ("start", "epoch_start", "epoch_end", "end")
TRAINING_HOOKS = frozenset(f"on_train_{time}" for time in _TIMES)
"""Hooks of a fit that have no arguments."""
EVALUATION_HOOKS = frozenset(f"on_{stage}_{time}" for stage in ("validation", "test") for time in _TIMES)
"""Hooks of an evaluation that have no arguments."""


def call_hook(
    name: str, hooks: Hooks, part: StackedModule, log: StackedLog, metrics: MetricStates, low: int, high: int
) -> None:
    """Call a hook of the module for several clients at once.

    Args:
        name: Name of the hook, which the module overrides.
        hooks: Caller of the hooks.
        part: Tensors of the clients from `low` to before `high`.
        log: Receiver of what the hook logs.
        metrics: States of the metric objects of all clients.
        low: First client.
        high: Client after the last one.

    Raises:
        NotStackable: If the hook fails for several clients at once.
    """

    def run(batch: None, level: int) -> None:
        log.level = level
        with metrics.part(low, high).shown(level):
            hooks.call_module(name)

    try:
        with log.of_hook(name, low, high):
            part.call(run, None)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise NotStackable(f"is followed by `{name}`, which {reason_of(error)}") from error
