"""Tracing of channels through one forward pass: the tensors with a unit's weights, and the layers that read it.

Every activation carries a *label* for each of its elements, the number of the unit whose output it is. A layer
with weights gives new labels to its output; an operation that only moves elements moves the labels with them,
by being called on the labels; a sum makes the labels that meet one unit. Labels that meet label 0 are not units:
those of the network's input and output, and of whatever an operation that is not listed here has touched. So an
unknown operation costs prunable units, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Role: TypeAlias = Literal["out", "in", "buffer"]


class Labels(NamedTuple):
    """The units of an activation."""

    ids: Tensor
    """Long, the shape of the activation."""
    zero: bool
    """Whether every value of a unit is exactly zero once the unit's weights are."""


@dataclass
class Axis:
    """One dimension of a named tensor."""

    ids: Tensor
    """Long, the unit of each position."""
    role: Role
    row: bool = False
    """Whether these positions produce the units, rather than scale, shift or read them."""


class Reader(NamedTuple):
    """A module that reads units."""

    module: str
    dim: int
    """Dimension of the module's input along which the units lie."""
    ids: Tensor
    """Long, the unit of each position."""


class Call(NamedTuple):
    """One intercepted call."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def bind(self, *names: str) -> list[Any]:
        """Return the arguments of these parameters, which are the function's first; None if not given."""
        given = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        return [given.get(name) for name in names]


Rules: TypeAlias = "Mapping[str, Callable[[UnitTrace, Call, Any], None]]"


