"""Feature shift: clients with equal labels whose inputs differ, as those of other sensors do.

The shift of a client is part of its data: it is a function of the seed and the client alone, the same in each round.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sparsefl.errors import InvalidOption, check_types, require


class FeatureShift(ABC):
    """Change of the inputs that grows with the number of the client; a subclass implements :meth:`apply`.

    Client k of n has the level k / n, so that the inputs of client 0 are changed least. Inputs of type uint8 are scaled
    to [0, 1] before the change, and rounded and clamped after it.
    """

    def __call__(self, inputs: Tensor, level: float, rng: torch.Generator, high: float = 255.0) -> Tensor:
        """Shift the inputs of one client.

        Args:
            inputs: Inputs as stored, uint8 or floating-point, shape (examples, ...).
            level: Level of the client, in [0, 1).
            rng: Generator for all random draws.
            high: Value of an uint8 input that is scaled to 1.

        Returns:
            Inputs of the same shape and type.

        Raises:
            InvalidOption: If the inputs are of another type, such as tokens.

        Example:
            >>> dark = BrightnessShift(0.5, 1.0)(torch.tensor([[200, 100]], dtype=torch.uint8), 0.0, torch.Generator())
            >>> dark.tolist()
            [[100, 50]]
        """
        if inputs.is_floating_point():
            return self.apply(inputs, level, rng) if len(inputs) else inputs
        if inputs.dtype != torch.uint8:
            raise InvalidOption(
                f"`data.feature_shift` is {self}, but the inputs are {inputs.dtype}; expected uint8 or floating-point "
                "inputs."
            )
        shifted = self.apply(inputs / high, level, rng) if len(inputs) else inputs
        return (shifted * high).round().clamp(0, high).to(torch.uint8)

    @abstractmethod
    def apply(self, inputs: Tensor, level: float, rng: torch.Generator) -> Tensor:
        """Shift floating-point inputs.

        Args:
            inputs: Inputs of one client, shape (examples, ...), at least one.
            level: Level of the client, in [0, 1).
            rng: Generator for all random draws.
        """


@dataclass(frozen=True)
class NoiseShift(FeatureShift):
    """Gaussian noise, whose standard deviation is `std` times the level of the client.

    The noise of an example is drawn once. Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study"
    (arXiv:2102.02079), whose levels are variances.
    """

    std: float
    """Standard deviation that the last client nearly reaches."""

    def __post_init__(self) -> None:
        check_types(self, "data.feature_shift.")
        require(self.std > 0, "data.feature_shift.std", self.std, "a number above 0")

    def apply(self, inputs: Tensor, level: float, rng: torch.Generator) -> Tensor:
        """Add noise to each number."""
        return inputs + self.std * level * torch.randn(inputs.shape, generator=rng, dtype=inputs.dtype)


@dataclass(frozen=True)
class RotationShift(FeatureShift):
    """Rotation of images by `degrees` times the level of the client, by the nearest pixel, with zeros outside.

    With four clients, 360 degrees give the angles 0, 90, 180 and 270.
    """

    degrees: float = 360.0
    """Angle that the last client nearly reaches, counter-clockwise."""

    def __post_init__(self) -> None:
        check_types(self, "data.feature_shift.")
        require(
            0 < abs(self.degrees) <= 360, "data.feature_shift.degrees", self.degrees, "an angle in [-360, 360], not 0"
        )

    def apply(self, inputs: Tensor, level: float, rng: torch.Generator) -> Tensor:
        """Rotate images of shape (examples, channels, height, width)."""
        if inputs.ndim != 4:
            raise InvalidOption(
                f"`data.feature_shift` is {self}, but an input has the shape {tuple(inputs.shape[1:])}; expected "
                "images of (channels, height, width)."
            )
        angle, (height, width) = math.radians(self.degrees * level), inputs.shape[2:]
        # affine_grid works on coordinates in [-1, 1], so that a rotation scales by the ratio of the sides
        rows = [math.cos(angle), -math.sin(angle) * height / width, 0.0]
        columns = [math.sin(angle) * width / height, math.cos(angle), 0.0]
        matrix = torch.tensor([rows, columns], dtype=inputs.dtype).expand(len(inputs), 2, 3)
        grid = F.affine_grid(matrix, list(inputs.shape), align_corners=False)
        return F.grid_sample(inputs, grid, mode="nearest", align_corners=False)


@dataclass(frozen=True)
class BrightnessShift(FeatureShift):
    """Brightness: inputs are multiplied by a factor that grows from `low` to `high` with the level of the client."""

    low: float = 0.5
    """Factor of client 0."""
    high: float = 1.5
    """Factor that the last client nearly reaches."""

    def __post_init__(self) -> None:
        check_types(self, "data.feature_shift.")
        require(self.low > 0, "data.feature_shift.low", self.low, "a number above 0")
        require(
            self.high > self.low, "data.feature_shift.high", self.high, f"a number above `low`, which is {self.low}"
        )

    def apply(self, inputs: Tensor, level: float, rng: torch.Generator) -> Tensor:
        """Multiply each number by the client's factor."""
        return inputs * (self.low + (self.high - self.low) * level)
