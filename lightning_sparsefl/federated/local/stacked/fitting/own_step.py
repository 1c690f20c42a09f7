"""A module's `optimizer_step` in a stack, called once for all clients that step together.

Lightning's default does nothing but step, and an override mostly sets learning rates before or after it, as for a
warm-up. So the hook runs as a fiber: it is started before the pass of the batch, waits where it steps the optimizer,
and goes on when the clients have stepped. It sees neither weights nor losses, of which each client has its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from lightning_sparsefl.federated.local.stacked.fibers import Fiber, ask
from lightning_sparsefl.federated.local.stacked.fitting.hooks import failing_as
from lightning_sparsefl.federated.local.stacked.fitting.optimizers import StateOfAll, options_of
from lightning_sparsefl.federated.local.stacked.logs import NotStackable

NAME = "optimizer_step"
CLAUSE = f"is followed by `{NAME}`"
"""Start of the clauses that say what cannot be stacked."""
_READS = "reads"

Options = list[dict[str, Any]]
"""Options of the groups of an optimizer."""


class OwnStep:
    """The hook in one fit of several clients.

    Args:
        trainer: Trainer of the stack.
        optimizer: Optimizer of all clients, whose groups the hook sees.
        hidden: Function that makes the context in which the hook runs, where what each client has of its own is hidden.
    """

    def __init__(
        self, trainer: Any, optimizer: torch.optim.Optimizer, hidden: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._trainer, self._optimizer, self._hidden = trainer, optimizer, hidden
        seen = copy.copy(optimizer)
        seen.param_groups = optimizer.param_groups  # the very groups, whose options the hook may set
        seen.state = StateOfAll(_READS)  # type: ignore[assignment]
        seen.step = _refuse_step  # type: ignore[method-assign]
        self._seen, self._wrapped = seen, LightningOptimizer(seen)
        self._wrapped._strategy = _Waiting()  # type: ignore[assignment]
        self._fiber: Fiber[Any] | None = None
        self._batch: tuple[int, int] | None = None
        """Epoch and index of the batch in which the hook was called last."""
        self._before: Options = []
        """Options of the optimizer before that batch."""
        self._after: Options | None = None
        """Those after the step of the first clients of that batch; None before it."""

    def begin(self, number: int) -> None:
        """Give clients that step apart in a batch the options that the first ones have seen.

        Args:
            number: Index of the batch within the epoch.
        """
        batch = self._trainer.current_epoch, number
        if batch != self._batch:
            self._batch, self._before, self._after = batch, self._options(), None
            return
        for group, values in zip(self._optimizer.param_groups, self._before, strict=True):
            group.update(_copied(values))

    def start(self, number: int) -> None:
        """Run the hook up to its step.

        Args:
            number: Index of the batch within the epoch.

        Raises:
            NotStackable: If the hook fails, or ends without a step.
        """
        call, hook = self._trainer.hooks.call_module, (NAME, self._trainer.current_epoch, number)
        self._fiber = Fiber(lambda: call(*hook, self._wrapped, _closure))
        if self._runs_to_its_end():
            raise NotStackable(f"{CLAUSE}, which ends without a step")

    def finish(self) -> None:
        """Run the rest of the hook, after the clients' step.

        Raises:
            NotStackable: If the hook fails, steps again, or sets other options than for other clients.
        """
        if not self._runs_to_its_end():
            raise NotStackable(f"{CLAUSE}, which steps twice")
        options = self._options()
        if self._after is not None and self._after != options:
            raise NotStackable(f"{CLAUSE}, which sets options of the optimizer, which all clients share")
        self._fiber, self._after = None, options

    def close(self) -> None:
        """End a hook that waits for a step which is not made."""
        if self._fiber is not None:
            self._fiber.close()
            self._fiber = None

    def _runs_to_its_end(self) -> bool:
        """Run the hook until its next step or its end; return whether it has ended."""
        assert self._fiber is not None
        random, kept, momentum = torch.get_rng_state(), self._kept(), self._has_momentum()
        with failing_as(CLAUSE), self._hidden(_READS), self._shown(), NotStackable.noted() as refused:
            self._fiber.resume()
            if self._fiber.done:
                self._fiber.result()
            if refused:  # also what the hook has caught
                raise refused[0]
        if not torch.equal(torch.get_rng_state(), random):
            raise NotStackable(f"{CLAUSE}, which draws random numbers of torch")
        if self._kept() != kept:  # once for each part of a stack that steps apart
            raise NotStackable(f"{CLAUSE}, which changes a scheduler, or attributes of the optimizer")
        if self._has_momentum() != momentum:  # of which the first step keeps another buffer than the next ones
            raise NotStackable(f"{CLAUSE}, which turns momentum on or off")
        return self._fiber.done

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Let the module and the trainer have the optimizer that the hook gets."""
        strategy = self._trainer.strategy
        before = strategy._optimizers, strategy._lightning_optimizers
        strategy._optimizers, strategy._lightning_optimizers = [self._seen], [self._wrapped]
        try:
            yield
        finally:
            strategy._optimizers, strategy._lightning_optimizers = before

    def _options(self) -> Options:
        """Return the options of the optimizer, without the kernel, which is chosen for each step."""
        groups = options_of(self._optimizer)
        return [_copied({name: value for name, value in group.items() if name != "fused"}) for group in groups]

    def _has_momentum(self) -> list[bool]:
        return [bool(group.get("momentum")) for group in self._optimizer.param_groups]

    def _kept(self) -> list[dict[str, Any]]:
        """Return what the hook may write elsewhere than in the options."""
        own = [vars(self._wrapped), {key: value for key, value in vars(self._seen).items() if key not in _OF_GROUPS}]
        schedules = [config.scheduler.state_dict() for config in self._trainer.lr_scheduler_configs]
        return [_copied(values) for values in (*own, self._seen.defaults, *schedules)]


_OF_GROUPS = ("param_groups", "state", "defaults")
_VALUES = (Tensor, list, dict, set)


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name, with copies of those that may be written in place."""
    return {name: copy.deepcopy(value) if isinstance(value, _VALUES) else value for name, value in values.items()}


def _closure() -> Any:
    """Stand for the closure that runs the training step, which the stack has its own time for."""
    raise NotStackable("calls its closure itself")


def _refuse_step(closure: Any = None) -> Any:
    """Stand for the step of the optimizer without Lightning's wrapper, which neither clips nor calls other hooks."""
    raise NotStackable("steps the optimizer without its wrapper")


class _Waiting:
    """Strategy of the optimizer that the hook sees."""

    @staticmethod
    def optimizer_step(optimizer: Any, closure: Callable[[], Any], **options: Any) -> Any:
        """Wait for the clients' step, in the fiber of the hook."""
        if closure is not _closure:
            raise NotStackable("steps with another closure than its own")
        ask(None)
        return _Unread()


class _Unread:
    """What the step returns, which would be the loss of one client."""

    def _refuse(self, *args: Any, **options: Any) -> Any:
        raise NotStackable("reads the loss that the step returns")

    __bool__ = __float__ = __format__ = __getattr__ = __eq__ = __ne__ = __hash__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse
    __class__ = property(_refuse)  # for `isinstance`
