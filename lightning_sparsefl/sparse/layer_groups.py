"""Groups of layers of a model: its stem, its blocks and its head, found by the names of its tensors.

A *group* is what is frozen or trained as one: a convolution or linear layer with the norm after it, or a whole block
(residual, depthwise, attention) with all that is inside. Names are enough: ``stage1.0.conv1.weight`` says that the
first block of a list of blocks holds a convolution. Where they mislead, patterns decide.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.parametrized import owner
from lightning_sparsefl.sparse.uses import EACH_ONCE, TensorUses
from lightning_sparsefl.types import Weights

_SHOWN = 12
_NUMBERED = re.compile(r"(.*[_-]|)\d+")
"""Names of the children of a list: ``3``, ``block_3``, or ``block1-3``."""
_RECURRENT = re.compile(r"(.*\.)?weight_(ih|hh|hr)(_l\d+(_reverse)?)?")
"""Names of the matrices of recurrent layers and cells."""


def head_of(
    weights: Weights, head: str | None = None, uses: TensorUses = EACH_ONCE, named: str | None = "with `head`"
) -> tuple[str, ...]:
    """Return the names of the head's tensors: those of the last linear layer, or of the module that `head` names.

    Args:
        weights: Parameters of a module by name, in the order in which the module holds them.
        head: Name of a module or a glob over names of tensors; None = the owner of the last matrix that is not of a
            recurrent layer or an embedding.
        uses: Uses of the parameters by layers, from :func:`~lightning_sparsefl.sparse.uses.uses_of`.
        named: How a user names the head, for the error message; None = there is no option for it.

    Raises:
        InvalidOption: If there is no such module or no matrix at all, if recurrent layers come after the last linear
            one, or if the head shares a tensor with another layer, which must then be named.

    Example:
        >>> import torch
        >>> sizes = {"conv.weight": (2, 1, 3, 3), "fc.weight": (3, 2), "fc.bias": (3,), "scale": (1,)}
        >>> head_of({name: torch.ones(size) for name, size in sizes.items()})
        ('fc.weight', 'fc.bias')
    """
    if head is None:
        found = _last_linear(weights, uses, named)
    else:
        found = matching(weights, head)
        require_whole_layers(weights, [head], found, uses)
    if not found:
        wanted = "linear layer" if head is None else f"`{head}`"
        remedy = "expected one" if named is None else f"name one of {_listed(weights)} {named}"
        raise InvalidOption(f"The model has no {wanted} to be its head; {remedy}.")
    return tuple(found)


def head_layer(weights: Weights, head: str | None = None, uses: TensorUses = EACH_ONCE) -> str:
    """Return the name of the layer with the logits, which may share its tensors with other layers.

    Args:
        weights: Parameters of a module by name, in the order in which the module holds them.
        head: Name of the layer; None = the last linear layer.
        uses: Uses of the parameters by layers, as in :func:`head_of`.

    Raises:
        InvalidOption: If there is no such layer.

    Example:
        >>> import torch
        >>> head_layer({"conv.weight": torch.zeros(2, 1, 3, 3), "net.fc.weight": torch.zeros(3, 2)})
        'net.fc'
    """
    if head is None:
        last = _last_matrix(weights, uses, "with `head`")
    else:
        last = next(iter(matching(uses.among(weights), head)), None)
    return owner(head_of(weights, head, uses)[0] if last is None else last)


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names of the tensors of a module, or those that a glob matches.

    Args:
        names: Names of tensors.
        pattern: Name of the module, or the glob.

    Example:
        >>> matching(["fc.weight", "fc.bias", "fc2.bias"], "fc"), matching(["fc.weight", "fc.bias"], "*.bias")
        (['fc.weight', 'fc.bias'], ['fc.bias'])
    """
    return [name for name in names if name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)]


def require_whole_layers(
    weights: Weights, modules: Iterable[str], found: Collection[str], uses: TensorUses = EACH_ONCE
) -> None:
    """Check that modules that were named share no tensors with layers that were not.

    Args:
        weights: Parameters by name.
        modules: Names of the modules; globs are ignored.
        found: Names of the tensors that were found for all names and globs together.
        uses: Uses of the parameters by layers.

    Raises:
        InvalidOption: If a layer of the modules uses a tensor that was not found.

    Example:
        >>> import torch
        >>> tied = TensorUses({"table.weight": "table.weight", "out.weight": "table.weight"})
        >>> require_whole_layers({"table.weight": torch.ones(2, 2)}, ["table"], ["table.weight"], tied)
    """
    among = uses.among(weights)
    for module in modules:
        for use in (use for use in among if use.startswith(f"{module}.") and among[use] not in found):
            raise InvalidOption(
                f"`{owner(use)}` shares `{among[use]}` with `{owner(among[use])}`, so that neither can be treated "
                f"without the other; name `{owner(among[use])}`, or give `{owner(use)}` a tensor of its own."
            )


