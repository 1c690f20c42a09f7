"""Hooks of a module in a stack: called once for several clients, or, where that fails, for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_sparsefl.federated.exchange.failures import is_out_of_memory
from lightning_sparsefl.federated.local.fast.hooks import Hooks
from lightning_sparsefl.federated.local.fast.trainer import FastTrainer
from lightning_sparsefl.federated.local.stacked.logs import ChangesAttribute, NotStackable, StackedLog
from lightning_sparsefl.federated.local.stacked.metrics.states import MetricRows
from lightning_sparsefl.federated.local.stacked.reading.stack_reader import samples_of
from lightning_sparsefl.federated.local.stacked.reasons import reason_of
from lightning_sparsefl.federated.local.stacked.states.attributes import AttributeRows
from lightning_sparsefl.federated.local.stacked.states.leaves import StackedModule
from lightning_sparsefl.federated.local.stacked.states.undo import ModuleStates

_TIMES = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
BEFORE_BACKWARD = ("on_before_zero_grad", "optimizer_zero_grad")
"""Hooks between a training step and its backward pass."""
TRAINING_HOOKS = frozenset(("on_fit_start", *BEFORE_BACKWARD, *(f"on_train_{time}" for time in _TIMES)))
"""Hooks of a fit that are called for several clients at once."""
EVALUATION_HOOKS = frozenset(f"on_{stage}_{time}" for stage in ("validation", "test") for time in _TIMES)
"""Hooks of an evaluation that are called for several clients at once."""
GRADIENT_HOOKS = frozenset(("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"))
"""Hooks of a fit that see gradients, which are called for one client after another if they read numbers out of them."""
STACKED_HOOKS = TRAINING_HOOKS | GRADIENT_HOOKS | {"lr_scheduler_step", "optimizer_step"}
"""Hooks that a module whose clients train as a stack may override, besides those of the batch transfer."""
BATCH_HOOKS = frozenset(name for name in TRAINING_HOOKS | EVALUATION_HOOKS if "_batch_" in name)
"""Hooks that see a batch."""


@contextmanager
def failing_as(clause: str) -> Iterator[None]:
    """Raise :class:`NotStackable` in the place of an error of a hook, unless there is no memory or a remedy.

    Args:
        clause: Start of the clause that says what fails.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, ChangesAttribute):
            raise
        raise NotStackable(f"{clause}, which {reason_of(error)}") from error


def call_hook(
    name: str,
    hooks: Hooks,
    part: StackedModule,
    metrics: MetricRows,
    log: StackedLog,
    given: tuple[Any, ...] = (),
    number: int | None = None,
    samples: Callable[[], int] | None = None,
) -> Any:
    """Call a hook of the module for several clients at once, and return what it returns.

    Args:
        name: Name of the hook, which the module overrides.
        hooks: Caller of the hooks.
        part: Tensors of the clients.
        metrics: States of the metric objects of the clients.
        log: Receiver of what the hook logs.
        given: Arguments of a hook of a batch that have the clients in dimension 0 of their tensors, the batch last.
        number: Number of the batch; None for a hook of another kind.
        samples: Function that returns the number of samples of each client's batch, for a hook that belongs to one
            without seeing it.

    Raises:
        NotStackable: If the hook fails for several clients at once.
    """

    def run(given: Any, level: int) -> Any:
        log.level, entries = level, tree_leaves(given)
        with metrics.shown(level):
            output = hooks.call_module(name, *given, *(() if number is None else (number,)))
        now = tree_leaves(given)
        if len(now) != len(entries) or any(one is not other for one, other in zip(now, entries, strict=True)):
            raise NotStackable("adds or replaces an entry of the batch or of the outputs instead of writing into it")
        return output

    if number is not None:
        samples = partial(samples_of, given[-1])
    with failing_as(f"is followed by `{name}`"), log.of_hook(name, metrics.low, metrics.high, samples):
        return part.call(run, given)


