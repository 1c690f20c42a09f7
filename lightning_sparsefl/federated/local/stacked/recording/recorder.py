"""The choice between calling a training step and repeating a recorded one.

Python and the dispatch of torch take more than half of the time of a small network's step. A step is recorded when its
shapes have come a few times, and the recording is then compared with one more call: only if gradients, statistics and
logged values have the same bits are the steps after it repeated. So a recording changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.federated.local.stacked.batch_pass import BatchPass
from lightning_sparsefl.federated.local.stacked.fused import order_in_memory
from lightning_sparsefl.federated.local.stacked.leaves import StackedModule
from lightning_sparsefl.federated.local.stacked.recording.recorded_step import RecordedStep, record, tensors_of
from lightning_sparsefl.federated.local.stacked.undo import ModuleStates

_MOST = 64
"""Largest number of kept recordings, so that cohorts of ever new sizes do not fill the memory."""
_CHANGES = 3
"""Number of fits that found the module changed, from which on nothing is recorded."""


@dataclass
class _Step:
    """What is known of the steps of some shapes."""

    calls: int = 0
    candidate: RecordedStep | None = None
    """Recorded step that the next call is compared with."""
    proven: RecordedStep | None = None
    """Recorded step that has given what a call gave."""


_Key = tuple[int, tuple[Hashable, ...]]
"""Number of clients, and shapes of the batch's tensors."""


class StepRecorder:
    """Recorded steps of one module, over all of its fits.

    Args:
        module: Module of the clients.
    """

    after = 4
    """Number of calls after which a step of some shapes is recorded."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._steps: dict[Hashable, dict[_Key, _Step]] = {}
        """By the layout of a stack's tensors."""
        self._current: dict[_Key, _Step] = {}
        """Those of the fit that runs."""
        self._states: ModuleStates | None = None
        self._structure: tuple[Any, ...] = ()
        self._changes = 0

    def start(self, whole: StackedModule, states: ModuleStates) -> None:
        """Begin a fit; recordings of a module with other attributes or layers are dropped.

        Args:
            whole: Tensors of all clients of the fit.
            states: The module's attributes before the first step.
        """
        structure = _structure_of(self._module)
        if self._states is None or structure != self._structure or self._states.changed() is not None:
            self._changes += self._states is not None
            self._steps, self._states, self._structure = {}, states, structure
        layout = tuple(
            (name, leaf.shape[1:], leaf.stride(), leaf.dtype, leaf.requires_grad, name in whole.shared)
            for name, leaf in whole.leaves.items()
        )
        self._current = self._steps.setdefault(layout, {})

    def step(self, one: BatchPass, optimizer: torch.optim.Optimizer, call: Callable[[], None]) -> RecordedStep | None:
        """Give the clients of a batch their gradients and logged values.

        Args:
            one: The batches.
            optimizer: The module's optimizer.
            call: Function that does so by calling the training step.

        Returns:
            The recorded step that was repeated; None if the training step was called.
        """
        known = self._known(one)
        if known is None:
            call()
            return None
        if known.proven is not None:
            known.proven.run(one)
            return known.proven
        candidate, known.candidate = known.candidate, None
        expected = None if candidate is None else self._results_of(candidate, one)
        if known.calls == self.after:
            known.candidate = record(one, self._module, optimizer)
        known.calls += 1
        call()
        if expected is not None and _same(expected, _results(one)):
            known.proven = candidate
        return None

    def _known(self, one: BatchPass) -> _Step | None:
        shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors_of(one.batch))
        key = (one.part.size, shapes)
        known = self._current.get(key)
        if known is None and self._changes < _CHANGES and sum(map(len, self._steps.values())) < _MOST:
            known = self._current[key] = _Step()
        return known

    @staticmethod
    def _results_of(recorded: RecordedStep, one: BatchPass) -> Sequence[Tensor] | None:
        """Return what a recorded step gives, without a trace; None if it fails."""
        try:
            with one.leaving_no_trace():
                recorded.run(one)
                return _results(one)
        except Exception:
            return None
        finally:
            for leaf in one.leaves.values():
                leaf.grad = None


def _results(one: BatchPass) -> list[Tensor]:
    """Return gradients, statistics and logged values of a step that has been done."""
    slopes = [leaf.grad if leaf.requires_grad else leaf.clone() for leaf in one.leaves.values()]
    return [*(slope for slope in slopes if slope is not None), *(each.value for each in one.log.pending)]


def _same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Return whether tensors have the same numbers in the same layouts."""
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(
        order_in_memory(a) == order_in_memory(b) and torch.equal(a, b) for a, b in pairs
    )


def _structure_of(module: LightningModule) -> tuple[Any, ...]:
    """Return the layers of a module with their modes and hooks, which :class:`ModuleStates` does not cover."""
    return tuple(
        (child, child.training, tuple(child._forward_hooks), tuple(child._forward_pre_hooks))
        for child in module.modules()
    )