class UnitTrace(TorchFunctionMode):
    """Labels all activations that are computed while it is active.

    Args:
        names: Name of each parameter and buffer, by ``id``.
        buffers: Names of the buffers among them.
        ignore: Names of modules whose outputs are not units.
        embeddings: Whether the columns of embeddings are units.
        rules: Effect of each operation on labels, by its name.
    """

    def __init__(
        self, names: Mapping[int, str], buffers: set[str], ignore: Iterable[str], embeddings: bool, rules: Rules
    ) -> None:
        super().__init__()
        self.rules = rules
        self.names, self.buffers, self.ignore, self.embeddings = names, buffers, tuple(ignore), embeddings
        self.axes: dict[tuple[str, int], Axis] = {}
        self.readers: list[Reader] = []
        self.conv1d: frozenset[int] = frozenset()
        """Weights of the ``Conv1D`` of transformers, by ``id``."""
        self.makes_state = False
        """Whether the recurrent layer that is running makes its first state itself."""
        self.reasons: dict[int, str] = {}
        """Reasons by label for which a unit can be masked but not cut out."""
        self._roots = [0]
        # The tensor is kept beside its labels, for its id must not be given to another one.
        self._seen: dict[int, tuple[Tensor, Labels]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "").strip("_")
        involved = [value for value in tensors((args, kwargs)) if self.followed(value) or id(value) in self.names]
        if involved and (out is None or name in _EXITS or any(True for _ in tensors(out))):
            call = Call(name, func, args, kwargs)
            try:
                self.rules.get(name, UnitTrace.give_up)(self, call, out)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                # The call itself has worked, so the rule does not cover this form of it.
                self.give_up(call, out)
        return out

    # ---- labels

    def root(self, label: int) -> int:
        """Return the smallest label of the same unit."""
        while self._roots[label] != label:
            self._roots[label] = self._roots[self._roots[label]]
            label = self._roots[label]
        return label

    def labels(self, value: Tensor) -> Labels:
        """Return the labels of an activation; one that was never labelled has no units."""
        if self.followed(value):
            return self._seen[id(value)][1]
        return Labels(torch.zeros((), dtype=torch.long).expand(value.shape), True)

    def label(self, value: Tensor, ids: Tensor, zero: bool = True) -> None:
        """Label an activation."""
        self._seen[id(value)] = value, Labels(ids, zero)

    def unify(self, a: Tensor, b: Tensor) -> None:
        """Make one unit of each pair of labels; the tensors broadcast."""
        base = len(self._roots)
        for pair in torch.unique(a * base + b).tolist():
            low, high = sorted((self.root(pair // base), self.root(pair % base)))
            self._roots[high] = low

    def freeze(self, ids: Tensor) -> None:
        """Mark labels as no units any more."""
        self.unify(ids, torch.zeros_like(ids))

    def pin(self, ids: Tensor, reason: str) -> None:
        """Mark units that can be masked, but not cut out."""
        for label in torch.unique(ids).tolist():
            self.reasons.setdefault(label, reason)

    def give_up(self, call: Call, out: Any) -> None:
        """Mark all inputs and outputs of an unknown call as no units."""
        for value in tensors((call.args, call.kwargs)):
            if self.followed(value):
                self.freeze(self.labels(value).ids)
        for value in tensors(out):
            if id(value) not in self.names:
                self.label(value, torch.zeros((), dtype=torch.long).expand(value.shape), zero=False)

    def followed(self, value: Tensor) -> bool:
        """Return whether this is an activation with labels, not a constant or a parameter."""
        return id(value) in self._seen

    # ---- tensors with a name

    def axis(self, value: Tensor | None, dim: int, ids: Tensor, role: Role = "out", row: bool = False) -> None:
        """Assign the positions of a named tensor to units; the units of a tensor without a name are given up."""
        if value is None:
            return
        name = self.names.get(id(value))
        if name is None:
            self.freeze(ids)
            return
        if self._ignored(name) and role == "out":
            self.freeze(ids)
        known = self.axes.setdefault((name, dim), Axis(ids, "buffer" if name in self.buffers else role, row))
        self.unify(known.ids, ids)
        if role == "out" and known.role == "in":  # an embedding tied to a later layer
            known.role, known.row = role, row

    def produce(self, weight: Tensor, dim: int, tiles: int = 1) -> Tensor:
        """Return the units that a weight produces: new ones, or those of its last use; `tiles` positions for each."""
        name = self.names.get(id(weight))
        if name is None or self._ignored(name):
            return torch.zeros(weight.shape[dim], dtype=torch.long)
        if (name, dim) not in self.axes:
            first, count = len(self._roots), weight.shape[dim] // tiles
            self._roots.extend(range(first, first + count))
            self.axes[name, dim] = Axis(torch.arange(first, first + count).repeat(tiles), "out", True)
        self.axes[name, dim].role, self.axes[name, dim].row = "out", True
        return self.axes[name, dim].ids

    def read(self, value: Tensor, dim: int, weight: Tensor) -> Tensor:
        """Return the units along `dim` of the input of the module of `weight`."""
        ids = self.along(value, dim)
        name = self.names.get(id(weight))
        if name is None:
            self.freeze(ids)
        else:
            # The batch comes first and may be missing, so features are counted from the end where they are last.
            self.readers.append(Reader(name.rpartition(".")[0], -1 if dim == value.ndim - 1 else dim, ids))
        return ids

    def along(self, value: Tensor, dim: int) -> Tensor:
        """Return the units along `dim`; if they differ between other positions, they are given up."""
        ids = self.labels(value).ids
        line = line_along(ids, dim)
        if line is None:
            self.freeze(ids)
            return torch.zeros(value.shape[dim], dtype=torch.long)
        return line

    def _ignored(self, name: str) -> bool:
        return any(name.startswith(f"{module}.") for module in self.ignore)


_EXITS = {"array", "item", "numpy", "tolist"}
"""Operations by which values leave what can be followed."""


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples, lists and dicts.

    Example:
        >>> list(tensors([torch.tensor(1), {"state": (torch.tensor(2), None)}]))
        [tensor(1), tensor(2)]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)


def line_along(ids: Tensor, dim: int) -> Tensor | None:
    """Return the labels along `dim`, if they are the same at all other positions.

    Example:
        >>> line_along(torch.tensor([[1, 2], [1, 2]]), 1)
        tensor([1, 2])
    """
    line = ids[tuple(slice(None) if at == dim % ids.ndim else 0 for at in range(ids.ndim))]
    return line if bool((ids == spread(line, dim, ids.shape)).all()) else None


def spread(line: Tensor, dim: int, shape: torch.Size) -> Tensor:
    """Return labels that depend on the position along `dim` alone.

    Example:
        >>> spread(torch.tensor([1, 2]), 0, torch.Size([2, 3]))
        tensor([[1, 1, 1],
                [2, 2, 2]])
    """
    view = [1] * len(shape)
    view[dim] = len(line)
    return line.view(view).expand(shape)


def unit_dim(ids: Tensor) -> int | None:
    """Return the dimension along which the labels change, if it is the only one.

    Example:
        >>> unit_dim(torch.tensor([[1, 1], [2, 2]]))
        0
    """
    changing = changing_dims(ids)
    return changing[0] if len(changing) == 1 else None


def changing_dims(ids: Tensor) -> list[int]:
    """Return the dimensions along which the labels change.

    Example:
        >>> changing_dims(torch.tensor([[1, 1], [2, 2]])), changing_dims(torch.tensor([[1, 2], [3, 4]]))
        ([0], [0, 1])
    """
    return [dim for dim in range(ids.ndim) if bool((ids != ids.narrow(dim, 0, 1)).any())]
