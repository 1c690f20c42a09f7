"""Units: output channels, neurons and hidden states, with all weights that are dropped together with each of them.

Xue et al., "Learnable Sparse Customization in Heterogeneous Edge Computing" (FedLPS), arXiv:2412.07216, section 3.
A dropped unit loses its outgoing row, its bias and its norm's affine part, and the next layers' incoming slices.
Units that are added, as along a residual stream, are one unit with several rows; a hidden unit of an LSTM has a
row in every gate; of a grouped convolution the same positions of all groups are one unit.

Which tensors belong together is found by following labels through one forward pass
(:mod:`~lightning_sparsefl.sparse.tracing`). Torch-Pruning 1.6 was the alternative: it needs only torch and NumPy,
and finds residual sums, depthwise convolutions, group norms and flattened maps from the autograd graph just as well.
But it treats an LSTM as one layer, whose gates it does not cut together and which may not be stacked; it lists what
to cut, index by index, whereas masks need all units of a tensor at once; and it cuts a group norm without regard for
its statistics. Nor does it see which operations need the full width. torch.fx would follow neither control flow nor
a layer's own parameters in functional calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import floor
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.sparse.conv1d import is_conv1d
from lightning_sparsefl.sparse.forward import split_arguments
from lightning_sparsefl.sparse.labelling import RULES
from lightning_sparsefl.sparse.modes import evaluating
from lightning_sparsefl.sparse.prune import keep_largest
from lightning_sparsefl.sparse.tracing import Role, UnitTrace, tensors
from lightning_sparsefl.types import Masks, Weights


@dataclass(frozen=True)
class Slot:
    """Positions of the units of a group in one tensor."""

    name: str
    """Name of the tensor in the ``state_dict``."""
    dim: int
    """Dimension that the units index."""
    positions: Tensor
    """Indices along `dim`: long, ``(units, positions of each)``; 49 for a 7x7 map that was flattened, 4 for an LSTM."""
    role: Role
    """``out``: the producing row, its bias, the norm's affine part; ``in``: a reader's incoming slice; ``buffer``:
    a norm's statistics, which carry no masks."""


@dataclass(frozen=True)
class Consumer:
    """A module that reads the units of a group."""

    name: str
    """Name of the module."""
    dim: int
    """Dimension of its first input along which the units lie: 1 for a convolution, -1 for a linear layer."""
    positions: Tensor
    """Indices along `dim`: long, ``(units, positions of each)``."""


@dataclass(frozen=True)
class UnitGroup:
    """Units of which each can be dropped by itself, and that have positions in the same tensors."""

    name: str
    """Name of the first producing module; ``lstm.l0`` for a layer of a recurrent one."""
    size: int
    """Number of units."""
    slots: tuple[Slot, ...]
    """All tensors with weights or statistics of the units."""
    layers: tuple[str, ...]
    """Modules with a row for each unit."""
    consumers: tuple[Consumer, ...]
    """Modules that read the units; those inside a recurrent module are not listed."""
    masks_only: str = ""
    """Why the group can be masked but not cut out; empty if it can."""


def find_groups(
    module: nn.Module, *example_inputs: Any, ignore: Sequence[str] = (), embeddings: bool = False
) -> tuple[UnitGroup, ...]:
    """Return the groups of units of a module, in the order of the forward pass.

    The module is called once in evaluation mode, without gradients, and left as it was. Inputs and outputs of the
    network are not units, nor is what runs through an operation that is not understood, such as attention.

    Args:
        module: Module, whose tensors are named as in its ``state_dict``.
        example_inputs: Arguments of ``forward``; one sample suffices.
        ignore: Modules, or parents of modules, whose outputs stay whole.
        embeddings: Whether the columns of embeddings are units.

    Raises:
        InvalidOption: If a name in `ignore` is not a module, the module is compiled or scripted, or ``forward`` fails.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
        >>> [(group.name, group.size) for group in find_groups(net, torch.zeros(1, 1, 4, 4))]
        [('0', 4)]
    """
    _check(module, ignore)
    trace = _trace(module, example_inputs, ignore, embeddings)
    return tuple(_groups(trace, _aliases(module)))


def _check(module: nn.Module, ignore: Sequence[str]) -> None:
    modules = dict(module.named_modules())
    for name in ignore:
        if name not in modules:
            raise InvalidOption(f"`ignore={list(ignore)}`: `{name}` is not a module; change `ignore`.")
    for name, child in modules.items():
        if isinstance(child, torch.jit.ScriptModule) or hasattr(child, "_orig_mod"):
            kind = "scripted" if isinstance(child, torch.jit.ScriptModule) else "compiled"
            raise InvalidOption(
                f"`{name or type(child).__name__}` is {kind}, so its units cannot be found; expected a module that is "
                "neither compiled nor scripted."
            )


