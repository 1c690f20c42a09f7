"""The user's optimizer on the leaves of several clients.

An optimizer that treats every number of a tensor alike does for S clients at once what it does for one. What it keeps
beside tensors of the weights' shape, such as Adam's number of steps, is the same for clients that take their steps
together, which share it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_sparsefl.federated.local.fast.direct_calls import step_optimizer
from lightning_sparsefl.federated.local.stacked.fused import choose_kernel, may_be_fused
from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.reading.stack_reader import equal_ranges

ELEMENTWISE: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Optimizers of torch that treat every number of a tensor alike; subclasses are not included."""

Shared = list[dict[str, Any]]
"""What an optimizer keeps beside tensors of the weights' shape, for each parameter in the order of the groups."""


@dataclass
class _Part:
    """The optimizer of all or of some clients."""

    optimizer: torch.optim.Optimizer
    leaves: Mapping[Tensor, Tensor] | None = None
    """Leaves of some clients, by those of all."""
    states: Sequence[Tensor] = ()
    """Tensors of all clients' state, of which the optimizer has rows."""
    chosen_for: tuple[Any, ...] = ()
    """What the last choice of a kernel depends on."""

    def is_of(self, leaves: Mapping[Tensor, Tensor], states: Sequence[Tensor]) -> bool:
        """Return whether the optimizer is of these leaves, and has rows of these tensors."""
        same = leaves is self.leaves and len(states) == len(self.states)
        return same and all(ours is theirs for ours, theirs in zip(states, self.states, strict=True))

    def choose_kernel(self, layouts: object | None) -> None:
        """Choose the kernel of the next step anew, unless nothing that the choice depends on has changed."""
        if layouts is None:
            choose_kernel(self.optimizer)
            self.chosen_for = ()
            return
        groups = self.optimizer.param_groups
        basis = (layouts, *((group.get("momentum"), group["weight_decay"]) for group in groups))
        if basis != self.chosen_for:
            choose_kernel(self.optimizer)
            self.chosen_for = basis if self.optimizer.state else ()


