"""Parts of a model: trees of weights divided by the names of their tensors.

Methods of partial sharing keep a part on each client, such as the last linear layer (FedPer, Arivazhagan et al. 2019,
arXiv:1912.00818) or the norms (FedBN, Li et al. 2021, arXiv:2102.07623), and average the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor, nn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.density import listed
from lightning_sparsefl.sparse.layer_groups import head_of, layer_groups, matching, require_whole_layers
from lightning_sparsefl.sparse.parametrized import owner
from lightning_sparsefl.sparse.uses import EACH_ONCE, TensorUses
from lightning_sparsefl.types import Weights

HEAD, NORM = "head", "norm"
"""Patterns for the last linear layer and for all norms."""
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
_NAMED_NORM = re.compile(r".*Norm(\dd)?")
"""Names of the classes of further norms, such as `RMSNorm`."""
_SHOWN = 6


def part(
    weights: Weights,
    patterns: Sequence[str],
    *,
    buffers: Collection[str] = (),
    norms: Collection[str] = (),
    uses: TensorUses = EACH_ONCE,
    option: str = "patterns",
) -> tuple[str, ...]:
    """Return the names of the tensors of a part, in the order of the model.

    Args:
        weights: Weights of the whole model.
        patterns: Names of modules, or globs over names of tensors; ``head`` stands for the last linear layer, and
            ``norm`` for all norms, of which there may be none.
        buffers: Names of the floating-point buffers among the weights.
        norms: Names of the tensors of norms, from :func:`norms_of`.
        uses: Uses of the parameters by layers, from :func:`~lightning_sparsefl.sparse.uses.uses_of`.
        option: Dotted name of the option that has the patterns, for messages.

    Raises:
        InvalidOption: If a pattern other than ``norm`` matches nothing, or names a layer that shares a tensor with one
            that no pattern names, or if the head is frozen.

    Example:
        >>> import torch
        >>> sizes = {"conv.weight": (2, 1, 3, 3), "bn.weight": (2,), "fc.weight": (3, 2), "fc.bias": (3,)}
        >>> weights = {name: torch.ones(size) for name, size in sizes.items()}
        >>> part(weights, ["head"]), part(weights, ["norm", "conv"], norms=["bn.weight"])
        (('fc.weight', 'fc.bias'), ('conv.weight', 'bn.weight'))
    """
    found: set[str] = set()
    parameters = without(weights, buffers)
    for pattern in patterns:
        if pattern == HEAD:
            found.update(_head_that_trains(parameters, uses))
        elif pattern == NORM:
            found.update(norms)
        else:
            found.update(_matching(weights, pattern, uses, option))
    modules = [pattern for pattern in patterns if pattern not in (HEAD, NORM)]
    require_whole_layers(parameters, modules, found, uses)
    return tuple(name for name in weights if name in found)


def _head_that_trains(parameters: Weights, uses: TensorUses) -> tuple[str, ...]:
    """Return the names of the head's tensors, unless all of them are frozen, as those of a teacher's last layer are."""
    head = head_of(parameters, uses=uses, named=f"instead of {HEAD!r}")
    if uses.frozen.issuperset(head):
        raise InvalidOption(
            f"The model's head `{owner(head[0])}`, its last linear layer, is frozen (`requires_grad=False`); expected "
            f"one that trains, so name the layer of the outputs instead of {HEAD!r}."
        )
    return head


def _matching(weights: Weights, pattern: str, uses: TensorUses, option: str) -> list[str]:
    """Return the names that a pattern matches; at least one, if only of a tensor that another layer has too."""
    found = matching(weights, pattern)
    if not found and not matching(uses.among(weights), pattern):
        raise InvalidOption(
            f"`{option}` has the pattern {pattern!r}, which matches no tensor; expected 'head', 'norm', a module, or a "
            f"glob that matches some of {listed(weights, _SHOWN)}."
        )
    return found


def layers_with_buffers(weights: Weights, buffers: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return the layers and blocks of :func:`~lightning_sparsefl.sparse.layer_groups.layer_groups` with their buffers.

    A buffer belongs to a layer with a parameter of the same module.

    Args:
        weights: Weights of the whole model.
        buffers: Names of the floating-point buffers among them.

    Example:
        >>> import torch
        >>> sizes = {"fc.weight": (3, 2), "bn.weight": (3,), "out.weight": (2, 3), "bn.running_mean": (3,)}
        >>> weights = {name: torch.ones(size) for name, size in sizes.items()}
        >>> layers_with_buffers(weights, ["bn.running_mean"])
        {'fc': ('fc.weight', 'bn.weight', 'bn.running_mean'), 'out': ('out.weight',)}
    """
    groups = {}
    for layer, names in layer_groups(without(weights, buffers)).items():
        owners = {owner(name) for name in names}
        groups[layer] = (*names, *(name for name in buffers if owner(name) in owners))
    return groups


def only(weights: Weights, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the weights with these names, in the order of the model.

    Args:
        weights: Weights by name.
        names: Names to keep; those that `weights` lacks are ignored.

    Example:
        >>> import torch
        >>> only({"a": torch.ones(1), "b": torch.ones(2)}, ["b"])
        {'b': tensor([1., 1.])}
    """
    kept = set(names)
    return {name: value for name, value in weights.items() if name in kept}


def without(weights: Weights, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the weights without those with these names, in the order of the model.

    Args:
        weights: Weights by name.
        names: Names to leave out; those that `weights` lacks are ignored.

    Example:
        >>> import torch
        >>> without({"a": torch.ones(1), "b": torch.ones(2)}, ["b"])
        {'a': tensor([1.])}
    """
    dropped = set(names)
    return {name: value for name, value in weights.items() if name not in dropped}


def norms_of(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters and buffers of all norms: torch's, and layers whose class is named a norm.

    Args:
        module: Module, whose tensors are named as in its ``state_dict``.

    Example:
        >>> sorted(norms_of(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))))
        ['1.bias', '1.weight']
    """
    norms = {name: child for name, child in module.named_modules() if _is_norm(child)}
    return frozenset(
        f"{name}.{tensor}".lstrip(".")
        for name, child in norms.items()
        for tensors in (child.named_parameters(recurse=False), child.named_buffers(recurse=False))
        for tensor, _ in tensors
    )


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm; a block that contains a norm is not one, whatever its name."""
    named = _NAMED_NORM.fullmatch(type(module).__name__) is not None and not list(module.children())
    return isinstance(module, _NORMS) or named