def require_untied_head(weights: Weights, uses: TensorUses = EACH_ONCE, named: str | None = "with `head`") -> None:
    """Check that the last layer with a matrix shares no tensor with another layer; a model without one passes.

    Args:
        weights: Parameters of a module by name, in the order in which the module holds them.
        uses: Uses of the parameters by layers.
        named: How a user names the head, for the error message; None = there is no option for it.

    Raises:
        InvalidOption: If it shares one.

    Example:
        >>> import torch
        >>> require_untied_head({"table.weight": torch.ones(2, 2), "out.weight": torch.ones(2, 2)})
    """
    for use in _same_layer(uses.among(weights), next(reversed(_matrices(weights, uses)), None)):
        for other in uses.others(use):
            tensor = uses.stored[use]
            remedy = "" if named is None else f", or name `{owner(tensor)}` {named}, which then concerns both"
            raise InvalidOption(
                f"The model's head `{owner(use)}` shares `{tensor}` with `{other}`, so that neither can be treated "
                f"without the other; give `{owner(use)}` a tensor of its own{remedy}."
            )


def _last_linear(weights: Weights, uses: TensorUses, named: str | None) -> list[str]:
    """Return the names of the tensors of the layer with the last matrix."""
    among, last = uses.among(weights), _last_matrix(weights, uses, named)
    require_untied_head(weights, uses, named)
    found = {among[use] for use in _same_layer(among, last)}
    return [name for name in weights if name in found]


def _same_layer(uses: Iterable[str], last: str | None) -> list[str]:
    return [use for use in uses if last is not None and owner(use) == owner(last)]


def _matrices(weights: Weights, uses: TensorUses) -> list[str]:
    """Return the names under which layers other than embeddings use matrices, in the order of the layers."""
    among = uses.among(weights)
    return [use for use, name in among.items() if weights[name].dim() == 2 and use not in uses.embeddings]


def _last_matrix(weights: Weights, uses: TensorUses, named: str | None) -> str | None:
    """Return the name under which a layer uses the last matrix, which no recurrent layer may follow; None without."""
    matrices = _matrices(weights, uses)
    linear = [use for use in matrices if not _RECURRENT.fullmatch(use)]
    if linear and linear[-1] != matrices[-1]:
        raise InvalidOption(
            f"The model's head is not known, since the recurrent layer `{owner(matrices[-1])}` comes after "
            f"`{owner(linear[-1])}`, its last other matrix, in the order of its layers; create the layer of the "
            f"outputs last{'' if named is None else f', or name it {named}'}."
        )
    return linear[-1] if linear else None


def require_passable(weights: Weights, head: Collection[str]) -> None:
    """Refuse a head that is 0 and stays so, since no gradient of the other layers passes through it.

    Args:
        weights: Initial weights by name.
        head: Names of the tensors of the head, from :func:`head_of`.

    Raises:
        InvalidOption: If all matrices of the head are 0.

    Example:
        >>> import torch
        >>> require_passable({"head.weight": torch.zeros(2, 4)}, ["head.weight"])
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: The head ['head.weight'] is 0 and does not train in rounds, so that \
no gradient reaches the other layers; expected a `model` with a random head, unlike torchvision's `VisionTransformer`.
    """
    matrices = [weights[name] for name in head if weights[name].dim() >= 2]
    if matrices and not any(bool(matrix.any()) for matrix in matrices):
        raise InvalidOption(
            f"The head {list(head)} is 0 and does not train in rounds, so that no gradient reaches the other layers; "
            "expected a `model` with a random head, unlike torchvision's `VisionTransformer`."
        )


