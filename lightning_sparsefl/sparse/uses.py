"""Uses of a module's parameters by its layers: two layers with tied weights use one tensor under two names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_sparsefl.sparse.parametrized import changes_zeros, owner

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class TensorUses:
    """The names under which layers use the parameters of a module."""

    stored: Mapping[str, str] = field(default_factory=dict)
    """For each name, in the order of the layers, the one under which weights contain the tensor; empty = unknown."""
    embeddings: frozenset[str] = frozenset()
    """Names of the tensors of embeddings, which are not the head."""
    frozen: frozenset[str] = frozenset()
    """Names under which weights contain the parameters that do not train (``requires_grad=False``)."""
    computing: Mapping[str, str] = field(default_factory=dict)
    """For each parameter from which a parametrization computes a weight with other zeros, the parametrization."""

    def among(self, weights: Iterable[str]) -> dict[str, str]:
        """Return the uses of some tensors, with the name under which weights contain each.

        Args:
            weights: Names of the tensors.

        Example:
            >>> TensorUses({"table.weight": "table.weight", "out.weight": "table.weight"}).among(["table.weight"])
            {'table.weight': 'table.weight', 'out.weight': 'table.weight'}
            >>> TensorUses().among(["fc.weight"])
            {'fc.weight': 'fc.weight'}
        """
        names = list(weights)
        if not self.stored:
            return {name: name for name in names}
        known = set(names)
        return {use: name for use, name in self.stored.items() if name in known}

    def others(self, use: str) -> list[str]:
        """Return the other layers that use the same tensor.

        Args:
            use: Name under which a layer uses the tensor.

        Example:
            >>> TensorUses({"table.weight": "table.weight", "out.weight": "table.weight"}).others("out.weight")
            ['table']
        """
        name = self.stored.get(use, use)
        layers = dict.fromkeys(owner(other) for other, stored in self.stored.items() if stored == name)
        return [layer for layer in layers if layer != owner(use)]


EACH_ONCE = TensorUses()
"""Uses of a model whose layers share no tensors."""


def uses_of(module: nn.Module) -> TensorUses:
    """Return the uses of a module's parameters, each layer once.

    Args:
        module: Module, whose tensors are named as in its ``state_dict``.

    Example:
        >>> net = nn.ModuleDict({"table": nn.Embedding(5, 2), "out": nn.Linear(2, 5, bias=False)})
        >>> net["out"].weight = net["table"].weight
        >>> uses_of(net).stored
        {'table.weight': 'table.weight', 'out.weight': 'table.weight'}
        >>> sorted(uses_of(net).embeddings)
        ['table.weight']
    """
    first: dict[int, str] = {}
    stored, embeddings, frozen, computing = {}, set(), set(), {}
    for layer, child in module.named_modules():
        for leaf, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            use = f"{layer}.{leaf}".lstrip(".")
            stored[use] = first.setdefault(id(parameter), use)
            if isinstance(child, _EMBEDDINGS):
                embeddings.add(use)
            if not parameter.requires_grad:
                frozen.add(stored[use])
            kind = changes_zeros(module, use)
            if kind is not None:
                computing[stored[use]] = kind
    return TensorUses(stored, frozenset(embeddings), frozenset(frozen), computing)
