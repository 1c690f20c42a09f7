"""A training step of a stack that was recorded from one batch, for the batches after it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.federated.local.fast.direct_calls import run_backward
from lightning_sparsefl.federated.local.stacked.batch_pass import BatchPass
from lightning_sparsefl.federated.local.stacked.leaves import map_tensors
from lightning_sparsefl.federated.local.stacked.logs import Logged
from lightning_sparsefl.federated.local.stacked.recording.operations import OperationRecorder, Operations


class NotRecordable(Exception):
    """A training step depends on something besides its batch, the weights and the module."""


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


class RecordedStep:
    """Forward and backward pass of a stack's training step as a function of the leaves and the batch.

    Args:
        operations: Function of the leaves in their order, and of the batch's tensors.
        names: Names of the leaves that get a gradient.
        logged: Calls of `self.log` in the recorded step.
    """

    def __init__(self, operations: Operations, names: Sequence[str], logged: Sequence[Logged]) -> None:
        self._operations, self._names, self._logged = operations, names, logged

    @torch.no_grad()
    def run(self, one: BatchPass) -> None:
        """Give the leaves of a batch's clients their gradients, and the log its values.

        Args:
            one: The batches.
        """
        values = self._operations(*one.leaves.values(), *tensors_of(one.batch))
        count = len(self._names)
        for name, slope in zip(self._names, values[:count], strict=True):
            one.leaves[name].grad = slope
        one.log.pending += [
            each._replace(value=value) for each, value in zip(self._logged, values[count:], strict=True)
        ]


def record(one: BatchPass, module: LightningModule, optimizer: torch.optim.Optimizer) -> RecordedStep | None:
    """Do the training step of a batch without a trace, and return it as a recorded one.

    Args:
        one: The batches.
        module: Module of the clients.
        optimizer: The module's optimizer.

    Returns:
        The step; None if it uses the number of the batch, the trainer, the options of the optimizer, the random numbers
        of Python or NumPy, or numbers from tensors.
    """
    leaves, unreadable = dict(one.leaves), Unreadable()
    copied = copy.copy(one)
    copied.number = cast(int, unreadable)
    drawn = random.getstate(), np.random.get_state()
    try:
        with (
            one.leaving_no_trace(),
            one.log.aside() as logged,
            _hidden(module, optimizer, unreadable),
            OperationRecorder([*leaves.values(), *tensors_of(one.batch)]) as recorder,
        ):
            run_backward(copied.train().sum())
        slopes = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    except Exception:
        return None
    finally:
        for leaf in leaves.values():
            leaf.grad = None
    if recorder.reason is not None or unreadable.is_read or not _is_equal_state(drawn):
        return None
    values = [each.value for each in logged]
    return RecordedStep(recorder.function([*slopes.values(), *values]), list(slopes), logged)


@contextmanager
def _hidden(module: LightningModule, optimizer: torch.optim.Optimizer, unreadable: Unreadable) -> Iterator[None]:
    """Put a stand-in in the place of the trainer and of the optimizer's options inside."""
    owners = [(vars(child), "_trainer") for child in module.modules() if isinstance(child, LightningModule)]
    owners.append((vars(optimizer), "param_groups"))
    before = [table[name] for table, name in owners]
    for table, name in owners:
        table[name] = unreadable
    try:
        yield
    finally:
        for (table, name), value in zip(owners, before, strict=True):
            table[name] = value


def _is_equal_state(drawn: tuple[Any, Any]) -> bool:
    """Return whether the generators of Python and NumPy are in the states of a moment before."""
    (name, keys, *rest), (now, own, *others) = drawn[1], np.random.get_state()
    return drawn[0] == random.getstate() and (name, rest) == (now, others) and bool(np.array_equal(keys, own))


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch in their order.

    Args:
        batch: Tensor, or mappings, lists and tuples of tensors and other values.
    """
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    return found