class StackedOptimizer:
    """An optimizer for several clients, which steps any range of them.

    Args:
        optimizer: Optimizer that was made for the module's own tensors; pointed at the leaves here.
        leaves: Leaf with the clients in dimension 0, by the identity of the module's own tensor.
        size: Number of clients.
        accumulates: Whether a step is made of the gradients of several batches, so that clients who have taken equal
            numbers of steps need not have had gradients of the same parameters in them.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, leaves: Mapping[int, Tensor], size: int, accumulates: bool = False
    ) -> None:
        self.optimizer, self.size, self._accumulates = optimizer, size, accumulates
        self.taken = [0] * size
        """Number of steps that each client has taken."""
        state = {}
        for group in optimizer.param_groups:
            own, group["params"] = group["params"], [leaves[id(parameter)] for parameter in group["params"]]
            for parameter in own:
                if parameter in optimizer.state:  # made ahead, as by Adagrad
                    state[leaves[id(parameter)]] = {
                        key: value.expand(size, *value.shape).clone()
                        if _is_of(value, parameter) and key != "step"  # which has the shape of a scalar parameter
                        else value
                        for key, value in optimizer.state[parameter].items()
                    }
        optimizer.state.clear()
        optimizer.state.update(state)
        self._moved = {leaf: [False] * size for leaf in leaves.values()}
        """Whether a client's tensor has been stepped; a step without its gradient does nothing."""
        self._ahead = {key for entries in state.values() for key in entries}
        self._shared: list[Shared] = [self._read(optimizer)] * size
        """What is kept for each client. Those that step together share it; the number of steps alone does not tell it,
        since a step leaves out parameters without a gradient."""
        self._shares = True
        """Whether anything is kept beside tensors of the weights' shape; known after the first step with gradients."""
        self._fuses = may_be_fused(optimizer)
        self._all = _Part(optimizer)
        self._parts: dict[tuple[int, int], _Part] = {}
        """Optimizers of some clients, by the first place and the place after the last one."""

    def step(
        self, low: int, high: int, leaves: Mapping[Tensor, Tensor] | None = None, layouts: object | None = None
    ) -> None:
        """Step the clients from `low` to before `high`; those of whom the same is kept step together.

        Args:
            low: First place in the stack.
            high: Place after the last one.
            leaves: Leaves of these clients, with gradients, by the leaf of all clients; None = the leaves of all.
            layouts: Recorded step that has made the gradients, whose layouts it fixes; None = they are not known.
        """
        ranges = equal_ranges(self._kept(low, high))
        if len(ranges) == 1:
            self._step(low, high, leaves, layouts)
            return
        views = {leaf: leaf if leaves is None else leaves[leaf] for leaf in self._leaves(self.optimizer)}
        for first, end in ranges:
            parts = {leaf: _rows(view, first, end) for leaf, view in views.items()}
            self._step(low + first, low + end, parts, None)

    def _kept(self, low: int, high: int) -> list[Hashable]:
        """Return for each client what decides which others it can step with."""
        if self._shares and self._accumulates:
            return [_key_of(shared) for shared in self._shared[low:high]]
        if self._shares:
            return list(self.taken[low:high])
        return list(zip(*(moved[low:high] for moved in self._moved.values()), strict=True))

    def _step(self, low: int, high: int, leaves: Mapping[Tensor, Tensor] | None, layouts: object | None) -> None:
        """Step clients of whom the same is kept."""
        moved, count = self._moved, high - low
        part = self._all if leaves is None else self._part(low, high, leaves)
        optimizer = part.optimizer
        if self._shares:
            self._write(optimizer, self._shared[low])
        if self._fuses:
            part.choose_kernel(layouts)
        step_optimizer(optimizer)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # or a scheduler warns that it has not stepped
        for leaf in self._leaves(self.optimizer):
            if (leaf if leaves is None else leaves[leaf]).grad is not None:
                moved[leaf][low:high] = [True] * count
        if self._shares:
            self._shared[low:high] = [self._read(optimizer)] * count
            has_moved = any(moved[leaf][low] for leaf in self._leaves(self.optimizer))
            self._shares = not has_moved or any(self._shared[low])
        if leaves is not None:
            self._take_back(optimizer, low, high, leaves)
        self.taken[low:high] = [taken + 1 for taken in self.taken[low:high]]

    def _part(self, low: int, high: int, leaves: Mapping[Tensor, Tensor]) -> _Part:
        """Return the optimizer of some clients; that of their last step as long as its state has rows of the same."""
        kept = [
            (leaf, key, value)
            for leaf, entries in self.optimizer.state.items()
            for key, value in entries.items()
            if _is_of(value, leaf) and (self._moved[leaf][low] or key in self._ahead)
        ]
        known, states = self._parts.get((low, high)), [value for *_, value in kept]
        if known is None or not known.is_of(leaves, states):
            known = self._parts[low, high] = _Part(self.of(leaves), leaves, states)
            for leaf, key, value in kept:
                known.optimizer.state[leaves[leaf]][key] = value[low:high]
        for group, whole in zip(known.optimizer.param_groups, self.optimizer.param_groups, strict=True):
            group.update({key: value for key, value in whole.items() if key not in ("params", "fused")})
        return known

    @contextmanager
    def hidden(self, reads: str) -> Iterator[None]:
        """Refuse to read parameters and state of the optimizer within the context, which are those of all clients.

        Args:
            reads: Start of the clause that says what reads them.
        """
        groups, state = self.optimizer.param_groups, self.optimizer.state
        before = [group["params"] for group in groups]
        self.optimizer.state = StateOfAll(reads)  # type: ignore[assignment]
        for group in groups:
            group["params"] = _ParametersOfAll(reads)
        try:
            yield
        finally:
            for group, parameters in zip(groups, before, strict=True):
                group["params"] = parameters
            self.optimizer.state = state

    def view(self) -> Callable[[Mapping[Tensor, Tensor]], torch.optim.Optimizer]:
        """Return a function that makes the optimizer which the module sees, also where that of all clients is hidden.

        The function takes tensors by the leaf of all clients. The state of the result cannot be read.
        """
        whole = self.of({leaf: leaf for leaf in self._leaves(self.optimizer)})

        def view(leaves: Mapping[Tensor, Tensor]) -> torch.optim.Optimizer:
            optimizer = _pointed_at(whole, leaves)
            optimizer.state = StateOfAll("reads")  # type: ignore[assignment]
            return optimizer

        return view

    def of(self, leaves: Mapping[Tensor, Tensor]) -> torch.optim.Optimizer:
        """Return an optimizer of some clients, without a state.

        Args:
            leaves: Tensors of these clients, by the leaf of all clients.
        """
        part = _pointed_at(self.optimizer, leaves)
        part.__dict__.pop("step", None)  # a scheduler has bound it to the optimizer of all clients
        part._optimizer_step_pre_hooks, part._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        part.state = type(self.optimizer.state)(dict)
        return part

    def _take_back(self, part: Any, low: int, high: int, leaves: Mapping[Tensor, Tensor]) -> None:
        """Copy what the first step of some clients has made into tensors of all clients."""
        for leaf, view in leaves.items():
            entries = self.optimizer.state[leaf] if view in part.state else {}
            for key, value in part.state.get(view, {}).items():
                if not _is_of(value, view):
                    entries[key] = value
                    continue
                if not _is_of(entries.get(key), leaf):
                    entries[key] = torch.zeros_like(leaf, dtype=value.dtype, requires_grad=False)
                rows = entries[key][low:high]
                if rows.data_ptr() != value.data_ptr():
                    rows.copy_(value)

    @staticmethod
    def _leaves(optimizer: Any) -> list[Tensor]:
        return [leaf for group in optimizer.param_groups for leaf in group["params"]]

    def _read(self, optimizer: Any) -> Shared:
        shared = []
        for leaf in self._leaves(optimizer):
            entries = optimizer.state.get(leaf, {})
            shared.append(
                {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in entries.items()
                    if value is not None and not _is_of(value, leaf)
                }
            )
        return shared

    def _write(self, optimizer: Any, shared: Shared) -> None:
        for leaf, entries in zip(self._leaves(optimizer), shared, strict=True):
            if entries:
                copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in entries.items()}
                optimizer.state[leaf].update(copies)


