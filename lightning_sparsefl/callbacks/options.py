"""Options that several callbacks share, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, TypeAlias

import torch
from torch import nn

from lightning_sparsefl.callbacks.clock import StepClock
from lightning_sparsefl.errors import InvalidOption, is_infinite, is_number, is_whole, type_checks
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.conv1d import inputs_come_first
from lightning_sparsefl.sparse.density import ceil_count, erk, explicit, floor_count, kept_counts, listed, uniform
from lightning_sparsefl.sparse.masks import kept
from lightning_sparsefl.sparse.prune import random_masks
from lightning_sparsefl.sparse.rescale import fan_in_scale
from lightning_sparsefl.types import Masks, Weights

_P = ParamSpec("_P")

LayerDensity: TypeAlias = Literal["erk", "uniform"] | dict[str, float]
"""Rule that spreads a density over layers: the Erdos-Renyi-Kernel rule, an equal density, or name patterns.

With patterns, such as ``{"*conv*": 0.5, "head*": 1.0}``, a layer that none of them matches has the density itself.
"""
_SPREADS = {"erk": erk, "uniform": uniform}


def require(fits: bool, owner: str, option: str, value: Any, expected: str) -> None:
    """Refuse an option that does not fit.

    Raises:
        InvalidOption: Naming the callback, the option, its value, and what was expected.

    Example:
        >>> require(False, "StaticMask", "density", 2, "a number in (0, 1]")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `StaticMask(density=2)`: expected a number in (0, 1].
    """
    if not fits:
        raise InvalidOption(f"`{owner}({option}={value!r})`: expected {expected}.")


def check_arguments(initialize: Callable[_P, None]) -> Callable[_P, None]:
    """Decorate the constructor of a callback, so that arguments of other types than their annotations are refused.

    What the constructor checks itself comes first, since it says more.

    Args:
        initialize: The method `__init__`.

    Example:
        >>> class Slow:
        ...     @check_arguments
        ...     def __init__(self, every_n_steps: int = 1): ...
        >>> Slow("2")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `Slow(every_n_steps='2')`: expected a whole number.
    """
    names = list(signature(initialize).parameters)

    def refuse(callback: Any, given: Mapping[str, Any]) -> None:
        checks = type_checks(initialize)
        for name, value in given.items():
            if name in checks:
                fits, expected = checks[name]
                require(fits(value), type(callback).__name__, name, value, expected)
                require(not is_infinite(value), type(callback).__name__, name, value, "a finite number")

    @wraps(initialize)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        try:
            initialize(*args, **kwargs)
        except InvalidOption:
            raise
        except Exception:  # perhaps of a comparison of values of other types
            refuse(args[0], given)
            raise
        refuse(args[0], given)

    return checked


def require_density(owner: str, density: float) -> None:
    """Refuse a density outside (0, 1]."""
    require(is_number(density) and 0 < density <= 1, owner, "density", density, "a number in (0, 1]")


def require_interval(owner: str, every_n_steps: int) -> None:
    """Refuse a number of steps below 1."""
    require(is_whole(every_n_steps, 1), owner, "every_n_steps", every_n_steps, "a whole number >= 1")


def require_window(owner: str, start: float, end: float) -> None:
    """Refuse shares of the training that are out of range or order."""
    require(0 <= start < 1, owner, "start", start, "a share of the training in [0, 1)")
    require(start < end <= 1, owner, "end", end, f"a share of the training in (start, 1] = ({start}, 1]")


def require_layer_density(owner: str, layer_density: LayerDensity) -> None:
    """Refuse an unknown way to spread a density."""
    expected = "'erk' or 'uniform', or densities in (0, 1] by name pattern"
    known = (
        all(0 < density <= 1 for density in layer_density.values())
        if isinstance(layer_density, Mapping)
        else layer_density in _SPREADS
    )
    require(known, owner, "layer_density", layer_density, expected)


def spread(owner: str, weights: Weights, density: float, layer_density: LayerDensity) -> dict[str, float]:
    """Return the density of each layer.

    Args:
        owner: Name of the callback, for the error message.
        weights: Layers by name.
        density: Density of all of them together, in (0, 1]; with patterns, of each layer that none of them matches.
        layer_density: Rule or patterns by which the density is spread over the layers.

    Raises:
        InvalidOption: If a layer would keep less than one weight, or a pattern matches no layer.

    Example:
        >>> import torch
        >>> spread("StaticMask", {"a": torch.ones(4, 5), "b": torch.ones(2, 2)}, 0.1, {"b": 1.0})
        {'a': 0.1, 'b': 1.0}
        >>> spread("StaticMask", {"b": torch.ones(2, 2)}, 0.1, "uniform")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `StaticMask(density=0.1)`: `b` cannot reach 0.1, which is less than \
