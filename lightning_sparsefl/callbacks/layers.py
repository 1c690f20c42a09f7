"""Which layers a callback works on, by patterns of their names and types."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.density import listed, maskable

_TYPE = "type:"


def choose(module: nn.Module, layers: Sequence[str] | str | None, owner: str) -> tuple[str, ...]:
    """Names of the layers that patterns choose, in the order of `module`; one with ``!`` in front takes away.

    A layer is a parameter of two or more dimensions, so that ``conv1.*`` chooses a kernel and not its bias.

    Args:
        module: The module, whose parameters are chosen from.
        layers: Globs over whole names, capitals and all, or with ``type:`` in front over the name of the class that
            holds the layer, or of one that it derives from: ``type:Conv2d``, ``!type:Linear``. None, and globs that
            only take away, begin with every layer.
        owner: The callback, to be named in a message.

    Raises:
        InvalidOption: If a pattern matches no layer, or none is left.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
        >>> choose(net, None, "StaticMask"), choose(net, "!2.*", "StaticMask"), choose(net, "type:Lin*", "StaticMask")
        (('0.weight', '2.weight'), ('0.weight',), ('2.weight',))
        >>> choose(net, "fc*", "StaticMask")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `StaticMask`: the pattern 'fc*' in `layers` matches no layer; \
expected one for `0.weight`, `2.weight`.
    """
    kinds = _kinds(module)
    if not kinds:
        raise InvalidOption(f"`{owner}` finds no layer: the module has no parameter of two or more dimensions.")
    patterns = [layers] if isinstance(layers, str) else list(layers or ())
    matched = {pattern: _matching(pattern.removeprefix("!"), kinds) for pattern in patterns}
    for pattern, found in matched.items():
        if not found:
            typed = pattern.removeprefix("!").startswith(_TYPE)
            known = dict.fromkeys(_TYPE + own[0] for own in kinds.values() if own) if typed else kinds
            raise InvalidOption(
                f"`{owner}`: the pattern {pattern!r} in `layers` matches no layer; expected one for {listed(known)}."
            )
    added = [found for pattern, found in matched.items() if not pattern.startswith("!")]
    taken = set().union(*(found for pattern, found in matched.items() if pattern.startswith("!")))
    chosen = (set().union(*added) if added else set(kinds)) - taken
    if not chosen:
        raise InvalidOption(
            f"`{owner}(layers={layers!r})` leaves no layer to mask; expected patterns that leave some of "
            f"{listed(kinds)}."
        )
    return tuple(name for name in kinds if name in chosen)


def _kinds(module: nn.Module) -> dict[str, list[str]]:
    """Each layer, with the name of the class that holds it and of those that it derives from."""
    return {
        name: [
            kind.__name__
            for kind in type(module.get_submodule(name.rpartition(".")[0])).__mro__
            if issubclass(kind, nn.Module) and kind is not nn.Module
        ]
        for name in maskable(dict(module.named_parameters()))
    }


def stepped_by(optimizer: Any) -> set[int]:
    """The ``id`` of each parameter that an optimizer steps: with several optimizers, each has its own.

    Example:
        >>> import torch
        >>> weight = torch.ones(1, requires_grad=True)
        >>> stepped_by(torch.optim.SGD([weight])) == {id(weight)}
        True
    """
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def require_dense_gradients(module: nn.Module, names: Collection[str], owner: str) -> None:
    """See that the gradients of parameters are tensors to which a dense one can be added.

    Raises:
        InvalidOption: Naming the first embedding that has sparse ones.

    Example:
        >>> require_dense_gradients(nn.Sequential(nn.Embedding(3, 2, sparse=True)), ["0.weight"], "ProximalTerm")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `ProximalTerm` adds a dense gradient to that of `0.weight`, which is \
sparse; expected an Embedding with `sparse=False`.
    """
    for path, layer in module.named_modules():
        name = f"{path}.weight".lstrip(".")
        if name in names and getattr(layer, "sparse", False):
            raise InvalidOption(
                f"`{owner}` adds a dense gradient to that of `{name}`, which is sparse; expected an "
                f"{type(layer).__name__} with `sparse=False`."
            )


def _matching(pattern: str, kinds: Mapping[str, Sequence[str]]) -> set[str]:
    if pattern.startswith(_TYPE):
        return {name for name, own in kinds.items() if any(fnmatchcase(k, pattern[len(_TYPE) :]) for k in own)}
    return {name for name in kinds if fnmatchcase(name, pattern)}