def _key_of(shared: Shared) -> Hashable:
    """Return the values that an optimizer keeps beside tensors of the weights' shape."""
    return tuple(tuple((key, float(value)) for key, value in entries.items()) for entries in shared)


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups, such as `lr`.

    Args:
        optimizer: Optimizer of all or some of a module's parameters.
    """
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _pointed_at(optimizer: torch.optim.Optimizer, leaves: Mapping[Tensor, Tensor]) -> torch.optim.Optimizer:
    """Return a copy of an optimizer with other tensors, and with options of its own."""
    part = copy.copy(optimizer)
    part.param_groups = [
        {**group, "params": [leaves[leaf] for leaf in group["params"]]} for group in optimizer.param_groups
    ]
    return part


class _OfAll:
    """Stand-in for what an optimizer holds of all clients, which raises when it is read.

    Args:
        reads: Start of the clause that says what reads it.
    """

    what: str

    def __init__(self, reads: str) -> None:
        self._reads = reads

    def _refuse(self, *args: Any) -> NoReturn:
        raise NotStackable(f"{self._reads} the optimizer's {self.what}")

    __iter__ = __getitem__ = __len__ = __contains__ = _refuse


class _ParametersOfAll(_OfAll, list[Tensor]):
    what = "parameters, which are those of all clients"


class StateOfAll(_OfAll, dict[Tensor, Any]):
    """Stand-in for the state of an optimizer; the argument is that of the base class."""

    what = "state, which is that of all clients"

    get = items = keys = values = _OfAll._refuse


def _rows(leaf: Tensor, first: int, end: int) -> Tensor:
    """Return a view of some clients of a leaf, with their gradients."""
    rows = leaf.detach()[first:end]
    rows.grad = None if leaf.grad is None else leaf.grad[first:end]
    return rows


def _is_of(value: Any, weight: Tensor) -> bool:
    """Return whether a value of an optimizer's state belongs to the numbers of a weight one by one."""
    return isinstance(value, Tensor) and value.shape == weight.shape


@torch.no_grad()
def clip(leaves: Sequence[Tensor], limit: float, by_value: bool) -> None:
    """Clip the gradients of each client, as Lightning does for one.

    Args:
        leaves: Leaves with the clients in dimension 0.
        limit: Largest norm of all gradients of a client, or largest absolute value.
        by_value: Whether `limit` is of the values.
    """
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    if not grads:
        return
    if by_value:
        for grad in grads:
            grad.clamp_(-limit, limit)
        return
    norms = torch.stack([grad.reshape(len(grad), -1).norm(dim=1) for grad in grads], dim=1).norm(dim=1)
    factors = (limit / (norms + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factors.view(-1, *[1] * (grad.dim() - 1)))
