"""A toy set for tests and notebooks: Gaussian blobs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.data.federated import FederatedDataModule
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.seeds import generator


class FederatedBlobs(FederatedDataModule):
    """One Gaussian blob per class, with samples of shape (1, 1, `dim`).

    Args:
        num_clients: Number of clients.
        num_classes: Number of classes.
        dim: Features of one sample.
        num_train: Training examples.
        num_test: Test examples.
        noise: Standard deviation within a class; the classes' centres have 1.
        options: Arguments of :class:`FederatedDataModule`. The seed also draws the examples.

    Raises:
        InvalidOption: If an option is out of its range.
    """

    def __init__(
        self,
        *,
        num_clients: int = 10,
        num_classes: int = 4,
        dim: int = 16,
        num_train: int = 1000,
        num_test: int = 400,
        noise: float = 0.5,
        **options: Any,
    ) -> None:
        for name, value in {"num_classes": num_classes, "dim": dim, "num_test": num_test}.items():
            if value < 1:
                raise InvalidOption(f"`{name}={value}`: expected at least 1; change `data.{name}`.")
        self.num_classes, self.sample_shape = num_classes, (1, 1, dim)
        self.num_train, self.num_test, self.noise = num_train, num_test, noise
        super().__init__(num_clients=num_clients, **options)

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Training and test samples as float32, with the classes in turn."""
        rng = generator(self._seed(), "blobs")
        centres = torch.randn(self.num_classes, *self.sample_shape, generator=rng)
        labels = torch.arange(self.num_train + self.num_test) % self.num_classes
        noise = self.noise * torch.randn(len(labels), *self.sample_shape, generator=rng)
        samples = centres[labels] + noise
        n = self.num_train
        return samples[:n], labels[:n], samples[n:], labels[n:]