one of its 4 weights; expected a larger density, one for it in `layer_density`, or `layers` without it ('!b').
    """
    shapes = {name: value.shape for name, value in weights.items()}
    try:
        if isinstance(layer_density, Mapping):
            densities = explicit(shapes, layer_density, density)
        else:
            densities = _SPREADS[layer_density](shapes, density)
    except InvalidOption as error:
        raise InvalidOption(f"`{owner}(layer_density={layer_density!r})`: {error}") from error
    for name, share in densities.items():
        size = weights[name].numel()
        if size and floor_count(share, size) < 1:
            raise InvalidOption(
                f"`{owner}(density={density})`: `{name}` cannot reach {share:.3g}, which is less than one of its "
                f"{size} weights; expected a larger density, one for it in `layer_density`, or `layers` without it "
                f"('!{name}')."
            )
    return densities


def require_one_each(owner: str, option: str, value: Any, count: int, weights: Weights) -> None:
    """Refuse to leave fewer weights than there are layers, of which one would then pass no signal.

    Raises:
        InvalidOption: Naming the layers.

    Example:
        >>> import torch
        >>> require_one_each("GradualPruning", "density", 0.1, 1, {"a": torch.ones(2, 2), "b": torch.ones(2, 3)})
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `GradualPruning(density=0.1)`: expected an option that leaves each \
layer a weight, but 1 weight in all is too few for `a`, `b`.
    """
    layers = [name for name, weight in weights.items() if weight.numel()]
    plenty = f"{count} weight{'' if count == 1 else 's'} in all is too few for {listed(layers)}"
    expected = f"an option that leaves each layer a weight, but {plenty}"
    require(count >= len(layers), owner, option, value, expected)


def window(start: float, end: float, total: int) -> tuple[int, int]:
    """Return the first and the last step of a window that is given in shares of a training of `total` steps.

    Example:
        >>> window(0.25, 0.5, 100)
        (25, 50)
    """
    first = floor_count(start, total)
    return first, max(first + 1, ceil_count(end, total))


def too_dense(masks: Masks, goal: int, clock: StepClock) -> str | None:
    """Return the step and the density where more than `goal` weights are left, as a clause; None if they are not.

    Example:
        >>> import torch
        >>> too_dense({"w": torch.tensor([True, True, False, True])}, 1, StepClock())
        'at step 0 of 1 with density 0.75, above the 0.25 that was asked for'
    """
    left, size = kept(masks), sum(mask.numel() for mask in masks.values())
    if left <= goal:
        return None
    return (
        f"at step {clock.step} of {clock.total} with density {left / size:.3g}, above the {goal / size:.3g} that was "
        f"asked for{clock.reason}"
    )


def rescales(rescale: bool | None, module: nn.Module) -> bool:
    """Return whether to rescale the first weights of a module: None = where no normalization layer does so anyway.

    Example:
        >>> rescales(None, nn.Linear(1, 1)), rescales(None, nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1)))
        (True, False)
    """
    if rescale is not None:
        return rescale
    return not any("norm" in type(layer).__name__.lower() for layer in module.modules())


@torch.no_grad()
def rescale_first_weights(module: nn.Module, weights: Weights, masks: Masks) -> None:
    """Multiply kept weights, in place, by what keeps the variance of outputs that the dense initialization had.

    Embeddings, whose outputs are sums over no inputs, stay as they are.

    Args:
        module: Module that has the weights.
        weights: Masked parameters of the module by name.
        masks: Masks of these parameters.

    Example:
        >>> layer = nn.Linear(4, 1)
        >>> _ = nn.init.ones_(layer.weight)
        >>> mask = torch.tensor([[True, False, False, False]])
        >>> rescale_first_weights(layer, {"weight": layer.weight}, {"weight": mask})
        >>> layer.weight.tolist()
        [[2.0, 2.0, 2.0, 2.0]]
    """
    for name, weight in weights.items():
        holder = module.get_submodule(name.rpartition(".")[0])
        if not isinstance(holder, nn.Embedding | nn.EmbeddingBag):
            transposed = inputs_come_first(holder) and getattr(holder, "groups", 1) == 1
            weight.mul_(fan_in_scale(masks[name], outputs=1 if transposed else 0).to(weight.dtype))


def drawn(owner: str, weights: Weights, density: float, layer_density: LayerDensity, *key: int | str) -> Masks:
    """Draw masks of a density.

    Args:
        owner: Name of the callback, for the error message.
        weights: Layers by name.
        density: Density of all of them together, in (0, 1].
        layer_density: Rule or patterns by which the density is spread over the layers.
        *key: Key of the randomness.

    Raises:
        InvalidOption: If a layer would keep less than one weight, or a pattern matches no layer.

    Example:
        >>> import torch
        >>> masks = drawn("StaticMask", {"w": torch.ones(4, 5)}, 0.5, "uniform", 0, "doc")
        >>> int(masks["w"].sum())
        10
    """
    counts = kept_counts(weights, spread(owner, weights, density, layer_density))
    return random_masks(weights, counts, generator(*key))
