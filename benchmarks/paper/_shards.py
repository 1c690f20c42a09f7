"""Random shards, as they are dealt by FedLPS's program, for rows of `fedlps_mnist.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsefl.data import Partition


@dataclass(frozen=True)
class Shards(Partition):
    """Partition of examples in the order of their classes into shards, of which each client gets some at random.

    After McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017). With two
    shards, about a tenth of 100 clients have one class only, and a shard across the border of two classes gives a
    client a third one.
    """

    per_client: int = 2
    """Number of shards of a client."""

    def assign(self, labels: Tensor, num_clients: int, rng: torch.Generator) -> list[Tensor]:
        """Sort the examples by class, cut them into shards of equal size, and deal them."""
        shards = labels.argsort(stable=True).tensor_split(num_clients * self.per_client)
        dealt = torch.randperm(len(shards), generator=rng).view(num_clients, self.per_client)
        return [torch.cat([shards[shard] for shard in row]) for row in dealt.tolist()]
