"""Partitions of a data set over clients: functions from labels to the indices of each client's examples.

A partition is a frozen dataclass. Its randomness depends on the seed alone, so every rank computes the same partition.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption, check_types, is_whole, require
from lightning_sparsefl.seeds import generator

_MAX_DRAWS = 2000
"""Number of draws after which `Dirichlet` gives up."""


class Partition(ABC):
    """Partition of the training examples over the clients; a subclass implements :meth:`assign`."""

    needs_labels: ClassVar[bool] = True
    """Whether the partition depends on labels; else it also splits data that has none."""

    def split(self, labels: Tensor, num_clients: int, seed: int) -> list[Tensor]:
        """Assign the examples to the clients, and check the result.

        Args:
            labels: Class of each example, int64 of shape (examples,).
            num_clients: Number of clients.
            seed: Random seed.

        Returns:
            Sorted indices of each client's examples; they are disjoint, and no client is without examples.

        Raises:
            InvalidOption: If a client would have no examples, or :meth:`assign` returned something else than it should.

        Example:
            >>> owned = Pathological(classes_per_client=1).split(torch.tensor([0, 1, 1, 0]), num_clients=2, seed=0)
            >>> sorted(indices.tolist() for indices in owned)
            [[0, 3], [1, 2]]
        """
        check_num_clients(num_clients, len(labels))
        owned = self.assign(labels, num_clients, generator(seed, "partition"))
        what = f"`{type(self).__name__}.assign` returned"
        owned = checked_parts(owned, num_clients, len(labels), what)
        together = torch.cat(owned)
        twice = torch.bincount(together, minlength=len(labels)) > 1
        if bool(twice.any()):
            example = int(twice.nonzero()[0])
            raise InvalidOption(
                f"{what} the example {example} more than once; expected each in one client's part at most."
            )
        empty = [client for client, indices in enumerate(owned) if not len(indices)]
        if empty:
            raise InvalidOption(
                f"`{self}` leaves {len(empty)} of {num_clients} clients without examples, the first of them is "
                f"client {empty[0]}; lower `data.num_clients` or change `data.partition`."
            )
        return [indices.sort().values for indices in owned]

    @abstractmethod
    def assign(self, labels: Tensor, num_clients: int, rng: torch.Generator) -> list[Tensor]:
        """Assign the examples to the clients; :meth:`split` checks the arguments and the result.

        Args:
            labels: Class of each example, int64 of shape (examples,).
            num_clients: Number of clients, from 1 to the number of examples.
            rng: Generator for all random draws.

        Returns:
            Indices of each client's examples; disjoint, in any order.
        """


@dataclass(frozen=True, kw_only=True)
class IID(Partition):
    """Independent and identically distributed clients, whose sizes differ by at most one."""

    needs_labels: ClassVar[bool] = False

    def assign(self, labels: Tensor, num_clients: int, rng: torch.Generator) -> list[Tensor]:
        """Split a random permutation into equal parts."""
        return list(torch.randperm(len(labels), generator=rng).tensor_split(num_clients))


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Partition in which the proportions of each class over the clients are drawn from Dir(alpha).

    This is the usual "hetero" partition. The classes are assigned one after another, and a client that already has an
    equal share of all examples gets no examples of the following classes, which bounds the differences in size. The
    partition is drawn again until each client has at least `min_examples`.

    Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (arXiv:1905.12022), with the bound
    on the size of Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study" (arXiv:2102.02079).
    """

    alpha: float
    """Concentration parameter: small values give few classes per client, large values are close to IID."""
    min_examples: int = field(default=1, kw_only=True)
    """Smallest number of examples of a client."""

    def __post_init__(self) -> None:
        check_types(self, "data.partition.")
        require(0 < self.alpha < float("inf"), "data.partition.alpha", self.alpha, "a finite number above 0")
        require(self.min_examples >= 1, "data.partition.min_examples", self.min_examples, "a whole number >= 1")

    def assign(self, labels: Tensor, num_clients: int, rng: torch.Generator) -> list[Tensor]:
        """Draw the number of examples per class and client, then assign the examples."""
        classes = _indices_by_class(labels, rng)
        counts = self._counts([len(indices) for indices in classes], num_clients, rng)
        return _assign(classes, counts)

    def _counts(self, class_sizes: list[int], num_clients: int, rng: torch.Generator) -> Tensor:
        if self.min_examples * num_clients <= sum(class_sizes):
            for _ in range(_MAX_DRAWS):
                counts = _draw_counts(class_sizes, num_clients, self.alpha, rng)
                if int(counts.sum(0).min()) >= self.min_examples:
                    return counts
        raise InvalidOption(
            f"`Dirichlet(alpha={self.alpha}, min_examples={self.min_examples})` found no partition of "
            f"{sum(class_sizes)} examples over {num_clients} clients in {_MAX_DRAWS} draws; raise "
            "`data.partition.alpha`, or lower `data.partition.min_examples` or `data.num_clients`."
        )


