"""What several callbacks are told in the same words, checked in the same words."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.density import erk, kept_counts, uniform
from lightning_sparsefl.sparse.prune import random_masks
from lightning_sparsefl.types import Masks, Weights

LayerDensity: TypeAlias = Literal["erk", "uniform"]
"""How a density is spread over layers: by the Erdos-Renyi-Kernel rule, or evenly."""
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


def require_density(owner: str, density: float) -> None:
    """Refuse a density outside (0, 1]."""
    require(0 < density <= 1, owner, "density", density, "a number in (0, 1]")


def require_interval(owner: str, every_n_steps: int) -> None:
    """Refuse a number of steps below 1."""
    require(every_n_steps >= 1, owner, "every_n_steps", every_n_steps, "a whole number >= 1")


def require_window(owner: str, start: float, end: float) -> None:
    """Refuse shares of the training that are in the wrong order."""
    require(0 <= start < 1, owner, "start", start, "a share of the training in [0, 1)")
    require(start < end <= 1, owner, "end", end, f"a share of the training in (start, 1] = ({start}, 1]")


def require_layer_density(owner: str, layer_density: str) -> None:
    """Refuse an unknown way to spread a density."""
    require(layer_density in _SPREADS, owner, "layer_density", layer_density, "'erk' or 'uniform'")


def drawn(weights: Weights, density: float, layer_density: LayerDensity, *key: int | str) -> Masks:
    """Random masks of a density.

    Args:
        weights: The layers.
        density: Of all of them together, in (0, 1].
        layer_density: How it is spread over them.
        *key: Of the randomness.

    Example:
        >>> import torch
        >>> masks = drawn({"w": torch.ones(4, 5)}, 0.5, "uniform", 0, "doc")
        >>> int(masks["w"].sum())
        10
    """
    shapes = {name: value.shape for name, value in weights.items()}
    return random_masks(shapes, kept_counts(shapes, _SPREADS[layer_density](shapes, density)), generator(*key))