def _aliases(module: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter and each floating-point buffer of the ``state_dict``, by ``id``."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            found[id(value)].append(name)
    return found


def _trace(module: nn.Module, inputs: tuple[Any, ...], ignore: Sequence[str], embeddings: bool) -> UnitTrace:
    names = {key: names[0] for key, names in _aliases(module).items()}
    parameters = {id(value) for value in module.parameters()}
    buffers = {name for key, name in names.items() if key not in parameters}
    trace = UnitTrace(names, buffers, ignore, embeddings, RULES)
    trace.conv1d = frozenset(id(layer.weight) for layer in module.modules() if is_conv1d(layer))
    for value in tensors(inputs):
        trace.label(value, torch.zeros((), dtype=torch.long).expand(value.shape))
    arguments, named = split_arguments(module, inputs)
    try:
        # a compiled layer would trace the labelling too, and recompile for labels that are made anew
        with torch.compiler.set_stance("force_eager"), evaluating(module), _states_noted(module, trace), trace:
            outputs = module(*arguments, **named)
    except InvalidOption:
        raise
    except Exception as error:
        shapes = ", ".join(str(tuple(value.shape)) for value in tensors(inputs))
        packed = len(inputs) == 1 and isinstance(inputs[0], tuple)
        advice = "pass them one by one, as `*inputs`" if packed else "change the inputs"
        raise InvalidOption(
            f"`{type(module).__name__}` fails on example inputs of shape {shapes}: {error}; {advice}."
        ) from error
    for value in tensors(outputs):
        trace.freeze(trace.labels(value).ids)
    return trace


@contextmanager
def _states_noted(module: nn.Module, trace: UnitTrace) -> Iterator[None]:
    """Tell the trace which recurrent layers make their first state themselves, in the width that they have."""

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace.makes_state = kwargs.get("hx", args[1] if len(args) > 1 else None) is None

    plain = [kind.forward for kind in (nn.LSTM, nn.GRU, nn.RNN)]  # another one may make a state that is not 0
    recurrent = [layer for layer in module.modules() if type(layer).forward in plain]
    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in recurrent]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_Key = tuple[str, int]
_Places = dict[int, list[int]]


def _groups(trace: UnitTrace, aliases: Mapping[int, list[str]]) -> Iterator[UnitGroup]:
    """Yield groups: units that have as many positions in each of the same tensors."""
    alone = next((name for (name, _), axis in trace.axes.items() if axis.ids.dim() == 0), None)
    if alone is not None:
        raise InvalidOption(
            f"`{alone}` gets one sample without a batch dimension; expected example inputs that are a batch."
        )
    places = {key: _places(trace, axis.ids) for key, axis in trace.axes.items()}
    reads = [(reader, _places(trace, reader.ids)) for reader in trace.readers]
    names = {shared[0]: shared for shared in aliases.values()}
    taken: set[str] = set()
    for keys, units in _alike(places):
        axes = {key: trace.axes[key] for key in keys}
        rows = [key for key in keys if axes[key].role == "out" and axes[key].row]
        if not rows or "in" not in {axis.role for axis in axes.values()}:
            continue
        name = _name(rows[0][0])
        name += f"[{places[rows[0]][units[0]][0]}:]" if name in taken else ""
        taken.add(name)
        consumers = {
            (at.module, at.dim): Consumer(at.module, at.dim, _table(f, units)) for at, f in reads if units[0] in f
        }
        yield UnitGroup(
            name,
            len(units),
            tuple(Slot(n, k[1], _table(places[k], units), axes[k].role) for k in keys for n in names[k[0]]),
            tuple(dict.fromkeys(name.rpartition(".")[0] for name, _ in rows)),
            tuple(consumers.values()),
            next((reason for label, reason in trace.reasons.items() if trace.root(label) in set(units)), ""),
        )


def _places(trace: UnitTrace, ids: Tensor) -> _Places:
    """Return the positions of each unit; label 0 is not a unit."""
    found: _Places = defaultdict(list)
    for position, label in enumerate(ids.tolist()):
        if unit := trace.root(label):
            found[unit].append(position)
    return found


def _alike(places: Mapping[_Key, _Places]) -> list[tuple[list[_Key], list[int]]]:
    """Return the keys and units of each group, in the order of the first unit."""
    homes: dict[int, list[tuple[_Key, int]]] = defaultdict(list)
    for key, found in places.items():
        for unit, positions in found.items():
            homes[unit].append((key, len(positions)))
    alike: dict[tuple[tuple[_Key, int], ...], list[int]] = defaultdict(list)
    for unit in sorted(homes):
        alike[tuple(homes[unit])].append(unit)
    return [([key for key, _ in home], units) for home, units in alike.items()]