@dataclass(frozen=True)
class Pathological(Partition):
    """Partition in which each client has examples of exactly `classes_per_client` classes.

    Each class is split into equal parts, one for each of its clients, and the numbers of clients per class differ by at
    most one. If the classes are equally frequent and ``num_clients * classes_per_client`` is a multiple of their
    number, all clients have the same number of examples. A class that is assigned to no client is left out.

    After McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017).
    """

    classes_per_client: int
    """Number of classes of each client."""

    def __post_init__(self) -> None:
        check_types(self, "data.partition.")
        self._require_classes(self.classes_per_client >= 1, "a whole number >= 1")

    def assign(self, labels: Tensor, num_clients: int, rng: torch.Generator) -> list[Tensor]:
        """Choose the clients of each class, then assign the examples."""
        classes = _indices_by_class(labels, rng)
        expected = f"at most {len(classes)}, the number of classes in the data"
        self._require_classes(self.classes_per_client <= len(classes), expected)
        owns = self._owners(len(classes), num_clients, rng)
        sizes = torch.tensor([len(indices) for indices in classes])
        owners = owns.sum(1)
        self._check_sizes(sizes, owners)
        # The k-th owner of a class gets one more example if k < size mod owners.
        rank = owns.cumsum(1) - 1
        counts = sizes.div(owners.clamp(min=1), rounding_mode="floor")[:, None] + (
            rank < sizes.remainder(owners.clamp(min=1))[:, None]
        )
        return _assign(classes, counts * owns)

    def _owners(self, num_classes: int, num_clients: int, rng: torch.Generator) -> Tensor:
        """Choose the classes of each client: bool of shape (classes, clients)."""
        owns = torch.zeros(num_classes, num_clients, dtype=torch.bool)
        for client in range(num_clients):
            rarest_first = (owns.sum(1) + torch.rand(num_classes, generator=rng)).argsort()
            owns[rarest_first[: self.classes_per_client], client] = True
        return owns

    def _require_classes(self, condition: bool, expected: str) -> None:
        require(condition, "data.partition.classes_per_client", self.classes_per_client, expected)

    def _check_sizes(self, sizes: Tensor, owners: Tensor) -> None:
        short = (sizes < owners).nonzero()
        if len(short):
            label = int(short[0])
            raise InvalidOption(
                f"`Pathological(classes_per_client={self.classes_per_client})` assigns class {label} to "
                f"{int(owners[label])} clients, but it has {int(sizes[label])} examples; lower "
                "`data.num_clients` or `data.partition.classes_per_client`."
            )


def checked_parts(owned: Any, num_clients: int, num_examples: int, what: str) -> list[Tensor]:
    """Return the examples of each client, if they are indices.

    Args:
        owned: Value that a method returned.
        num_clients: Number of clients.
        num_examples: Number of examples.
        what: Start of an error message that names the method.

    Raises:
        InvalidOption: If they are not.
    """
    if not isinstance(owned, Sequence) or len(owned) != num_clients:
        got = f"{len(owned)} parts" if isinstance(owned, Sequence) else f"a {type(owned).__name__}"
        raise InvalidOption(f"{what} {got}; expected a list of {num_clients} tensors, one for each client.")
    for client, indices in enumerate(owned):
        if not isinstance(indices, Tensor) or indices.dim() != 1 or indices.dtype != torch.int64:
            shape = f" of shape {tuple(indices.shape)}" if isinstance(indices, Tensor) else ""
            kind = f"{indices.dtype} tensor{shape}" if isinstance(indices, Tensor) else type(indices).__name__
            raise InvalidOption(f"{what} a {kind} for client {client}; expected indices, int64 of shape (examples,).")
    together = torch.cat(list(owned))
    outside = together[(together < 0) | (together >= num_examples)]
    if len(outside):
        raise InvalidOption(f"{what} the index {int(outside[0])}; expected 0 to {num_examples - 1}, the examples.")
    return list(owned)


