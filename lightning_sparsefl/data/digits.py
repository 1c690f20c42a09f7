"""The 1,797 handwritten digits of 8x8 pixels that scikit-learn includes, so that no download is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.data.federated import FederatedDataModule


class FederatedDigits(FederatedDataModule):
    """Handwritten digits (UCI; Alpaydin and Kaynak, 1998); every fifth example of each class is for testing.

    Args:
        num_clients: Number of clients.
        options: Further arguments of :class:`FederatedDataModule`.
    """

    num_classes = 10
    sample_shape = (1, 8, 8)
    num_train = 1442
    mean, std, high = (0.305,), (0.376,), 16.0

    def __init__(self, *, num_clients: int = 20, **options: Any) -> None:
        super().__init__(num_clients=num_clients, **options)

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Load 1,442 training and 355 test images, uint8 with values from 0 to 16."""
        from sklearn.datasets import load_digits  # a slow import, which `--help` should not wait for

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.uint8)[:, None]
        labels = torch.tensor(digits.target)
        is_test = torch.zeros(len(labels), dtype=torch.bool)
        for label in range(self.num_classes):
            is_test[(labels == label).nonzero().flatten()[4::5]] = True
        return images[~is_test], labels[~is_test], images[is_test], labels[is_test]
