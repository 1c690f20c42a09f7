"""MNIST with the test sets of FedLPS's program, for rows of `fedlps_mnist.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparsefl.data import FederatedMNIST

_BLOCK = 1000


class BlockTestMNIST(FederatedMNIST):
    """MNIST whose clients are tested on blocks of 1,000 images, as by `sampling.py` of the authors of FedLPS.

    The test images are sorted by class, and a client with the class c gets images at random from the positions 1000 c
    to 1000 c + 999. MNIST does not have 1,000 test images of each class, so that the blocks of the classes 2 to 5 have
    115 to 157 images of the class before. See :class:`FederatedMNIST` for the arguments.
    """

    def choose_test(self, client: int, train_labels: Tensor, test_labels: Tensor, rng: torch.Generator) -> Tensor:
        """Return equally many test images from the block of each class of the client."""
        blocks = test_labels.argsort(stable=True).split(_BLOCK)
        own = train_labels.unique().tolist()
        chosen = [
            blocks[label][torch.randperm(_BLOCK, generator=rng)[: self.test_per_client // len(own)]] for label in own
        ]
        return torch.cat(chosen).sort().values
