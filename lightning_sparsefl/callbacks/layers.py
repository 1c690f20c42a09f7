"""Selection of the layers that a callback works on, by patterns of their names and types."""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.density import listed, maskable
from lightning_sparsefl.sparse.parametrized import changes_zeros, weight_of

_TYPE = "type:"
_COMPILED = "_orig_mod"
_LINEAR_MAPS = (
    *(nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag),
    *(nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention),
)
_messages = WarningCache()


@dataclass(frozen=True)
class _Layer:
    """A parameter of two or more dimensions, and what patterns match."""

    names: tuple[str, ...]
    """Its name without the parts that `torch.compile` adds, and that of the tensor that it parametrizes."""
    kinds: tuple[str, ...]
    """Names of the class of the module that holds it, and of those that it derives from."""
    default: bool
    """Whether it is chosen without patterns."""


def pattern_list(layers: list[str] | str | None) -> list[str] | None:
    """Return the patterns of a `layers` option as a list, in which one of them may stand alone.

    Example:
        >>> pattern_list("head*"), pattern_list(("*conv*", "!head*")), pattern_list(None)
        (['head*'], ['*conv*', '!head*'], None)
    """
    return [layers] if isinstance(layers, str) else layers and list(layers)


def choose(module: nn.Module, layers: Sequence[str] | str | None, owner: str) -> tuple[str, ...]:
    """Return the names of the layers that patterns choose, in the order of `module`.

    A layer is a floating-point or complex parameter of two or more dimensions, so that ``conv1.*`` chooses a kernel
    and not its bias; quantized and other integer parameters are never chosen. Without patterns, and with patterns
    that only take away, the choice begins with the weights of linear, convolutional, recurrent, attention and
    embedding layers, and with parameters called ``weight`` of other modules unless these are norms. Class tokens,
    tables of positions and scales of layers are chosen by name only.

    Args:
        module: Module whose parameters are chosen from.
        layers: Globs over whole, case-sensitive names, or with ``type:`` in front over the name of the class that
            holds the layer, or of one that it derives from: ``type:Conv2d``. A pattern with ``!`` in front takes away.
        owner: Name of the callback, for messages.

    Raises:
        InvalidOption: If the list of patterns is empty, a pattern matches no layer, no layer is left, or a layer is not
            initialized yet.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
        >>> choose(net, None, "StaticMask"), choose(net, "!2.*", "StaticMask"), choose(net, "type:Lin*", "StaticMask")
        (('0.weight', '2.weight'), ('0.weight',), ('2.weight',))
        >>> choose(net, "fc*", "StaticMask")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `StaticMask`: the pattern 'fc*' in `layers` matches no layer; \
expected one for `0.weight`, `2.weight`.
    """
    found = _layers(module, owner)
    patterns = _patterns(layers, owner)
    matched = {pattern: _matching(pattern.removeprefix("!"), found) for pattern in patterns}
    for pattern, names in matched.items():
        if not names:
            raise InvalidOption(_unmatched(module, pattern, found, owner))
    added = [names for pattern, names in matched.items() if not pattern.startswith("!")]
    taken = set().union(*(names for pattern, names in matched.items() if pattern.startswith("!")))
    start = set().union(*added) if added else _by_default(found, taken, owner)
    chosen = start - taken
    if not chosen:
        raise InvalidOption(
            f"`{owner}(layers={layers!r})` leaves no layer to mask; expected patterns that leave some of "
            f"{listed(found)}."
        )
    return tuple(name for name in found if name in chosen)


def _patterns(layers: Any, owner: str) -> list[str]:
    """Return the patterns of an option."""
    if isinstance(layers, str):
        return [layers]
    patterns: list[Any] = list(layers or ()) if layers is None or isinstance(layers, Iterable) else [layers]
    none = layers is not None and not patterns  # an empty list might mean all layers or none
    if none or not all(isinstance(pattern, str) for pattern in patterns):
        raise InvalidOption(f"`{owner}(layers={layers!r})`: expected a pattern, a list of patterns, or None for all.")
    return patterns


