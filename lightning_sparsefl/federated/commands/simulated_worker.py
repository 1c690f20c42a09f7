"""Worker of simulated clients, which takes one step without data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import StepMeter
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.exchange.orders import Split
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.masks import apply, intersect
from lightning_sparsefl.sparse.units import UnitGroup, unit_masks
from lightning_sparsefl.sparse.uses import EACH_ONCE, TensorUses
from lightning_sparsefl.types import FitResult, Masks, Weights


class SimulatedWorker:
    """Substitute for local training, in which all trainable weights take one step and gradients are noise.

    Args:
        layout: Layout of the model.
        initial: Initial weights of the model.
        seed: Random seed of the noise, which differs between gradients.
        find_units: Function that returns the units of the model.
        norms: Names of the tensors of the model's norms.
        exits: Early exits of the model by the last module of each block.
        uses: Uses of the model's parameters by its layers.
    """

    def __init__(
        self,
        layout: Layout,
        initial: Weights,
        seed: int,
        find_units: Callable[[], Sequence[UnitGroup]] = tuple,
        norms: frozenset[str] = frozenset(),
        exits: Mapping[str, str] | None = None,
        uses: TensorUses = EACH_ONCE,
    ) -> None:
        self.layout, self.initial, self.buffers, self.norms = layout, initial, layout.buffers, norms
        self._rng, self._find_units = generator(seed, "rehearsal"), find_units
        self.exits, self.uses = dict(exits or {}), uses

    @cached_property
    def units(self) -> Sequence[UnitGroup]:
        """The model's groups of units."""
        return self._find_units()

    def fit(
        self,
        client: Client,
        weights: Weights,
        masks: Masks,
        trainable: Masks,
        callbacks: Sequence[Callback],
        *,
        epochs: int | None = None,
        units: Masks | None = None,
    ) -> FitResult:
        """Take a step that is nonzero everywhere, since zeros would be encoded in fewer bytes than trained weights.

        The arguments are those of :meth:`Client.fit`.
        """
        for meter in callbacks:
            if isinstance(meter, StepMeter):  # a client without a step would send nothing
                meter.count({"lr": 1.0})
        weights = {**self.initial, **weights}
        masks = masks if units is None else intersect(masks, unit_masks(self.units, units, weights))
        moved = {n: torch.where(trainable[n], _step(w), w) if n in trainable else _step(w) for n, w in weights.items()}
        return FitResult(weights=apply(moved, masks), metrics=_EveryMetric(1.0), steps=1, callbacks=callbacks)

    def gradient(self, client: Client, weights: Weights) -> Weights:
        """Return noise as the gradient, so that a search changes its mask.

        Args:
            client: Ignored.
            weights: Ignored.
        """
        names = [name for name in self.layout.names if name not in self.layout.buffers]
        return {n: torch.randn(self.layout.shapes[n], generator=self._rng).to(self.layout.dtypes[n]) for n in names}

    def evaluate(self, client: Client, weights: Weights, split: Split) -> Mapping[str, float]:
        """Return scores that are the highest possible whatever their name, since there is no data.

        A method that waits for a score waits for the shortest time.

        Args:
            client: Ignored.
            weights: Ignored.
            split: Ignored.
        """
        return _EveryMetric(math.inf)

    def release_memory(self, error: BaseException) -> None:
        """Do nothing, since no step holds memory.

        Args:
            error: Ignored.
        """


def _step(weight: torch.Tensor) -> torch.Tensor:
    """Return a tensor after a small step, which is not lost to rounding in half precision either."""
    return weight + 1e-3 + 2 * torch.finfo(weight.dtype).eps * weight.abs()


class _EveryMetric(dict[str, float]):
    """No metrics, of which each that is asked for has the same value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __missing__(self, name: str) -> float:
        return self._value
