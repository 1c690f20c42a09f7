"""Removal of units from a module: after unit pruning, a module that is really smaller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as _EXTRA_STATE

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.forward import split_arguments
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.sparse.modes import evaluating, random_restored
from lightning_sparsefl.sparse.submodel import cut
from lightning_sparsefl.sparse.tracing import tensors
from lightning_sparsefl.sparse.units import find_groups, unit_masks
from lightning_sparsefl.sparse.width import live_units, used_units
from lightning_sparsefl.types import Masks

_ROUNDING, _ROUNDING_OF_HALF, _SMALL = 1000, 16, 0.01
"""Largest difference of outputs from rounding, in units of the precision of the largest one, or of this one."""


def shrink(
    module: nn.Module,
    *example_inputs: Any,
    keep: Masks | None = None,
    threshold: float = 0.0,
    ignore: Sequence[str] = (),
) -> nn.Module:
    """Return a smaller copy of a module, without the units whose weights are all zero.

    It computes what the module computes: a unit without a nonzero weight in its row, its bias, its norm and the
    incoming slices of the next layers changes nothing. Parameters keep their names. At least one unit of each group
    stays, and a module of whose units each has a nonzero weight is copied as it is. Weights that were pruned one by one
    remain as zeros.

    Args:
        module: Module after unit pruning, which is not changed.
        example_inputs: Arguments of ``forward``; one sample suffices.
        keep: Units of each group that stay, bool, ``(units,)``, by the names of
            :func:`~lightning_sparsefl.sparse.units.find_groups`; a group that is missing stays whole. Others are
            removed whatever their weights are. Default: those with a nonzero weight.
        threshold: Smallest magnitude in the row or in an incoming slice that keeps a unit, for penalties that make
            weights small and not zero; above 0, the output may change.
        ignore: Modules, or parents of modules, whose outputs stay whole.

    Raises:
        InvalidOption: If no unit of the module can be removed whatever its weights are, a layer with units to remove
            has no smaller form, the smaller module does not compute the same on the example inputs, or an option is
            not valid.
        IncompatibleMasks: If `keep` does not fit the units.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> with torch.no_grad():
        ...     for values in (net[0].weight[1:], net[0].bias[1:], net[2].weight[:, 1:]):
        ...         _ = values.zero_()
        >>> shrink(net, torch.zeros(1, 2))
        Sequential(
          (0): Linear(in_features=2, out_features=1, bias=True)
          (1): ReLU()
          (2): Linear(in_features=1, out_features=1, bias=True)
        )
    """
    if not threshold >= 0:
        raise InvalidOption(f"`threshold={threshold}`: expected a number >= 0.")
    if keep is not None and threshold:
        raise InvalidOption(f"`keep` and `threshold={threshold}` both say which units stay; give one of them.")
    groups = find_groups(module, *example_inputs, ignore=ignore)
    if not groups:
        raise InvalidOption(
            f"`{type(module).__name__}` has no units that can be removed; expected a hidden layer made of known "
            "operations, and not in `ignore`."
        )
    if keep is None:
        weights = module.state_dict()
        keep = live_units(groups, weights, threshold) if threshold else used_units(groups, weights)
    small = cut(module, groups, keep)
    found = difference(module, small, unit_masks(groups, keep, module.state_dict()), example_inputs)
    if found is not None:
        raise InvalidOption(
            f"Without the units, `{type(module).__name__}` {found}, since its `forward` depends on their number, as in "
            "`x / x.shape[-1]`; change it, or set `ignore` to their layers."
        )
    return small


def difference(module: nn.Module, small: nn.Module, masks: Masks, inputs: tuple[Any, ...]) -> str | None:
    """Return how a smaller module differs from what the module computes under the units' masks; None if it does not.

    A ``forward`` that reads the number of units, as a width, makes a difference. One that draws random numbers is not
    compared.

    Args:
        module: Full module.
        small: Module without the units that the masks drop.
        masks: Masks of the units' weights.
        inputs: Arguments of ``forward``.

    Returns:
        The end of a sentence about the smaller module.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> difference(net, nn.Linear(2, 1), {}, (torch.ones(1, 2),))
        'computes something else on the example inputs'
    """
    state = {name: value for name, value in module.state_dict().items() if name.rpartition(".")[2] != _EXTRA_STATE}
    weights, (arguments, named) = apply(state, masks), split_arguments(module, inputs)
    with random_restored(module.parameters()), evaluating(module), evaluating(small):
        expected, again = (functional_call(module, weights, arguments, named, tie_weights=False) for _ in range(2))
        if not _close(expected, again):
            return None
        try:
            found = small(*arguments, **named)
        except Exception as error:
            return f"fails on the example inputs ({type(error).__name__}: {error})"
    return None if _close(expected, found) else "computes something else on the example inputs"


def _close(expected: Any, found: Any) -> bool:
    """Return whether the tensors in two outputs are equal up to rounding."""
    return all(_is_close(*pair) for pair in zip(tensors(expected), tensors(found), strict=True))


def _is_close(expected: Tensor, found: Tensor) -> bool:
    if expected.shape != found.shape or not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(expected, found)
    largest = float(expected.abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
    steps = _ROUNDING if expected.dtype.itemsize > 2 else _ROUNDING_OF_HALF
    rounding = steps * torch.finfo(expected.dtype).eps * max(largest, _SMALL)
    return torch.allclose(expected, found, rtol=0, atol=rounding, equal_nan=True)