def plain_name(name: str) -> str:
    """Return the name of a parameter without the parts that ``torch.compile`` adds.

    Example:
        >>> plain_name("net._orig_mod.0.weight")
        'net.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def exactly(names: Iterable[str]) -> list[str]:
    """Return patterns for :func:`choose` that match these names only, whatever characters they have.

    Example:
        >>> exactly(["net._orig_mod.block[0].weight"])
        ['net.block[[]0].weight']
    """
    return [glob.escape(plain_name(name)) for name in names]


def require_maskable(
    module: nn.Module, names: Collection[str], owner: str, by_layers: bool = True, act: str = "mask"
) -> None:
    """Refuse parameters from which a parametrization computes a weight whose zeros are others.

    Args:
        module: Module that is masked.
        names: Names of its parameters that are masked.
        owner: Class of the callback, or the option of the run, for the error message.
        by_layers: Whether the owner has the option `layers`.
        act: Verb of what the owner does to weights.

    Raises:
        InvalidOption: Naming the first of the parameters.

    Example:
        >>> net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
        >>> require_maskable(net, ["0.parametrizations.weight.original1"], "StaticMask")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `StaticMask` cannot mask `0.weight`, which the parametrization \
`_WeightNorm` computes from `0.parametrizations.weight.original1`; take the layer away with '!0.*' in `layers`, or \
remove the parametrization before training.
    """
    for name in names:
        kind = changes_zeros(module, name)
        if kind is not None:
            holder, tensor = weight_of(module, name)
            weight = f"{holder}.{tensor}".lstrip(".")
            pattern = f"!{weight.rpartition('.')[0] or weight}.*"
            remedy = f"take the layer away with '{pattern}' in `layers`, or " if by_layers else ""
            raise InvalidOption(
                f"`{owner}` cannot {act} `{weight}`, which the parametrization `{kind}` computes from `{name}`; "
                f"{remedy}remove the parametrization before training."
            )


def require_units(groups: Sequence[Any], module: nn.Module, owner: str, layers: str, more: str = "") -> None:
    """Refuse a module without units.

    Args:
        groups: Groups of units that were found in the module.
        module: Module of the user.
        owner: Class of the callback, for the error message.
        layers: Kinds of layers whose units it chooses among.
        more: End of the sentence, with further things that are expected.

    Raises:
        InvalidOption: If there is no group.

    Example:
        >>> require_units([], nn.Linear(2, 2), "OrderedDropout", "linear or convolutional")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `OrderedDropout` finds no units in `Linear`; expected linear or \
convolutional layers whose outputs another such layer reads, without parametrizations or adapters between them.
    """
    if not groups:
        raise InvalidOption(
            f"`{owner}` finds no units in `{type(module).__name__}`; expected {layers} layers whose outputs another "
            f"such layer reads, without parametrizations or adapters between them{more}."
        )


def _layers(module: nn.Module, owner: str) -> dict[str, _Layer]:
    """Return every parameter that can be masked, by name."""
    parameters = dict(module.named_parameters())
    require_initialized(parameters, owner)
    real = {n: p for n, p in parameters.items() if p.is_floating_point() or p.is_complex()}
    layers = {name: _layer(module, name, real[name]) for name in maskable(real)}
    if not layers:
        raise InvalidOption(f"`{owner}` finds no layer: the module has no parameter of two or more dimensions.")
    return layers


def require_initialized(parameters: Mapping[str, Tensor], owner: str) -> None:
    """Refuse parameters of lazy layers that have no shape yet.

    Args:
        parameters: Parameters by name.
        owner: Class of the callback, for the error message.

    Raises:
        InvalidOption: Naming the first of them.

    Example:
        >>> require_initialized(dict(nn.Sequential(nn.LazyLinear(2)).named_parameters()), "StaticMask")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `StaticMask`: `0.weight` has no shape yet; expected lazy layers to be \
