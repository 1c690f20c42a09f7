"""Gates at the inputs and outputs of layers, which leave the last units out."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.density import ceil_count
from lightning_sparsefl.sparse.units import UnitGroup

Place = tuple[str, bool]
"""Name of a module, and whether its input is gated; else its output is."""


class Gate:
    """Multiplies the units beyond a prefix by zero.

    Args:
        positions: Positions of the units along a dimension, int64 of shape ``(units, positions of each)``.
        size: Number of units that rates refer to.
        dim: Dimension of the units; None = that of a convolution's output.
        spatial: Number of spatial dimensions of that convolution.
    """

    def __init__(self, positions: Tensor, size: int, dim: int | None, spatial: int = 0) -> None:
        self.positions, self.size, self.dim, self.spatial = positions, size, dim, spatial
        self._known: dict[float, Tensor] = {}

    def __call__(self, value: Tensor, rate: float) -> Tensor:
        """Return a value without the units beyond the prefix.

        Args:
            value: Input or output of a layer.
            rate: Share of the units in the prefix.
        """
        units = self.kept(value, rate)
        return value if units is None else value * units

    def kept(self, value: Tensor, rate: float) -> Tensor | None:
        """Return ones for the units of the prefix and zeros for the others, in a shape that multiplies a value.

        Args:
            value: Input or output of a layer.
            rate: Share of the units in the prefix.

        Returns:
            The factors; None if all units are in the prefix.
        """
        count = ceil_count(rate, self.size)
        if count >= len(self.positions):
            return None
        dim = value.ndim - self.spatial - 1 if self.dim is None else self.dim % value.ndim
        keep = self._known.get(rate)
        if keep is None or keep.device != value.device:
            keep = torch.ones(value.shape[dim], device=value.device)
            keep[self.positions[count:].reshape(-1).to(value.device)] = 0
            self._known[rate] = keep
        return keep.to(value.dtype).view([-1 if at == dim else 1 for at in range(value.ndim)])


def gates_of(module: nn.Module, groups: Sequence[UnitGroup], rates: Sequence[float]) -> dict[Place, list[Gate]]:
    """Return the gates of a module: at the outputs of layers with units, and at the inputs of those that read them.

    Args:
        module: Module, which may have been cut to the units of the largest rate.
        groups: Groups of units of the full module.
        rates: Rates that are drawn.

    Raises:
        InvalidOption: If a module other than a linear, convolutional or recurrent layer has or reads units, since its
            inputs and outputs need not be those units.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> gates = gates_of(net, find_groups(net, torch.zeros(1, 1)), [0.5, 1.0])
        >>> list(gates), gates["2", True][0](torch.ones(1, 4), 0.5)
        ([('0', False), ('2', True)], tensor([[1., 1., 0., 0.]]))
    """
    tables = list(_tables(module, groups))
    if _is_cut(module, groups):
        counts = {group.name: ceil_count(max(rates), group.size) for group in groups}
        lost: dict[Place, list[int]] = defaultdict(list)
        for place, group, positions, _ in tables:
            lost[place] += positions[counts[group.name] :].flatten().tolist()
        gone = {place: sorted(positions) for place, positions in lost.items()}
        tables = [(p, g, _moved(table[: counts[g.name]], gone[p]), dim) for p, g, table, dim in tables]
    found: dict[Place, list[Gate]] = defaultdict(list)
    for place, group, positions, (dim, spatial) in tables:
        found[place].append(Gate(positions, group.size, dim, spatial))
    return dict(found)


def _called(module: nn.Module, name: str) -> nn.Module:
    """Return a layer, whose inputs and outputs are those of the product with its weight."""
    layer = module.get_submodule(name)
    if not isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase)):
        raise InvalidOption(
            f"Ordered dropout cannot drop units that `{name}`, a `{type(layer).__name__}`, has or reads with a weight "
            "of its own; expected linear, convolutional and recurrent layers that `forward` calls."
        )
    return layer


def _tables(
    module: nn.Module, groups: Sequence[UnitGroup]
) -> Iterator[tuple[Place, UnitGroup, Tensor, tuple[int | None, int]]]:
    """Yield where the units of each group are put out and read."""
    for group in groups:
        rows: Mapping[str, Tensor] = {slot.name: slot.positions for slot in group.slots if slot.role == "out"}
        for name in group.layers:
            layer = _called(module, name)
            if isinstance(layer, nn.Linear):
                yield (name, False), group, rows[f"{name}.weight"], (-1, 0)
            elif isinstance(layer, nn.modules.conv._ConvNd):
                yield (name, False), group, rows[f"{name}.weight"], (None, layer.weight.ndim - 2)
        for consumer in group.consumers:
            _called(module, consumer.name)
            yield (consumer.name, True), group, consumer.positions, (consumer.dim, 0)


def with_first(
    inputs: tuple[Any, ...], named: dict[str, Any], change: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer with another first one, which may be named.

    Args:
        inputs: Positional arguments.
        named: Arguments by name.
        change: Function that returns the new argument.

    Example:
        >>> with_first((), {"input": 1}, lambda value: value + 1)
        ((), {'input': 2})
    """
    if inputs:
        return (change(inputs[0]), *inputs[1:]), named
    name = next(iter(named))
    return inputs, {**named, name: change(named[name])}


def _is_cut(module: nn.Module, groups: Sequence[UnitGroup]) -> bool:
    """Return whether a module lacks some of the units."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters(remove_duplicate=False)}
    return any(
        int(slot.positions.max()) >= shapes[slot.name][slot.dim]
        for group in groups
        for slot in group.slots
        if slot.name in shapes
    )


def _moved(positions: Tensor, gone: Sequence[int]) -> Tensor:
    """Return the positions after others were removed."""
    return positions - torch.tensor([[bisect_left(gone, at) for at in row] for row in positions.tolist()])