def _table(found: _Places, units: Sequence[int]) -> Tensor:
    return torch.tensor([found[unit] for unit in units])


def _name(row: str) -> str:
    """Return the module of a producing tensor, with the layer in it for a recurrent network of several layers."""
    module, _, leaf = row.rpartition(".")
    return f"{module}.{leaf.removeprefix('weight_ih_')}" if leaf.startswith("weight_ih_l") else module


def unit_masks(groups: Sequence[UnitGroup], kept: Masks, weights: Weights, incoming: bool = True) -> dict[str, Tensor]:
    """Return masks over weights that drop whole units.

    Args:
        groups: Groups of units from :func:`find_groups`.
        kept: Units of each group that stay, bool, ``(units,)``; a group that is missing stays whole.
        weights: Weights to be masked, whose shapes and devices the masks get.
        incoming: Whether to drop also the incoming slices of the layers that read a dropped unit.

    Returns:
        A mask for each tensor of `weights` that has positions of a group in `kept`. Buffers carry none.

    Raises:
        IncompatibleMasks: If `kept` does not fit the groups.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
        >>> groups = find_groups(net, torch.zeros(1, 1))
        >>> unit_masks(groups, {"0": torch.tensor([True, False])}, net.state_dict())
        {'0.weight': tensor([[ True],
                [False]]), '0.bias': tensor([ True, False]), '1.weight': tensor([[ True, False]])}
    """
    check_kept(groups, kept)
    return broadcast_unit_masks(groups, kept, weights, incoming)


def broadcast_unit_masks(
    groups: Sequence[UnitGroup], kept: Masks, weights: Weights, incoming: bool = True
) -> dict[str, Tensor]:
    """Return masks over weights that drop whole units, for one or more choices of units, which are not checked.

    Args:
        groups: Groups of units from :func:`find_groups`.
        kept: Units of each group that stay, bool, ``(..., units)``; a group that is missing stays whole.
        weights: Weights to be masked, with as many leading dimensions, whose lengths may differ from those of `kept`.
        incoming: Whether to drop also the incoming slices of the layers that read a dropped unit.

    Returns:
        The masks of :func:`unit_masks`, with the leading dimensions of `kept`.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
        >>> weights = {"1.weight": net[1].weight[None]}
        >>> broadcast_unit_masks(find_groups(net, torch.zeros(1, 1)), {"0": torch.eye(2).bool()}, weights)
        {'1.weight': tensor([[[ True, False]],
        <BLANKLINE>
                [[False,  True]]])}
    """
    masks: dict[str, Tensor] = {}
    for group, slot in _slots(groups):
        masked = slot.role == "out" or (incoming and slot.role == "in")
        if group.name in kept and masked and slot.name in weights:
            line = spread_over_slot(slot, kept[group.name], weights[slot.name], True)
            masks[slot.name] = masks[slot.name] & line if slot.name in masks else line
    leading = next(iter(kept.values())).shape[:-1] if kept else ()
    return {
        name: mask.expand(*leading, *weights[name].shape[len(leading) :]).contiguous() for name, mask in masks.items()
    }


def spread_over_slot(slot: Slot, values: Tensor, weight: Tensor, elsewhere: float) -> Tensor:
    """Return the values of units at their positions in a weight, to be broadcast over its other dimensions.

    Args:
        slot: Positions of the units in the weight.
        values: Value of each unit, ``(..., units)``.
        weight: Weight, with as many leading dimensions, whose lengths may differ from those of `values`.
        elsewhere: Value at positions that no unit has.

    Returns:
        Tensor that has the length of the weight in the slot's dimension, and length 1 in those behind the leading ones.

    Example:
        >>> slot = Slot("weight", 1, torch.tensor([[0], [2]]), "in")
        >>> spread_over_slot(slot, torch.tensor([3.0, 4.0]), torch.zeros(2, 3), 1.0)
        tensor([[3., 1., 4.]])
    """
    values, positions = values.to(weight.device), slot.positions.to(weight.device)
    leading, shape = values.shape[:-1], weight.shape[values.dim() - 1 :]
    line = values.new_full((*leading, shape[slot.dim]), elsewhere)
    line[..., positions] = values[..., None].expand(*leading, *positions.shape)
    return line.view(*leading, *(length if dim == slot.dim else 1 for dim, length in enumerate(shape)))


def sum_by_unit(slot: Slot, tensor: Tensor, leading: int = 0) -> Tensor:
    """Return the sum of each unit's entries in a tensor, of shape ``(..., units)``.

    Args:
        slot: Positions of the units in the tensor.
        tensor: Tensor of the shape of the slot's weight, behind leading dimensions.
        leading: Number of leading dimensions, which are kept.

    Example:
        >>> slot = Slot("weight", 1, torch.tensor([[0], [2]]), "in")
        >>> sum_by_unit(slot, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
        tensor([5., 9.])
    """
    sums = tensor.movedim(leading + slot.dim, leading).flatten(leading + 1).sum(-1)
    return sums[..., slot.positions.to(sums.device)].sum(-1)


