"""Natural partition: each client is a group of the data, such as a writer, a user or a hospital."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_sparsefl.data.columns import Values
from lightning_sparsefl.data.partition import Partition, cut
from lightning_sparsefl.errors import check_types, require


@dataclass(frozen=True, eq=False, repr=False)
class ByGroup(Partition):
    """Partition in which each client has all examples of one group.

    Clients are numbered in the sorted order of their groups. If there are fewer clients than groups, groups are drawn
    at random, and the others are left out. It needs data with columns, as in :class:`FederatedDataset`.

    As a function, :meth:`split` takes the number of each example's group in place of labels.

    Example:
        >>> ByGroup("hospital").split(torch.tensor([0, 1, 0, 2]), num_clients=3, seed=0)
        [tensor([0, 2]), tensor([1]), tensor([3])]
    """

    needs_labels: ClassVar[bool] = False

    by: Values
    """Group of each example: the name of a column, the values themselves, or a function of an item."""
    min_examples: int = field(default=1, kw_only=True)
    """Number of examples below which a group is small."""
    small_groups: Literal["drop", "merge"] = field(default="drop", kw_only=True)
    """Whether small groups are left out, or become one client together, the last one, if that is not small."""

    def __post_init__(self) -> None:
        check_types(self, "data.partition.")
        require(self.min_examples >= 1, "data.partition.min_examples", self.min_examples, "a whole number >= 1")

    def __repr__(self) -> str:
        by = repr(self.by) if isinstance(self.by, str) else f"<{type(self.by).__name__}>"
        return f"ByGroup({by}, min_examples={self.min_examples}, small_groups={self.small_groups!r})"

    def num_groups(self, groups: Tensor) -> int:
        """Return the largest possible number of clients.

        Args:
            groups: Number of each example's group, int64 of shape (examples,).

        Raises:
            InvalidOption: If all groups are small.
        """
        return len(self._members(groups))

    def assign(self, labels: Tensor, num_clients: int, rng: torch.Generator) -> list[Tensor]:
        """Give each client a group.

        Args:
            labels: Number of each example's group, int64 of shape (examples,).
            num_clients: Number of clients.
            rng: Generator for all random draws.

        Raises:
            InvalidOption: If there are more clients than groups, or all groups are small.
        """
        members = self._members(labels)
        least = f" with at least {self.min_examples} examples" if self.min_examples > 1 else ""
        expected = f"a number from 1 to {len(members)}, the number of groups{least}"
        require(num_clients <= len(members), "data.num_clients", num_clients, expected)
        chosen = torch.randperm(len(members), generator=rng)[:num_clients].sort().values
        return [members[group] for group in chosen.tolist()]

    def _members(self, groups: Tensor) -> list[Tensor]:
        """Return the indices of the examples of each group that can be a client."""
        sizes = groups.unique(return_counts=True)[1]
        members = cut(groups.argsort(stable=True), sizes)
        large = [own for own in members if len(own) >= self.min_examples]
        small = [own for own in members if len(own) < self.min_examples]
        merged = torch.cat(small) if small and self.small_groups == "merge" else groups[:0]
        clients = [*large, merged] if len(merged) >= self.min_examples else large
        expected = f"at most {int(sizes.max())}, the size of the largest group"
        require(len(clients) > 0, "data.partition.min_examples", self.min_examples, expected)
        return clients