def to_device(
    trainer: FastTrainer, part: StackedModule, batch: Any, states: ModuleStates, acting: AbstractContextManager[None]
) -> Any:
    """Return the batches of several clients on the device, after the hooks of the transfer.

    Args:
        trainer: Trainer of the stack.
        part: Tensors of the clients.
        batch: Batch whose tensors have the clients in dimension 0.
        states: Attributes of the module before the first step.
        acting: Context in which hooks of the module are called.

    Raises:
        NotStackable: If a hook fails for several clients at once, or changes what they share.
    """
    hooks, device = trainer.hooks, trainer.strategy.root_device
    batch = trainer.precision_plugin.convert_input(batch)
    if not hooks.override_transfer:
        return hooks.to_device(batch, device)
    with acting, failing_as("is preceded by a hook of the batch transfer"):
        batch = part.call(lambda own, level: hooks.to_device(own, device), batch)
    states.require_same()
    return batch


def call_with_gradients(
    name: str,
    hooks: Hooks,
    part: StackedModule,
    metrics: MetricRows,
    log: StackedLog,
    samples: Callable[[], int],
    given: Callable[[Mapping[str, Tensor]], tuple[Any, ...]],
    **options: Any,
) -> bool:
    """Call a hook of the module that sees gradients for several clients at once.

    Args:
        name: Name of the hook, which the module overrides.
        hooks: Caller of the hooks.
        part: Tensors of the clients.
        metrics: States of the metric objects of the clients.
        log: Receiver of what the hook logs.
        samples: Function that returns the number of samples of each client's batch.
        given: Function that returns the arguments of the hook for weights as the module sees them.
        **options: Keyword arguments of the hook.

    Returns:
        Whether the hook has assigned gradients, which may have another layout.

    Raises:
        NotStackable: If the hook fails for several clients at once.
    """

    def run(tensors: Mapping[str, Tensor], level: int) -> None:
        log.level = level
        with metrics.shown(level):
            hooks.call_module(name, *given(tensors), **options)

    with failing_as(f"is followed by `{name}`"), log.of_hook(name, metrics.low, metrics.high, samples):
        return part.call_with_gradients(run)


class ClientView(NamedTuple):
    """What a hook that sees gradients gets for one client."""

    tensors: Mapping[str, Tensor]
    """Tensors by name; see :meth:`.StackedModule.view`."""
    attributes: AttributeRows
    metrics: MetricRows
    arguments: tuple[Any, ...]


def call_for_each(
    name: str,
    hooks: Hooks,
    part: StackedModule,
    views: Iterable[ClientView],
    log: StackedLog,
    samples: Callable[[], int],
    **options: Any,
) -> None:
    """Call a hook of the module that sees gradients for one client after another.

    Args:
        name: Name of the hook, which the module overrides.
        hooks: Caller of the hooks.
        part: Tensors of the clients.
        views: Views and arguments that the hook gets, one for each client.
        log: Receiver of what the hook logs.
        samples: Function that returns the number of samples of each client's batch.
        **options: Keyword arguments of the hook.

    Raises:
        NotStackable: If the hook fails for a client.
    """
    log.level = 0
    with failing_as(f"is followed by `{name}`"):
        for place, (tensors, attributes, metrics, arguments) in enumerate(views):
            low, high = metrics.low, metrics.high
            with log.of_hook(name, low, high, samples), metrics.shown(0), part.showing(tensors, place, attributes):
                hooks.call_module(name, *arguments, **options)


def require_plain(output: Any) -> None:
    """Raise :class:`NotStackable` if what a step returns to a hook holds other objects than tensors and numbers.

    Args:
        output: Output of the step.
    """
    for value in tree_leaves(output):
        if not isinstance(value, (Tensor, bool, int, float, str, type(None))):
            raise NotStackable(f"returns a `{type(value).__name__}` to a hook, of which each client has its own")