def _slots(groups: Sequence[UnitGroup]) -> Iterator[tuple[UnitGroup, Slot]]:
    return ((group, slot) for group in groups for slot in group.slots)


def check_kept(groups: Sequence[UnitGroup], kept: Masks) -> None:
    """Check that every unit mask is a bool vector over the units of a group and keeps one of them.

    Raises:
        IncompatibleMasks: Naming the first that does not fit.

    Example:
        >>> check_kept([], {"conv": torch.tensor([True])})
        Traceback (most recent call last):
        lightning_sparsefl.errors.IncompatibleMasks: `conv` is not a group of units, expected one of: (no groups).
    """
    sizes = {group.name: group.size for group in groups}
    for name, mask in kept.items():
        if name not in sizes:
            known = ", ".join(f"`{known}`" for known in sizes) or "(no groups)"
            raise IncompatibleMasks(f"`{name}` is not a group of units, expected one of: {known}.")
        if mask.dtype != torch.bool or mask.shape != (sizes[name],):
            got = f"{mask.dtype} of shape {tuple(mask.shape)}"
            raise IncompatibleMasks(f"The unit mask of `{name}` is {got}, expected torch.bool of ({sizes[name]},).")
        if not bool(mask.any()):
            raise IncompatibleMasks(
                f"The unit mask of `{name}` keeps none of {sizes[name]} units, expected one or more."
            )


def unit_norms(groups: Sequence[UnitGroup], weights: Weights, leading: int = 0) -> dict[str, Tensor]:
    """Return the sum of the absolute weights in each unit's outgoing rows: ``|w|_J`` of FedLPS.

    Biases and norms are not counted, incoming slices neither. Keeps the gradient.

    Args:
        groups: Groups of units from :func:`find_groups`.
        weights: Weights of the model, each behind leading dimensions.
        leading: Number of leading dimensions, such as 1 for the weights of several clients.

    Returns:
        For each group, ``(..., units)``.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> weights = {"0.weight": torch.tensor([[1.0, -2.0], [0.0, 5.0]])}
        >>> unit_norms(find_groups(net, torch.zeros(1, 2)), weights)
        {'0': tensor([3., 5.])}
    """
    norms: dict[str, Tensor] = {}
    for group, slot in _slots(groups):
        if slot.name in weights and is_row(group, slot, weights[slot.name].dim() - leading):
            norm = sum_by_unit(slot, weights[slot.name].abs(), leading)
            norms[group.name] = norms[group.name] + norm if group.name in norms else norm
    return norms


def is_row(group: UnitGroup, slot: Slot, dims: int) -> bool:
    """Return whether a slot has the outgoing rows of a group's units, and not their biases or norms.

    Args:
        group: Group of the slot.
        slot: Positions of the units in a weight.
        dims: Number of dimensions of that weight.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
        >>> (group,) = find_groups(net, torch.zeros(1, 1))
        >>> {slot.name: is_row(group, slot, net.get_parameter(slot.name).dim()) for slot in group.slots}
        {'0.weight': True, '0.bias': False, '1.weight': False}
    """
    return slot.role == "out" and slot.name.rpartition(".")[0] in group.layers and dims > 1


def unit_counts(groups: Sequence[UnitGroup], density: float) -> dict[str, int]:
    """Return the number of units to keep of each group: density times size, halves rounded up, at least 1.

    Args:
        groups: Groups of units from :func:`find_groups`.
        density: Fraction of units kept, in (0, 1].

    Raises:
        InvalidOption: If `density` is outside (0, 1].

    Example:
        >>> unit_counts(find_groups(nn.Sequential(nn.Linear(1, 5), nn.Linear(5, 1)), torch.zeros(1, 1)), 0.5)
        {'0': 3}
    """
    if not 0 < density <= 1:
        raise InvalidOption(f"`density={density}`: expected a number in (0, 1]; change `density`.")
    return {group.name: max(floor(density * group.size + 0.5), 1) for group in groups}


def keep_units(scores: Weights, counts: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the units with the largest scores of each group; of equal ones the lower index stays.

    Args:
        scores: Scores of the units of each group, ``(units,)``.
        counts: Number of units of each group that stay.

    Raises:
        InvalidOption: If a count is more than there are units.

    Example:
        >>> keep_units({"conv": torch.tensor([1.0, 3.0, 3.0])}, {"conv": 1})
        {'conv': tensor([False,  True, False])}
    """
    return {name: keep_largest(scores[name], count) for name, count in counts.items()}
