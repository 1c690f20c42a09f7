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
from lightning_sparsefl.federated.local.stacked.fitting.optimizers import StateOfAll
from lightning_sparsefl.federated.local.stacked.logs import NotStackable

NAME = "optimizer_step"
CLAUSE = f"is followed by `{NAME}`"
"""Start of the clauses that say what cannot be stacked."""
_READS = "reads"


class OwnStep:
    """The hook in one fit of several clients.

    It runs once for each batch, also if the clients' batches have different sizes, so that they step one after another
    while it waits: what it counts by itself is that of a client alone.

    Args:
        trainer: Trainer of the stack.
        optimizer: Optimizer of all clients, whose groups the hook sees.
        hidden: Function that makes the context in which the hook runs, where what each client has of its own is hidden.
            It gives what the hook sets attributes to.
    """

    def __init__(
        self,
        trainer: Any,
        optimizer: torch.optim.Optimizer,
        hidden: Callable[[str], AbstractContextManager[Mapping[int, Any]]],
    ) -> None:
        self._trainer, self._optimizer, self._hidden = trainer, optimizer, hidden
        seen = copy.copy(optimizer)
        seen.param_groups = optimizer.param_groups  # the very groups, whose options the hook may set
        seen.state = StateOfAll(_READS)  # type: ignore[assignment]
        seen.step = _refuse_step  # type: ignore[method-assign]
        self._seen, self._wrapped = seen, LightningOptimizer(seen)
        self._wrapped._strategy = _Waiting()  # type: ignore[assignment]
        self._fiber: Fiber[Any] | None = None

    def start(self, number: int) -> Mapping[int, Any]:
        """Run the hook up to its step.

        Args:
            number: Index of the batch within the epoch.

        Returns:
            What attributes have been set to; see :meth:`.AttributeStates.hidden`.

        Raises:
            NotStackable: If the hook fails, or ends without a step.
        """
        call, hook = self._trainer.hooks.call_module, (NAME, self._trainer.current_epoch, number)
        self._fiber = Fiber(lambda: call(*hook, self._wrapped, _closure))
        written = self._run()
        if self._fiber.done:
            raise NotStackable(f"{CLAUSE}, which ends without a step")
        if self._fiber.has_set_context():
            raise NotStackable(f"{CLAUSE}, which sets a context variable")
        return written

    def finish(self) -> Mapping[int, Any]:
        """Run the rest of the hook, after the clients' step.

        Returns:
            What attributes have been set to; see :meth:`.AttributeStates.hidden`.

        Raises:
            NotStackable: If the hook fails, or steps again.
        """
        assert self._fiber is not None
        written = self._run()
        if not self._fiber.done:
            raise NotStackable(f"{CLAUSE}, which steps twice")
        self._fiber = None
        return written

    def close(self) -> None:
        """End a hook that waits for a step which is not made."""
        if self._fiber is not None:
            self._fiber.close()
            self._fiber = None

    def _run(self) -> Mapping[int, Any]:
        """Run the hook until its next step or its end; return what attributes have been set to."""
        assert self._fiber is not None
        random, kept, momentum = torch.get_rng_state(), self._kept(), self._has_momentum()
        with failing_as(CLAUSE), self._hidden(_READS) as written, self._shown(), NotStackable.noted() as refused:
            self._fiber.resume()
            if self._fiber.done:
                self._fiber.result()
            if refused:  # also what the hook has caught
                raise refused[0]
        if not torch.equal(torch.get_rng_state(), random):
            raise NotStackable(f"{CLAUSE}, which draws random numbers of torch")
        if self._kept() != kept:  # which are those of a copy
            raise NotStackable(f"{CLAUSE}, which changes attributes of the optimizer")
        if self._has_momentum() != momentum:  # of which the first step keeps another buffer than the next ones
            raise NotStackable(f"{CLAUSE}, which turns momentum on or off")
        return written

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

    def _has_momentum(self) -> list[bool]:
        return [bool(group.get("momentum")) for group in self._optimizer.param_groups]

    def _kept(self) -> list[dict[str, Any]]:
        """Return what the hook may write elsewhere than in the options."""
        own = [vars(self._wrapped), {key: value for key, value in vars(self._seen).items() if key not in _OF_GROUPS}]
        return [_copied(values) for values in (*own, self._seen.defaults)]


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