initialized in `configure_model` or `setup`, by a forward pass.
    """
    for name, parameter in parameters.items():
        if isinstance(parameter, UninitializedParameter):
            raise InvalidOption(
                f"`{owner}`: `{name}` has no shape yet; expected lazy layers to be initialized in `configure_model` or "
                "`setup`, by a forward pass."
            )


def _layer(module: nn.Module, name: str, value: Tensor) -> _Layer:
    path, tensor = weight_of(module, name)
    holder = module.get_submodule(path)
    kinds = (kind for kind in type(holder).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module)
    wide = sum(size > 1 for size in value.shape) > 1
    if isinstance(holder, _LINEAR_MAPS):
        default = "weight" in tensor and (wide or name.endswith(f"{path}.{tensor}".lstrip(".")))
    else:
        default = tensor == "weight" and wide and "norm" not in type(holder).__name__.lower()
    names = dict.fromkeys((plain_name(name), plain_name(f"{path}.{tensor}".lstrip("."))))
    return _Layer(tuple(names), tuple(kind.__name__ for kind in kinds), default)


def _by_default(found: Mapping[str, _Layer], taken: Collection[str], owner: str) -> set[str]:
    """Return the layers that are chosen without patterns."""
    chosen = {name for name, layer in found.items() if layer.default}
    others = [name for name in found if name not in chosen and name not in taken]
    if not chosen:
        raise InvalidOption(
            f"`{owner}` finds no weight of a linear, convolutional, recurrent, attention or embedding layer; name the "
            f"parameters in `layers`, among {listed(others or found)}."
        )
    if others:
        _messages.info(
            f"`{owner}` leaves {listed(others)} unchanged: no weights of linear, convolutional, recurrent, attention "
            "or embedding layers; name them in `layers` to include them."
        )
    return chosen


def _unmatched(module: nn.Module, pattern: str, found: Mapping[str, _Layer], owner: str) -> str:
    """Return the message for a pattern that matches no layer."""
    wanted = pattern.removeprefix("!")
    typed = wanted.startswith(_TYPE)
    known = dict.fromkeys(_TYPE + layer.kinds[0] for layer in found.values() if layer.kinds) if typed else found
    message = f"`{owner}`: the pattern {pattern!r} in `layers` matches no layer; expected one for {listed(known)}."
    if typed:
        return message
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if fnmatchcase(plain_name(name), wanted) and first[id(parameter)] in found:
            return f"{message} `{name}` is tied to `{first[id(parameter)]}`, which is its name here."
    return message


def stepped_by(optimizer: Any) -> set[int]:
    """Return the ``id`` of each parameter that an optimizer steps; with several optimizers, each has its own.

    Example:
        >>> import torch
        >>> weight = torch.ones(1, requires_grad=True)
        >>> stepped_by(torch.optim.SGD([weight])) == {id(weight)}
        True
    """
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def has_gradient(parameter: Tensor) -> bool:
    """Return whether a parameter has a gradient, without which an optimizer leaves it alone."""
    return parameter.grad is not None


def first_stepped(
    groups: Iterable[Mapping[str, Any]], is_stepped: Callable[[Tensor], bool] = has_gradient
) -> Mapping[str, Any] | None:
    """Return the first group of an optimizer that has a parameter which is stepped; None if there is no such group.

    Args:
        groups: Groups of parameters of the optimizer.
        is_stepped: Whether a step moves a parameter.

    Example:
        >>> import torch
        >>> frozen, weight = torch.ones(1), torch.ones(1, requires_grad=True)
        >>> groups = [{"params": [frozen], "lr": 0.01}, {"params": [weight], "lr": 0.05}]
        >>> first_stepped(groups, lambda parameter: parameter.requires_grad)["lr"]
        0.05
        >>> first_stepped(groups) is None
        True
    """
    return next((group for group in groups if any(map(is_stepped, group["params"]))), None)


def require_dense_gradients(module: nn.Module, names: Collection[str], owner: str) -> None:
    """Refuse parameters with sparse gradients, to which a dense one cannot be added.

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


def _matching(pattern: str, layers: Mapping[str, _Layer]) -> set[str]:
    if pattern.startswith(_TYPE):
        kind = pattern[len(_TYPE) :]
        return {name for name, layer in layers.items() if any(fnmatchcase(k, kind) for k in layer.kinds)}
    return {name for name, layer in layers.items() if any(fnmatchcase(n, pattern) for n in layer.names)}
