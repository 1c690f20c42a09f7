"""The first stage of PruneFL (arXiv:1909.12326): one client trains and prunes the model alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from lightning_sparsefl.callbacks import GradientSum
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.sparse.allocate import reallocate
from lightning_sparsefl.sparse.density import listed
from lightning_sparsefl.sparse.masks import apply, dense_like, kept
from lightning_sparsefl.types import Masks, Weights

_ADJUSTMENTS, _CALM, _SMALL = 20, 5, 0.1
"""Largest number of reconfigurations. :func:`prune_alone` ends earlier after `_CALM` in a row, each of which changed
the number of kept weights by at most `_SMALL` of it."""


def prune_alone(
    client: Client, seconds: Weights, epochs: int, accuracy: float, fraction: float, constant: float
) -> tuple[Weights, Masks]:
    """Train and prune the initial model on one client's data until the density hardly changes.

    Args:
        client: The client.
        seconds: Time of one weight of each layer that is pruned.
        epochs: Number of epochs between two reconfigurations.
        accuracy: Value of `federation.monitor` from which on the model is pruned.
        fraction: Largest fraction of the kept weights that a reconfiguration drops.
        constant: Time that does not depend on the masks.

    Returns:
        The weights and the masks; no masks if nothing could be trained.

    Raises:
        InvalidOption: If the module does not log `federation.monitor`.
    """
    weights: Weights = {}
    masks: Masks = {}
    values: dict[str, Tensor] = {}
    calm, started = 0, False
    for _ in range(_ADJUSTMENTS):
        gradients = GradientSum(squares=True)
        result = client.fit(weights, masks, callbacks=[gradients], epochs=epochs)
        weights = result.weights
        if not gradients.squares:  # nothing was trained
            return weights, masks
        values = {name: square + values.get(name, 0) for name, square in gradients.squares.items()}
        started = started or accuracy <= 0 or _required_metric(result.metrics, client.monitor) >= accuracy
        if started:
            before = masks or dense_like({name: weights[name] for name in seconds})
            masks, values = worthwhile(weights, before, values, seconds, fraction, constant), {}
            weights = apply(weights, masks)
            calm = calm + 1 if abs(kept(masks) - kept(before)) <= _SMALL * kept(before) else 0
            if calm == _CALM:
                break
    return weights, masks or dense_like({name: weights[name] for name in seconds})


def prune_until_accurate(
    client: Client, choose: Callable[[Weights], Masks], epochs: int, accuracy: float
) -> tuple[Weights, Masks]:
    """Train and prune the initial model on one client's data until it is accurate, as in the row of FedDIP.

    Args:
        client: The client.
        choose: Function from squared gradients to masks.
        epochs: Number of epochs before each choice.
        accuracy: Value of `federation.monitor` from which on the masks stay; 0 = those of the first choice.

    Returns:
        The weights and the masks; no masks if nothing could be trained.

    Raises:
        InvalidOption: If the module does not log `federation.monitor`.
    """
    weights: Weights = {}
    masks: Masks = {}
    for _ in range(_ADJUSTMENTS):
        gradients = GradientSum(squares=True)
        result = client.fit(weights, masks, callbacks=[gradients], epochs=epochs)
        if not gradients.squares:  # nothing was trained
            return result.weights, masks
        masks = choose(gradients.squares)
        weights = apply(result.weights, masks)
        if accuracy <= 0 or _required_metric(result.metrics, client.monitor) >= accuracy:
            break
    return weights, masks


def _required_metric(metrics: Mapping[str, float], monitor: str) -> float:
    """Return the metric that the first client waits for, or raise if the module does not log it."""
    if monitor not in metrics:
        known = f"expected {listed(metrics)}" if metrics else "log it in `training_step`"
        raise InvalidOption(
            f"`federation.monitor` is {monitor!r}, which the module does not log in training; {known}, or set "
            "`algorithm.first_accuracy: 0`."
        )
    return metrics[monitor]


def worthwhile(
    weights: Weights, masks: Masks, values: Weights, seconds: Weights, fraction: float, constant: float
) -> Masks:
    """Return the masks with the largest ratio of value and time, in which tensors without a mask count as well.

    Args:
        weights: Weights by name.
        masks: Masks of what is kept now.
        values: Value of each position of all parameters.
        seconds: Time of one weight of each layer that is pruned.
        fraction: Largest fraction of the kept weights to drop.
        constant: Time that does not depend on the masks.
    """
    always = sum(float(value.double().sum()) for name, value in values.items() if name not in masks)
    times = {name: float(time) for name, time in seconds.items()}
    return reallocate(weights, masks, values, times, fraction, always, constant)