def layer_groups(weights: Weights, patterns: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return the groups of a body, in order: names of tensors by name of group.

    Starting from the outermost module that has several children, a module is divided if it is a list of modules, or
    holds lists of blocks at any depth; otherwise it is a block. A layer outside of blocks is a group; one without a
    matrix or kernel, such as a norm, joins the layer right before it, and is a group of its own after a block.

    Args:
        weights: Parameters of the body by name, in the order in which the module holds them.
        patterns: Globs over names of tensors; each makes one group of those that it is the first to match. What none
            matches is grouped by the rule.

    Raises:
        InvalidOption: If a pattern matches nothing.

    Example:
        >>> import torch
        >>> sizes = {"conv.weight": (2, 1, 3, 3), "norm.weight": (2,), "blocks.0.conv.weight": (2, 2, 3, 3),
        ...          "blocks.0.norm.weight": (2,), "blocks.1.conv.weight": (2, 2, 3, 3), "last.weight": (2,)}
        >>> body = {name: torch.ones(size) for name, size in sizes.items()}
        >>> list(layer_groups(body).items())[:2]
        [('conv', ('conv.weight', 'norm.weight')), ('blocks.0', ('blocks.0.conv.weight', 'blocks.0.norm.weight'))]
        >>> list(layer_groups(body)), list(layer_groups(body, ["blocks.*"]))
        (['conv', 'blocks.0', 'blocks.1', 'last'], ['conv', 'blocks.*', 'last'])
    """
    groups: dict[str, tuple[str, ...]] = {}
    left = list(weights)
    for pattern in patterns:
        groups[pattern] = tuple(name for name in left if fnmatchcase(name, pattern))
        if not groups[pattern]:
            raise InvalidOption(
                f"The pattern {pattern!r} in `groups` matches nothing new; expected one for {_listed(weights)}."
            )
        left = [name for name in left if name not in groups[pattern]]
    groups |= _joined(list(_pieces(_outermost(_tree(left)), outermost=True)), weights)
    place = {name: number for number, name in enumerate(weights)}
    return dict(sorted(groups.items(), key=lambda group: place[group[1][0]]))


def group_sizes(weights: Weights, groups: dict[str, tuple[str, ...]]) -> list[int]:
    """Return the number of parameters of each group.

    Example:
        >>> import torch
        >>> group_sizes({"a.weight": torch.ones(2, 3), "a.bias": torch.ones(2)}, {"a": ("a.weight", "a.bias")})
        [8]
    """
    return [sum(weights[name].numel() for name in names) for names in groups.values()]


@dataclass
class _Module:
    """A module as the names of its tensors describe it."""

    path: str
    tensors: list[str] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)

    @property
    def numbered(self) -> bool:
        return _NUMBERED.fullmatch(self.path.rpartition(".")[2]) is not None

    @property
    def is_list(self) -> bool:
        keys = [_NUMBERED.fullmatch(key) for key in self.children]
        return not self.tensors and len({key and key[1] for key in keys} | {None}) == 2 and None not in keys

    @property
    def is_list_of_blocks(self) -> bool:
        return self.is_list and any(child.children for child in self.children.values())

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors inside."""
        return (*self.tensors, *(name for child in self.children.values() for name in child.names()))


def _tree(names: Sequence[str]) -> _Module:
    root = _Module("")
    for name in names:
        module = root
        for key in name.split(".")[:-1]:
            module = module.children.setdefault(key, _Module(f"{module.path}.{key}".lstrip(".")))
        module.tensors.append(name)
    return root


def _outermost(module: _Module) -> _Module:
    while len(module.children) == 1 and not module.tensors:
        (module,) = module.children.values()
    return module


def _is_taken_apart(module: _Module) -> bool:
    if module.is_list:  # a numbered list of plain layers is one of several blocks
        return not module.numbered or all(child.children for child in module.children.values())
    return not module.numbered and any(
        child.is_list_of_blocks or _is_taken_apart(child) for child in module.children.values()
    )


def _pieces(module: _Module, *, outermost: bool = False) -> Iterator[_Module]:
    """Yield layers and blocks, in order; a tensor that a divided module holds itself is a layer."""
    if not module.children or not (outermost or _is_taken_apart(module)):
        yield module
        return
    yield from (_Module(name, [name]) for name in module.tensors)
    for child in module.children.values():
        yield from _pieces(child)


def _joined(pieces: Sequence[_Module], weights: Weights) -> dict[str, tuple[str, ...]]:
    groups: dict[str, tuple[str, ...]] = {}
    place = {name: number for number, name in enumerate(weights)}
    layer = ""  # the group that a norm may join
    for piece in pieces:
        names = piece.names()
        bare = not piece.children and all(weights[name].dim() < 2 for name in names)
        if bare and layer and owner(piece.path) == owner(layer) and place[names[0]] == place[groups[layer][-1]] + 1:
            groups[layer] += names
        elif names:
            groups[piece.path] = names
            layer = "" if piece.children or bare else piece.path
    return groups


def _listed(weights: Weights) -> str:
    owners = list(dict.fromkeys(owner(name) or name for name in weights))
    shown = ", ".join(f"`{owner}`" for owner in owners[:_SHOWN]) or "its modules, of which it has 0"
    return shown + (f" and {len(owners) - _SHOWN} more" if len(owners) > _SHOWN else "")