def matching_test(train_labels: Tensor, test_labels: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Choose test examples with the label proportions of a client's training data.

    For each label, ``ceil(proportion * count)`` examples are chosen, or all if there are fewer. The result may exceed
    `count` by up to one example per label, and the test sets of two clients may overlap (protocol of FedSpa).

    Args:
        train_labels: The client's training labels, int64 of shape (examples,).
        test_labels: Labels of the whole test set, int64 of shape (test examples,).
        count: Intended number of examples.
        rng: Generator for all random draws.

    Returns:
        Sorted indices into the test set.

    Example:
        >>> rng = torch.Generator().manual_seed(0)
        >>> chosen = matching_test(torch.tensor([0, 0, 0, 2]), torch.tensor([0, 1, 2] * 9), 4, rng)
        >>> (chosen % 3).bincount().tolist()
        [3, 0, 1]
    """
    chosen = []
    for label, size in zip(*(part.tolist() for part in train_labels.unique(return_counts=True)), strict=True):
        pool = (test_labels == label).nonzero().flatten()
        wanted = -(-size * count // len(train_labels))
        chosen.append(pool[torch.randperm(len(pool), generator=rng)[:wanted]])
    return torch.cat(chosen).sort().values


def check_num_clients(num_clients: int, examples: int) -> None:
    """Check that every client can have at least one example.

    Args:
        num_clients: Number of clients.
        examples: Number of training examples.

    Raises:
        InvalidOption: If `num_clients` is below 1 or above `examples`.
    """
    expected = f"a number from 1 to {examples}, the number of training examples"
    require(is_whole(num_clients, 1) and num_clients <= examples, "data.num_clients", num_clients, expected)


def _indices_by_class(labels: Tensor, rng: torch.Generator) -> list[Tensor]:
    """Return the shuffled indices of the examples of each class that occurs."""
    shuffled = torch.randperm(len(labels), generator=rng)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    return cut(by_class, labels.unique(return_counts=True)[1])


def _draw_counts(class_sizes: list[int], num_clients: int, alpha: float, rng: torch.Generator) -> Tensor:
    """Draw the number of examples of each class for each client: int64 of shape (classes, clients)."""
    equal_share = sum(class_sizes) / num_clients
    shape = (len(class_sizes), num_clients)
    draws = log_gamma(shape, alpha, rng)
    owned = torch.zeros(num_clients, dtype=torch.int64)
    counts = []
    for size, draw in zip(class_sizes, draws, strict=True):
        # Clients with an equal share get nothing of this class; round the cumulative proportions to whole examples.
        weight = draw.masked_fill(owned >= equal_share, -torch.inf).softmax(0)
        edges = weight.cumsum(0)
        edges = (edges / edges[-1] * size).long()
        counts.append(edges.diff(prepend=edges.new_zeros(1)))
        owned += counts[-1]
    return torch.stack(counts)


def log_gamma(shape: tuple[int, ...], alpha: float, rng: torch.Generator) -> Tensor:
    """Draw logarithms of Gamma(alpha) samples, float64, whose softmax is a sample of Dir(alpha).

    torch.distributions.Dirichlet takes no generator.

    Args:
        shape: Shape of the result.
        alpha: Shape parameter of the distribution.
        rng: Generator for all random draws.
    """
    # For a small alpha the samples underflow, so use logarithms: Gamma(alpha) = Gamma(alpha + 1) * U ** (1 / alpha).
    boosted = torch._standard_gamma(torch.full(shape, alpha + 1, dtype=torch.float64), generator=rng)
    return boosted.log() + torch.rand(shape, dtype=torch.float64, generator=rng).log() / alpha


def _assign(classes: list[Tensor], counts: Tensor) -> list[Tensor]:
    """Assign consecutive indices of each class to the clients, `counts` (classes, clients) many."""
    shares = [cut(indices, count) for indices, count in zip(classes, counts, strict=True)]
    return [torch.cat(own) for own in zip(*shares, strict=True)]


def cut(indices: Tensor, sizes: Tensor) -> list[Tensor]:
    """Split into consecutive parts of the given sizes, whose sum is at most the length.

    Args:
        indices: Indices of examples, shape (examples,).
        sizes: Sizes of the parts, int64 of shape (parts,).
    """
    stops = sizes.cumsum(0)
    return list(indices[: int(stops[-1])].tensor_split(stops[:-1]))
