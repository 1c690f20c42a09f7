"""Quantity skew: clients with equal distributions, and very different numbers of examples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_sparsefl.data.partition import Partition, cut, log_gamma
from lightning_sparsefl.errors import check_types, require


@dataclass(frozen=True)
class QuantitySkew(Partition):
    """Partition in which only the sizes of the clients differ.

    Each client first gets `min_examples`, and the other examples are divided in proportion to a draw from Dir(alpha)
    (``dirichlet``; Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", arXiv:2102.02079, who
    draw until all clients have 10), or to ``1 / rank ** alpha`` with the ranks in random order (``power``, Zipf's law).

    Example:
        >>> owned = QuantitySkew(1.0, law="power").split(torch.zeros(1000), num_clients=4, seed=0)
        >>> sorted(len(indices) for indices in owned)
        [120, 161, 240, 479]
    """

    needs_labels: ClassVar[bool] = False

    alpha: float
    """Concentration (``dirichlet``), of which small values give unequal sizes, or exponent (``power``), of which large
    values do."""
    law: Literal["dirichlet", "power"] = field(default="dirichlet", kw_only=True)
    """Law of the sizes."""
    min_examples: int = field(default=1, kw_only=True)
    """Smallest number of examples of a client."""

    def __post_init__(self) -> None:
        check_types(self, "data.partition.")
        require(0 < self.alpha < float("inf"), "data.partition.alpha", self.alpha, "a finite number above 0")
        require(self.min_examples >= 1, "data.partition.min_examples", self.min_examples, "a whole number >= 1")

    def assign(self, labels: Tensor, num_clients: int, rng: torch.Generator) -> list[Tensor]:
        """Draw the sizes, and cut a random permutation into parts of these sizes.

        Args:
            labels: One value per example, of which only the number counts.
            num_clients: Number of clients.
            rng: Generator for all random draws.

        Raises:
            InvalidOption: If there are too few examples, or alpha is too small to draw from Dir(alpha).
        """
        most = len(labels) // num_clients
        expected = f"at most {most}, the number of examples per client; lower it or `data.num_clients`"
        require(self.min_examples <= most, "data.partition.min_examples", self.min_examples, expected)
        shares = self._shares(num_clients, rng)
        expected = "a larger number, since all shares drawn from Dir(alpha) underflow to 0"
        require(not bool(shares.isnan().any()), "data.partition.alpha", self.alpha, expected)
        edges = shares.cumsum(0)
        # round the cumulative shares to whole examples, so that the sizes add up
        edges = (edges / edges[-1] * (len(labels) - self.min_examples * num_clients)).long()
        sizes = edges.diff(prepend=edges.new_zeros(1)) + self.min_examples
        return cut(torch.randperm(len(labels), generator=rng), sizes)

    def _shares(self, num_clients: int, rng: torch.Generator) -> Tensor:
        if self.law == "dirichlet":
            return log_gamma((num_clients,), self.alpha, rng).softmax(0)
        ranks = torch.randperm(num_clients, generator=rng) + 1
        return ranks.double() ** -self.alpha
