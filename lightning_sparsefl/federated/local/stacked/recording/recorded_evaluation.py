"""A validation or test step of a stack that was recorded from one batch, for the batches after it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from lightning_sparsefl.federated.local.fast.steps import StepCaller
from lightning_sparsefl.federated.local.stacked.logs import EvaluationLog
from lightning_sparsefl.federated.local.stacked.metrics.states import MetricRows
from lightning_sparsefl.federated.local.stacked.recording.captured import Capture, CapturedOperations
from lightning_sparsefl.federated.local.stacked.recording.effects import Effects, with_effects
from lightning_sparsefl.federated.local.stacked.recording.operations import Operations
from lightning_sparsefl.federated.local.stacked.recording.tracing import trace
from lightning_sparsefl.federated.local.stacked.states.leaves import StackedModule, layout_of, tensors_of
from lightning_sparsefl.sparse.modes import random_restored, restored


@dataclass
class RecordedEvaluation:
    """A step as a function of the weights, the batch and the states of metric objects, into which it writes."""

    operations: Operations | CapturedOperations
    effects: Effects

    def captured(self, inputs: Sequence[Tensor], capture: Capture) -> RecordedEvaluation:
        """Return the step with captured operations.

        Args:
            inputs: Weights, tensors of a batch, and states of metric objects.
            capture: Function that captures operations.
        """
        return replace(self, operations=CapturedOperations(self.operations, inputs, capture))


@dataclass
class EvaluationPass:
    """One batch of each of several clients that are evaluated, for a :class:`~.recorder.PassRecorder`."""

    part: StackedModule
    """Tensors of the clients."""
    step: StepCaller
    """Caller of the module's step."""
    batch: Any
    """Batch whose tensors have the clients in dimension 0."""
    number: int
    """Number of the batch."""
    log: EvaluationLog
    metrics: MetricRows
    """States of the module's metric objects."""
    has_output: bool = False
    """Whether a hook sees what the step returns."""
    output: Any = None
    """What the step has returned, if :attr:`has_output`."""

    @property
    def key(self) -> Hashable:
        """Number of clients, layout of the batch, and key of the states."""
        return (self.part.size, layout_of(self.batch), self.metrics.key)

    def call(self) -> None:
        """Do the step by calling the module."""
        self._do(self.number)

    def _do(self, number: int) -> None:
        def run(batch: Any, level: int) -> Any:
            self.log.level = level
            with self.metrics.shown(level):
                output = self.step(batch, number)
            return output if self.has_output else None

        self.output = self.part.call(run, self.batch)

    def repeat(self, recorded: RecordedEvaluation) -> None:
        """Do the step as a recorded one.

        Args:
            recorded: Recorded step of the same key.
        """
        values = recorded.operations.run(*self.inputs)
        recorded.effects.repeat(values, self.log, self.metrics)

    @property
    def inputs(self) -> list[Tensor]:
        """Weights, tensors of the batch, and states of metric objects."""
        return [*self.part.leaves.values(), *tensors_of(self.batch), *self.metrics.tensors]

    def results(self) -> list[Tensor]:
        """Return logged values, weights and states of metric objects after the step that has been done."""
        tensors = (*self.metrics.tensors, *self.part.leaves.values())
        return [*(each.value for each in self.log.pending), *(tensor.detach().clone() for tensor in tensors)]

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Undo what is done within the context."""
        leaves = [leaf for name, leaf in self.part.leaves.items() if name not in self.part.shared]
        with (
            restored([*leaves, *tensors_of(self.batch)]),
            self.log.aside(),
            self.metrics.kept(),
            random_restored(self.part.leaves.values()),
        ):
            yield

    def record(self) -> RecordedEvaluation | None:
        """Do the step without a trace, and return it as a recorded one; None if it cannot be repeated."""

        def work(number: Any) -> list[Tensor]:
            self._do(cast(int, number))
            return [each.value for each in self.log.pending]

        with self.leaving_no_trace():
            found = with_effects(
                lambda: trace(work, self.inputs, self.part.module),  # type: ignore[arg-type]
                self.log,
                self.metrics,
            )
            return None if found is None else RecordedEvaluation(*found)
