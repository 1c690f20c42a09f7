"""The choice between calling a module's step and repeating a recorded one.

Python and the dispatch of torch take more than half of the time of a small network's step. A step is recorded when its
shapes have occurred a few times, and the recording is then compared with one more call: only if gradients, statistics,
logged values and the states of metric objects have the same bits are the steps after it repeated. So a recording
changes no result. On a CUDA device, where launching its kernels takes most of the time, a recorded step is captured
as a graph, which replaces it if it gives the same bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_sparsefl.federated.local.isolation import HOOKS
from lightning_sparsefl.federated.local.stacked.fused import order_in_memory
from lightning_sparsefl.federated.local.stacked.recording.captured import Capture
from lightning_sparsefl.federated.local.stacked.states.leaves import StackedModule
from lightning_sparsefl.federated.local.stacked.states.undo import ModuleStates

_MOST = 64
"""Largest number of kept recordings, so that cohorts of ever new sizes do not fill the memory."""
_CHANGES = 3
"""Number of fits or evaluations that found the module changed, from which on nothing is recorded."""


class Recordable(Protocol):
    """A step of a module for one batch of each of several clients."""

    @property
    def key(self) -> Hashable:
        """What the operations of the step depend on, besides the module and the layout of its tensors."""
        ...

    def call(self) -> None:
        """Do the step by calling the module."""
        ...

    @property
    def inputs(self) -> Sequence[Tensor]:
        """Tensors that the operations read."""
        ...

    def repeat(self, recorded: Any) -> None:
        """Do the step as a recorded one."""
        ...

    def record(self) -> Any:
        """Do the step without a trace, and return it as a recorded one; None if it cannot be repeated."""
        ...

    def results(self) -> Sequence[Tensor]:
        """Return what the step that has been done has given."""
        ...

    def leaving_no_trace(self) -> AbstractContextManager[None]:
        """Return a context that undoes what is done within it."""
        ...


@dataclass
class _Known:
    """What is known of the steps of one key."""

    calls: int = 0
    candidate: Any = None
    """Recorded step that the next call is compared with."""
    proven: Any = None
    """Recorded step that has given what a call gave."""
    is_captured: bool = False
    """Whether its capture has been tried."""


class PassRecorder:
    """Recorded steps of one module, over all of its fits or all of its evaluations.

    Args:
        module: Module of the clients.
        capture: Function that captures operations; None = they are done one by one.
    """

    after = 4
    """Number of calls after which a step of some shapes is recorded."""

    def __init__(self, module: LightningModule, capture: Capture | None = None) -> None:
        self._module, self._capture = module, capture
        self._steps: dict[Hashable, dict[Hashable, _Known]] = {}
        """By the layout of a stack's tensors."""
        self._current: dict[Hashable, _Known] = {}
        """Those of the fit or evaluation that runs."""
        self._states: ModuleStates | None = None
        self._structure: list[tuple[Any, ...]] = []
        self._changes = 0

    def start(self, whole: StackedModule, states: ModuleStates, name: str = "training") -> None:
        """Begin a fit or an evaluation; recordings of a module with other attributes or layers are dropped.

        Args:
            whole: Tensors of all clients.
            states: The module's attributes before the first step.
            name: Name of the steps.
        """
        structure = structure_of(self._module)
        known = self._states is not None and is_same_structure(structure, self._structure)
        if self._states is None or not known or self._states.changed() is not None:
            self._changes += self._states is not None
            self._steps, self._states, self._structure = {}, states, structure
        layout = tuple(
            (key, leaf.shape[1:], leaf.stride(), leaf.dtype, leaf.requires_grad, key in whole.shared)
            for key, leaf in whole.leaves.items()
        )
        self._current = self._steps.setdefault((name, layout), {})

    def clear(self) -> None:
        """Drop all recordings, whose graphs hold memory of the device."""
        self._steps, self._current = {}, {}

    def do(self, one: Recordable) -> Any:
        """Do a step.

        Args:
            one: The step.

        Returns:
            The recorded step that was repeated; None if the module was called.
        """
        known = self._known(one.key)
        if known is None:
            one.call()
            return None
        if known.proven is not None:
            if self._capture is not None and not known.is_captured:
                known.proven, known.is_captured = _captured(known.proven, one, self._capture), True
            one.repeat(known.proven)
            return known.proven
        candidate, known.candidate = known.candidate, None
        if known.calls == self.after:
            known.candidate = one.record()
        known.calls += 1
        if candidate is None:
            one.call()
            return None
        with _in_one_order():
            expected = _results_of(candidate, one)
            one.call()
        if expected is not None and _same(expected, one.results()):
            known.proven = candidate
        return None

    def _known(self, key: Hashable) -> _Known | None:
        known = self._current.get(key)
        if known is None and self._changes < _CHANGES and sum(map(len, self._steps.values())) < _MOST:
            known = self._current[key] = _Known()
        return known


def _results_of(recorded: Any, one: Recordable) -> Sequence[Tensor] | None:
    """Return what a recorded step gives, without a trace; None if it fails."""
    try:
        with one.leaving_no_trace():
            one.repeat(recorded)
            return one.results()
    except Exception:
        return None


def _captured(recorded: Any, one: Recordable, capture: Capture) -> Any:
    """Return a recorded step with captured operations if it then gives the same, else the step itself."""
    with _in_one_order():
        try:
            with one.leaving_no_trace():
                captured = recorded.captured(one.inputs, capture)
        except Exception:
            return recorded
        ours, theirs = _results_of(captured, one), _results_of(recorded, one)
    return captured if ours is not None and theirs is not None and _same(ours, theirs) else recorded


@contextmanager
def _in_one_order() -> Iterator[None]:
    """Exclude algorithms of cuDNN that add in an order of their own, since bits are compared within the context."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def _same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Return whether tensors have the same numbers in the same types and layouts."""
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(
        a.dtype is b.dtype and order_in_memory(a) == order_in_memory(b) and torch.equal(a, b) for a, b in pairs
    )


def structure_of(module: LightningModule) -> list[tuple[Any, ...]]:
    """Return the layers of a module with their modes and hooks, which :class:`ModuleStates` does not cover.

    Args:
        module: Module of the user.
    """
    return [
        (child, child.training, *(tuple(getattr(child, name, ())) for name in HOOKS), _settings(child))
        for child in module.modules()
    ]


def _settings(child: Any) -> tuple[Any, ...]:
    """Return the options of a metric object, not all of which :class:`ModuleStates` covers; else nothing."""
    if not isinstance(child, Metric):
        return ()
    plain = (int, float, str, bool, tuple, type(None), torch.dtype)
    return tuple((key, value) for key, value in vars(child).items() if key[0] != "_" and isinstance(value, plain))


def is_same_structure(now: Sequence[tuple[Any, ...]], before: Sequence[tuple[Any, ...]]) -> bool:
    """Return whether the layers are the same objects with the same modes, hooks and options.

    Args:
        now: Result of :func:`structure_of`.
        before: An earlier result.
    """
    return len(now) == len(before) and all(
        child is other and rest == earlier for (child, *rest), (other, *earlier) in zip(now, before, strict=True)
    )
