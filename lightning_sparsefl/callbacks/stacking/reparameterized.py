"""Numbers of several clients of which their weights are a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparsefl.callbacks.layers import stepped_by
from lightning_sparsefl.callbacks.stacking.base import Leaves, StackedCallback
from lightning_sparsefl.callbacks.unit_thresholds import UnitThresholds


class StackedReparameterized(StackedCallback):
    """Counterpart of the callbacks of :class:`Reparameterized`: each acts on the rows of its own client."""

    in_order: ClassVar[tuple[str, ...]] = ("callbacks",)

    def __init__(self, callbacks: Sequence[Any], names: Sequence[str]) -> None:
        self.callbacks, self.names = callbacks, names
        self._stepped: list[str] = []
        self._names: dict[int, str] = {}

    def start(self, leaves: Leaves) -> None:
        """Show each client's function of theta in its rows."""
        for place, callback in enumerate(self.callbacks):
            callback.begin({name: leaves[name].detach()[place] for name in self.names})
        self._names = {id(leaves[name]): name for name in self.names}

    def prepare(self, optimizer: Optimizer, clips: bool, chain: Sequence[StackedCallback]) -> None:
        """Find the weights that are stepped; the others stay as they were shown first."""
        ours = stepped_by(optimizer)
        self._stepped = [name for leaf, name in self._names.items() if leaf in ours]

    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Put theta and its gradients into the rows."""
        for place, callback in enumerate(self.callbacks):
            grads = {name: leaves[name].grad for name in self._stepped}
            callback.enter({name: None if grad is None else grad[place] for name, grad in grads.items()})

    def after_step(self, leaves: Leaves) -> None:
        """Show the function of the stepped theta."""
        for callback in self.callbacks:
            callback.leave()

    def finish(self, callbacks: Sequence[Any]) -> None:
        """Release the rows; theta stays in the callbacks."""
        for callback in callbacks:
            callback.release()


class StackedThresholds(StackedReparameterized):
    """Counterpart of :class:`UnitThresholds`: the thresholds of all clients are leaves of the optimizer."""

    def __init__(self, callbacks: Sequence[UnitThresholds], names: Sequence[str]) -> None:
        super().__init__(callbacks, names)
        self.thresholds: dict[str, Tensor] = {}

    def start(self, leaves: Leaves) -> None:
        """Show the units that are on, and let each client's thresholds be rows of the leaves."""
        super().start(leaves)
        for name in self.names:
            rows = torch.stack([callback._trained[name].detach() for callback in self.callbacks])
            self.thresholds[name] = rows.requires_grad_()
            for callback, row in zip(self.callbacks, rows.detach(), strict=True):
                callback._trained[name] = nn.Parameter(row)

    def further(self) -> dict[str, tuple[Tensor, str]]:
        """Return the thresholds."""
        return {_key(name): (thresholds, name) for name, thresholds in self.thresholds.items()}

    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Put theta, its gradients and those of the thresholds into the rows."""
        super().before_step(leaves, steps)
        for name in self._stepped:
            if leaves[name].grad is not None:
                slopes = [callback._trained[name].grad for callback in self.callbacks]
                leaves[_key(name)].grad = torch.stack(slopes)


def _key(name: str) -> str:
    return f"{name} (thresholds)"
