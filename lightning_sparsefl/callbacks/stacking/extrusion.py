"""Penalties and raised learning rates of several clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, Optimizer, Rprop

from lightning_sparsefl.callbacks.budget_aware_extrusion import BudgetAwareExtrusion, decay
from lightning_sparsefl.callbacks.stacking.base import Leaves, StackedCallback, column
from lightning_sparsefl.callbacks.stacking.trees import stack_trees
from lightning_sparsefl.errors import InvalidOption


class StackedExtrusion(StackedCallback):
    """Counterpart of :class:`BudgetAwareExtrusion`.

    The optimizer steps at the largest of the clients' learning rates, and each client's change is then scaled down to
    its own, to which changes are proportional.

    Args:
        callbacks: One callback for each client.
        totals: Number of optimizer steps of each client's fit.
    """

    per_client = ("low",)
    in_order = ("totals",)
    changes_rates = True

    def __init__(self, callbacks: Sequence[BudgetAwareExtrusion], totals: Sequence[int]) -> None:
        self.of, self._given, self.totals = callbacks[0], callbacks, list(totals)
        self.low: dict[str, Tensor] = {}
        self._groups: list[tuple[dict[str, Any], float, list[str]]] = []
        self._names: dict[int, str] = {}
        self._rates: list[tuple[dict[str, Any], float]] = []
        self._before: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}

    def start(self, leaves: Leaves) -> None:
        """Choose the weights to penalize."""
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        each = [
            callback.smallest({name: leaves[name].detach()[place] for name in callback.masks or ()})
            for place, callback in enumerate(self._given)
        ]
        self.low = {name: low.to(leaves[name].device) for name, low in stack_trees(each).items()}

    def prepare(self, optimizer: Optimizer, clips: bool, chain: Sequence[StackedCallback]) -> None:
        """Store the first learning rates.

        Raises:
            InvalidOption: If changes are not proportional to the learning rate.
        """
        if isinstance(optimizer, (ASGD, Rprop)):
            raise InvalidOption(f"clients have learning rates of their own, which {type(optimizer).__name__} keeps")
        for group in optimizer.param_groups:
            names = [self._names[id(leaf)] for leaf in group["params"]]
            self._groups.append((group, float(group["lr"]), names))

    @torch.no_grad()
    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Add the gradient of the penalty, and raise the learning rates."""
        self._rates, self._before, self._scales = [], {}, {}  # not those of the stack that these clients are a part of
        sizes = torch.zeros(len(self.totals), dtype=torch.float64)
        for name, mask in self.low.items():
            weight = leaves[name]
            low = weight * mask
            sizes += low.flatten(1).abs().sum(1).cpu()
            if weight.grad is not None and self.of.strength:
                norms = low.flatten(1).norm(dim=1)
                factors = torch.where(norms > 0, self.of.strength / norms, 0.0)
                weight.grad.addcmul_(low, column(factors, low).expand_as(low))
        raised = [
            self.of.psi * decay(step, total) * math.tanh(size / 2)
            for step, total, size in zip(steps, self.totals, sizes.tolist(), strict=True)
        ]
        self._raise(leaves, raised)

    def _raise(self, leaves: Leaves, factors: Sequence[float]) -> None:
        """Set the rate of each group to the largest of its clients, and remember what scales the others down."""
        for group, first, names in self._groups:
            now = float(group["lr"])
            rates = [min(self.of.max_lr, max(now, factor * first)) for factor in factors]
            most = max(rates)
            self._rates.append((group, group["lr"]))
            group["lr"] = most
            if min(rates) < most:
                scales = torch.tensor([rate / most for rate in rates], dtype=torch.float64)
                self._before |= {name: leaves[name].detach().clone() for name in names}
                self._scales |= dict.fromkeys(names, scales)

    @torch.no_grad()
    def after_step(self, leaves: Leaves) -> None:
        """Scale each client's change to its own rate, and restore the rates, which schedules read."""
        for name, before in self._before.items():
            leaf = leaves[name]
            leaf.copy_(torch.lerp(before, leaf, column(self._scales[name], leaf).expand_as(leaf)))
        for group, rate in self._rates:
            group["lr"] = rate
