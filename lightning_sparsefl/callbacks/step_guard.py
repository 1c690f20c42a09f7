"""Calls around every step of an optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, Protocol, runtime_checkable

from torch.optim import LBFGS

from lightning_sparsefl.errors import InvalidOption


@runtime_checkable
class StepListener(Protocol):
    """An object that is called around the steps of an optimizer."""

    def before_loss(self, again: bool) -> None:
        """Act before a closure evaluates the loss; `again` = a second or later time within one step."""

    def before_update(self, optimizer: Any) -> None:
        """Act when gradients are there, and before the optimizer reads them."""

    def after_step(self, optimizer: Any) -> None:
        """Act after the step."""


def refuse_lbfgs(owner: object, optimizers: Iterable[Any], why: str) -> None:
    """Raise :class:`InvalidOption` if one of the optimizers is LBFGS.

    Args:
        owner: Callback that does not support it.
        optimizers: Optimizers of the trainer.
        why: Reason, as a relative clause about LBFGS.

    Example:
        >>> import torch
        >>> refuse_lbfgs("a callback", [torch.optim.SGD([torch.ones(1)])], "which evaluates the loss in its step")
    """
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise InvalidOption(
            f"`{type(owner).__name__}` does not support LBFGS, {why}; expected another optimizer, such as SGD or Adam."
        )


class StepGuard:
    """Calls of a listener around all steps of one optimizer object; several listeners are called in their order.

    Hooks of PyTorch would not do: those of a base class fire within ``super().step()``, before a subclass writes, and
    those that a user registers later come last. The replacement of ``step`` surrounds all of them. It also wraps the
    closure, so that the listener acts before each evaluation of the loss: SAM and LBFGS evaluate several times within a
    step.

    Args:
        optimizer: The optimizer, whose ``step`` takes a closure first, or none.
        listener: The object to call.

    Example:
        >>> import torch
        >>> class Listener:
        ...     def before_loss(self, again): print("loss")
        ...     def before_update(self, optimizer): print("update")
        ...     def after_step(self, optimizer): print("stepped")
        >>> optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
        >>> guard = StepGuard(optimizer, Listener())
        >>> optimizer.step(lambda: None)
        loss
        update
        stepped
        >>> guard.remove()
        >>> optimizer.step()
    """

    def __init__(self, optimizer: Any, listener: StepListener) -> None:
        self.optimizer, self._listener = optimizer, listener
        self._step = _GuardedStep.of(optimizer)
        self._step.listeners.append(listener)

    def remove(self) -> None:
        """Stop calling the listener; without another one, restore the optimizer's former ``step``."""
        left = [each for each in self._step.listeners if each is not self._listener]
        self._step.listeners = left
        if not left:
            self._step.restore()


def prepare_step(optimizer: Any) -> None:
    """Call the listeners of an optimizer as its next step would do before it reads gradients, which it then does not.

    Args:
        optimizer: The optimizer, whose next step takes no closure; nothing happens without listeners.

    Example:
        >>> import torch
        >>> class Listener:
        ...     def before_update(self, optimizer): print("update")
        ...     def after_step(self, optimizer): print("stepped")
        >>> optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
        >>> guard = StepGuard(optimizer, Listener())
        >>> prepare_step(optimizer)
        update
        >>> optimizer.step()
        stepped
    """
    guarded = getattr(vars(optimizer).get("step"), "guarded", None)
    if guarded is not None:
        guarded.prepare()


class _GuardedStep:
    """Replacement of the ``step`` of one optimizer object by one that also calls listeners.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.listeners: list[StepListener] = []
        self._prepared = False
        self._previous = vars(optimizer).get("step")
        self._inner = optimizer.step
        self._installed = MethodType(self._function(), optimizer)
        optimizer.step = self._installed

    @classmethod
    def of(cls, optimizer: Any) -> _GuardedStep:
        """Return the replacement that an optimizer has; a new one if it has none, or what has replaced it since."""
        now = vars(optimizer).get("step")
        there = getattr(now, "guarded", None)
        return there if there is not None and there._installed is now else cls(optimizer)

    def _function(self) -> Callable[..., Any]:
        # a function of `self` and with the attributes of the former one, since schedulers replace `step` likewise
        @functools.wraps(getattr(self._inner, "__func__", self._inner))
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return self._step(args, kwargs) if self.listeners else self._inner(*args, **kwargs)

        step.guarded = self  # type: ignore[attr-defined]
        return step

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and callable(args[0]):
            args = (self._wrapped(args[0]), *args[1:])
        elif callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": self._wrapped(kwargs["closure"])}
        elif not self._prepared:
            self._before_update()
        self._prepared = False
        result = self._inner(*args, **kwargs)
        for listener in self.listeners:
            listener.after_step(self.optimizer)
        return result

    def prepare(self) -> None:
        """Call the listeners before the next step."""
        self._before_update()
        self._prepared = True

    def _before_update(self) -> None:
        for listener in self.listeners:
            listener.before_update(self.optimizer)

    def _wrapped(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        evaluations = 0

        def evaluate() -> Any:
            nonlocal evaluations
            for listener in self.listeners:
                listener.before_loss(evaluations > 0)
            loss = closure()
            self._before_update()
            evaluations += 1
            return loss

        return evaluate

    def restore(self) -> None:
        """Restore the former ``step``; if it has been replaced since, only stop calling listeners."""
        if vars(self.optimizer).get("step") is not self._installed:
            return
        if self._previous is None:
            del self.optimizer.step
        else:
            self.optimizer.step = self._previous
