"""The operations of a module's step as a function, found by doing the step once with stand-ins for what may change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.overrides import TorchFunctionMode

from lightning_sparsefl.federated.local.stacked.recording.operations import OperationRecorder, Operations
from lightning_sparsefl.federated.local.stacked.states.undo import GlobalDraws

_READERS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})
"""Functions of a tensor that read its numbers and are no operations of torch."""


_OF_SCHEDULERS = frozenset({"_last_lr", "last_epoch", "_step_count", "optimizer", "base_lrs"})
_OF_TRAINERS = frozenset({"fit_loop", "state", "_logger_connector", "strategy", "optimizers"})
"""Attributes that tell where a fit is."""


class NotRecordable(Exception):
    """A step depends on something besides its batch, the weights and the module."""


class Unreadable:
    """Stand-in for what differs from step to step: whatever is done with it raises, and is remembered.

    Attributes:
        is_read: Whether anything has been done with it.
    """

    is_read: bool

    def __init__(self) -> None:
        vars(self)["is_read"] = False

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        vars(self)["is_read"] = True
        raise NotRecordable

    __getattr__ = __setattr__ = __getitem__ = __iter__ = __len__ = __contains__ = __call__ = _refuse
    __bool__ = __int__ = __index__ = __float__ = __str__ = __repr__ = __format__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __neg__ = _refuse


class _Reading(TorchFunctionMode):
    """Context in which numbers cannot be read out of tensors, not even of those that the clients share."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, unless it reads numbers."""
        if getattr(func, "__name__", "") in _READERS:
            raise NotRecordable
        return func(*args, **(kwargs or {}))


def trace(
    work: Callable[[Any], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    module: LightningModule,
    optimizer: torch.optim.Optimizer | None = None,
) -> Operations | None:
    """Do some work, and return its operations.

    Args:
        work: Function of a stand-in for the number of the batch; returns the results.
        inputs: Tensors that are arguments of the returned function.
        module: Module of the clients.
        optimizer: The module's optimizer, if there is one.

    Returns:
        Operations of tensors in the places of the inputs, with the results; None if the work fails, or uses the number
        of the batch, the trainer, the options of the optimizer, the random numbers of Python or NumPy, or numbers from
        tensors.
    """
    unreadable = Unreadable()
    draws = GlobalDraws()
    try:
        with _hidden(module, optimizer, unreadable), _Reading(), OperationRecorder(inputs) as recorder:
            results = work(unreadable)
    except Exception:
        return None
    if recorder.reason is not None or unreadable.is_read or draws.source() is not None:
        return None
    operations: Operations = recorder.operations(results)
    return operations


@contextmanager
def _hidden(module: LightningModule, optimizer: torch.optim.Optimizer | None, unreadable: Unreadable) -> Iterator[None]:
    """Replace the trainer, schedulers and the optimizer's options by a stand-in within the context.

    What the trainer, its loop and the schedulers hold is replaced as well, since a module may reach them in other ways.
    """
    trainer = module._trainer
    owners = [
        (vars(child), name)
        for child in module.modules()
        for name, value in vars(child).items()
        if name == "_trainer" or (value is trainer and value is not None) or isinstance(value, (LRScheduler, Optimizer))
    ]
    if optimizer is not None:
        owners.append((vars(optimizer), "param_groups"))
    if trainer is not None:
        schedulers = [vars(config.scheduler) for config in trainer.lr_scheduler_configs]
        owners += [(table, name) for table in schedulers for name in _OF_SCHEDULERS & table.keys()]
        owners += [(vars(trainer), name) for name in _OF_TRAINERS & vars(trainer).keys()]
        owners += [(vars(trainer.fit_loop), name) for name in vars(trainer.fit_loop)]
    before = [table[name] for table, name in owners]
    for table, name in owners:
        table[name] = unreadable
    try:
        yield
    finally:
        for (table, name), value in zip(owners, before, strict=True):
            table[name] = value
