"""Split of a density budget over the tensors of a model.

Erdos-Renyi and its kernel form: Mocanu et al., "Scalable training of artificial neural networks with adaptive
sparse connectivity inspired by network science", Nature Communications 2018; Evci et al., "Rigging the
lottery", ICML 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.types import Weights

Shapes: TypeAlias = Mapping[str, "Sequence[int] | Tensor"]
"""Named shapes, or tensors of these shapes."""

_ROUNDING = 1e-6
"""Rounding error of a product of a fraction and a count: 0.29 * 100 is 28.999999999999996 in floats."""


def floor_count(fraction: float, total: int) -> int:
    """Return ``floor(fraction * total)`` where a product within rounding error of an integer counts as that integer.

    Example:
        >>> floor_count(0.29, 100)
        29
    """
    return math.floor(fraction * total + _ROUNDING)


def ceil_count(fraction: float, total: int) -> int:
    """Return ``ceil(fraction * total)`` where a product within rounding error of an integer counts as that integer.

    Example:
        >>> ceil_count(0.07, 100), 0.07 * 100 > 7
        (7, True)
    """
    return math.ceil(fraction * total - _ROUNDING)


def maskable(weights: Weights) -> tuple[str, ...]:
    """Return the names of the tensors with two or more dimensions, but for those without elements.

    Example:
        >>> shapes = {"conv.weight": (4, 1, 3, 3), "conv.bias": (4,), "none.weight": (0, 4)}
        >>> maskable({name: torch.zeros(shape) for name, shape in shapes.items()})
        ('conv.weight',)
    """
    return tuple(name for name, value in weights.items() if value.dim() >= 2 and value.numel())


def prunable(
    weights: Weights, dense_layers: Sequence[str] = (), frozen: Collection[str] = frozenset()
) -> tuple[str, ...]:
    """Return the names of the tensors with two or more dimensions that train and that no pattern matches.

    Args:
        weights: Parameters by name.
        dense_layers: Globs over whole, case-sensitive names of the tensors that stay dense.
        frozen: Names of tensors that do not train, which stay dense too; a pattern may match them.

    Raises:
        InvalidOption: If a pattern matches no such tensor, or no tensor is left.

    Example:
        >>> prunable({"conv.weight": torch.zeros(4, 1, 3, 3), "head.weight": torch.zeros(2, 4)}, ["head.*"])
        ('conv.weight',)
    """
    names = maskable(weights)
    for pattern in dense_layers:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InvalidOption(f"The pattern {pattern!r} matches no layer, expected one for {listed(names)}.")
    spared = {name for name in names if any(fnmatchcase(name, pattern) for pattern in dense_layers)}
    left = tuple(name for name in names if name not in spared and name not in frozen)
    if not left and len(spared) < len(names):
        raise InvalidOption(
            f"The module freezes each layer that could be pruned (`requires_grad=False`), of {listed(names)}; expected "
            "one that trains."
        )
    if not left:
        raise InvalidOption(f"The patterns {list(dense_layers)} leave no layer to prune, among {listed(names)}.")
    return left


def uniform(shapes: Shapes, density: float) -> dict[str, float]:
    """Return the same density for every tensor.

    Raises:
        InvalidOption: If `density` is outside (0, 1].

    Example:
        >>> uniform({"a": (2, 2), "b": (3,)}, 0.5)
        {'a': 0.5, 'b': 0.5}
    """
    _require_density(density)
    return dict.fromkeys(shapes, float(density))


def erdos_renyi(shapes: Shapes, density: float) -> dict[str, float]:
    """Return densities in proportion to ``(n_in + n_out) / (n_in * n_out)``; the sizes of a kernel do not count.

    Args:
        shapes: Shapes of the tensors that share the budget.
        density: Fraction of all their positions to keep, in (0, 1].

    Raises:
        InvalidOption: If `density` is outside (0, 1].

    Example:
        >>> {name: round(d, 3) for name, d in erdos_renyi({"a": (10, 10), "b": (20, 20)}, 0.3).items()}
        {'a': 0.5, 'b': 0.25}
    """
    return _share(shapes, density, lambda shape: _raw(shape[:2]))


def erk(shapes: Shapes, density: float, power: float = 1.0) -> dict[str, float]:
    """Return densities in proportion to ``(sum(shape) / prod(shape)) ** power``, every dimension counted.

    With raw_l that score and N_l the size of tensor l, ``density_l = eps * raw_l``, where ::

        eps = (density * sum_sparse N - (1 - density) * sum_dense N) / sum_sparse raw * N

    A tensor with ``eps * raw_l > 1`` is made dense and eps is solved again, until all others fit.

    Args:
        shapes: Shapes of the tensors that share the budget.
        density: Fraction of all their positions to keep, in (0, 1].
        power: Exponent of the score: 1 is Erdos-Renyi-Kernel, 0 is uniform.

    Returns:
        The density of each tensor, in (0, 1]; dense ones are exactly 1.

    Raises:
        InvalidOption: If `density` is outside (0, 1].

    Example:
        >>> {name: round(d, 3) for name, d in erk({"a": (10, 10), "b": (20, 20)}, 0.3).items()}
        {'a': 0.5, 'b': 0.25}
    """
    return _share(shapes, density, lambda shape: _raw(shape) ** power)


def explicit(shapes: Shapes, patterns: Mapping[str, float], density: float) -> dict[str, float]:
    """Return the density that a pattern gives each tensor, and `density` for those that no pattern matches.

    The order of patterns does not matter: a tensor may match several only if they say the same.

    Args:
        shapes: Shapes by name.
        patterns: Globs over whole, case-sensitive names, each with a density in (0, 1].
        density: Density of all other tensors, in (0, 1].

    Raises:
        InvalidOption: If a density is outside (0, 1], a pattern matches no tensor, or two disagree about one.

    Example:
        >>> explicit({"conv1": (2, 2), "conv2": (2, 2), "head": (2, 2)}, {"conv?": 0.5, "head": 1.0}, 0.1)
        {'conv1': 0.5, 'conv2': 0.5, 'head': 1.0}
    """
    _require_density(density)
    said: dict[str, str] = {}
    for pattern, value in patterns.items():
        if not 0 < value <= 1:
            raise InvalidOption(f"The density of {pattern!r} is {value}, expected a number in (0, 1].")
        found = [name for name in shapes if fnmatchcase(name, pattern)]
        if not found:
            raise InvalidOption(f"The pattern {pattern!r} matches no tensor, expected one for {listed(shapes)}.")
        for name in found:
            other = said.setdefault(name, pattern)
            if patterns[other] != value:
                raise InvalidOption(
                    f"`{name}` has density {patterns[other]} by the pattern {other!r} and {value} by {pattern!r}; "
                    "expected one, so let only one of them match."
                )
    return {name: float(patterns[said[name]] if name in said else density) for name in shapes}


def kept_counts(shapes: Shapes, densities: Mapping[str, float]) -> dict[str, int]:
    """Return how many positions to keep: ``floor(density * N)``, at least 1; a name without a density is dense.

    Example:
        >>> kept_counts({"a": (10, 10), "b": (3,)}, {"a": 0.255, "b": 0.1})
        {'a': 25, 'b': 1}
    """
    kept = {}
    for name, shape in shapes.items():
        size, density = math.prod(_shape(shape)), densities.get(name, 1.0)
        kept[name] = size if density >= 1 else min(size, max(1, floor_count(density, size)))
    return kept


def listed(names: Iterable[str], most: int = 12) -> str:
    """Return the first few names for a message.

    Example:
        >>> listed(["a", "b", "c"], 2)
        '`a`, `b` and 1 more'
    """
    known = [f"`{name}`" for name in names]
    return ", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "") or "none"


def _share(shapes: Shapes, density: float, score: Callable[[Sequence[int]], float]) -> dict[str, float]:
    _require_density(density)
    if density >= 1:
        return dict.fromkeys(shapes, 1.0)
    plain = {name: _shape(shape) for name, shape in shapes.items()}
    sizes = {name: math.prod(shape) for name, shape in plain.items()}
    raw = {name: score(shape) for name, shape in plain.items() if sizes[name]}
    budget = density * sum(sizes.values())
    sparse, eps = dict(raw), 0.0
    while sparse:
        spare = budget - sum(size for name, size in sizes.items() if name not in sparse)
        eps = spare / sum(raw[name] * sizes[name] for name in sparse)
        fitting = {name: value for name, value in sparse.items() if eps * value <= 1}
        if len(fitting) == len(sparse):
            break
        sparse = fitting
    return {name: eps * sparse[name] if name in sparse else 1.0 for name in shapes}


def _raw(shape: Sequence[int]) -> float:
    """Return the raw score of a shape; a tensor without dimensions is one weight and scores like a vector: 1."""
    return sum(shape) / math.prod(shape) if shape else 1.0


def _shape(shape: Sequence[int] | Tensor) -> tuple[int, ...]:
    return tuple(shape.shape) if isinstance(shape, torch.Tensor) else tuple(shape)


def _require_density(density: float) -> None:
    if not 0 < density <= 1:
        raise InvalidOption(f"`density={density}`: expected a number in (0, 1].")
