"""A training step of a stack that was recorded from one batch, for the batches after it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.federated.local.fast.direct_calls import run_backward
from lightning_sparsefl.federated.local.stacked.batch_pass import BatchPass
from lightning_sparsefl.federated.local.stacked.recording.captured import Capture, CapturedOperations
from lightning_sparsefl.federated.local.stacked.recording.effects import Effects, with_effects
from lightning_sparsefl.federated.local.stacked.recording.operations import Operations
from lightning_sparsefl.federated.local.stacked.recording.tracing import trace
from lightning_sparsefl.federated.local.stacked.states.leaves import layout_of, tensors_of
from lightning_sparsefl.sparse.modes import restored


@dataclass
class RecordedStep:
    """Forward and backward pass of a stack's training step as a function of weights, batch and metric states."""

    operations: Operations | CapturedOperations
    """Operations of the leaves in their order, of the batch's tensors and of the states of metric objects, into which
    they write, with gradients, logged values and the losses as results."""
    names: Sequence[str]
    """Names of the leaves that get a gradient."""
    effects: Effects

    @torch.no_grad()
    def run(self, one: BatchPass) -> None:
        """Give the leaves of a batch's clients their gradients, and the log its values.

        Args:
            one: The batches.
        """
        values = self.operations.run(*_inputs_of(one))
        count = len(self.names)
        for name, slope in zip(self.names, values[:count], strict=True):
            one.leaves[name].grad = slope
        one.losses = values[-1]
        self.effects.repeat(values[count:-1], one.log, one.metrics)

    def captured(self, inputs: Sequence[Tensor], capture: Capture) -> RecordedStep:
        """Return the step with captured operations.

        Args:
            inputs: Leaves, tensors of a batch, and states of metric objects.
            capture: Function that captures operations.
        """
        return replace(self, operations=CapturedOperations(self.operations, inputs, capture))


def _inputs_of(one: BatchPass) -> list[Tensor]:
    return [*one.leaves.values(), *tensors_of(one.batch), *one.metrics.tensors]


class TrainingPass:
    """The training step of one batch of each client, for a :class:`~.recorder.PassRecorder`.

    Args:
        one: The batches.
        module: Module of the clients.
        optimizer: The module's optimizer.
        call: Function that does the step by calling the module.
    """

    def __init__(
        self, one: BatchPass, module: LightningModule, optimizer: torch.optim.Optimizer, call: Callable[[], None]
    ) -> None:
        self._one, self._module, self._optimizer, self.call = one, module, optimizer, call

    @property
    def key(self) -> Hashable:
        """Number of clients, layout of the batch, and key of the states of metric objects."""
        return (self._one.part.size, layout_of(self._one.batch), self._one.metrics.key)

    @property
    def inputs(self) -> list[Tensor]:
        """Leaves, tensors of the batch, and states of metric objects."""
        return _inputs_of(self._one)

    def repeat(self, recorded: RecordedStep) -> None:
        """Do the step as a recorded one.

        Args:
            recorded: Recorded step of the same key.
        """
        recorded.run(self._one)

    def results(self) -> list[Tensor]:
        """Return gradients, weights, statistics, logged values and metric states of the step that has been done."""
        leaves = self._one.leaves.values()
        slopes = (leaf.grad for leaf in leaves if leaf.grad is not None)
        logged = (each.value for each in self._one.log.pending)
        kept = (tensor.detach().clone() for tensor in (*leaves, *self._one.metrics.tensors))
        return [*slopes, *kept, *logged]

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Undo what is done within the context."""
        leaves = self._one.leaves.values()
        written = [*tensors_of(self._one.batch), *(leaf for leaf in leaves if leaf.requires_grad)]
        try:
            with self._one.leaving_no_trace(), restored(written):
                yield
        finally:
            for leaf in leaves:
                leaf.grad = None

    def record(self) -> RecordedStep | None:
        """Do the step without a trace, and return it as a recorded one; None if it cannot be repeated."""
        one, leaves = copy.copy(self._one), dict(self._one.leaves)
        names: list[str] = []

        def work(number: Any) -> list[Tensor]:
            one.number = cast(int, number)
            run_backward(one.train().sum())
            slopes = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
            names.extend(slopes)
            return [*slopes.values(), *(each.value for each in one.log.pending), one.losses]

        with self.leaving_no_trace():
            found = with_effects(lambda: trace(work, self.inputs, self._module, self._optimizer), one.log, one.metrics)
            return None if found is None else RecordedStep(found[0], names, found[1])
