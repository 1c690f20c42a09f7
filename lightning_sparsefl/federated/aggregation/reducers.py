"""Weighted means of the updates of a round.

The terms of a sum are rounded to a grid that every rank derives from the server's weights, coarse enough that float64
adds them without error. An exact sum does not depend on the order of its terms, so the result is bit-equal for any
number of ranks. The grid lies about 40 bits below the largest weight of a tensor, below the precision of float32. A
tensor whose values are far larger than the server's, and all tensors of a model in float64, are summed without a grid
by :class:`ExactSum`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption, InvalidUpdate
from lightning_sparsefl.federated.aggregation.exact_sum import (
    EXTRA,
    ExactSum,
    SumHeader,
    SumHeaders,
    require_equal_shapes,
)
from lightning_sparsefl.federated.aggregation.grid import Grid
from lightning_sparsefl.federated.aggregation.joint_reduce import AllReduce, reduce_together
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.exchange.update_checks import KINDS
from lightning_sparsefl.sparse.masks import intersect
from lightning_sparsefl.types import Masks, Merged, Message, Update, Weights

Gather = Callable[[Any], list[Any]]
"""Function that returns the values of all ranks on every rank."""

_LARGE = "weights"
"""Key of the headers of tensors with large values."""
_BLOCK = 1 << 16
"""Coordinates that are added at once, in float64, so that a CPU's cache holds them from one operation to the next."""
_LARGEST_INT32 = torch.iinfo(torch.int32).max
_PARTS = ("sum", "counts", "coordinate_counts", "voters")
"""Names of the vectors of a sum."""


class Reducer(ABC):
    """Base class of stateless rules for merging updates."""

    @abstractmethod
    def start(self, layout: Layout, server: Weights, total_weight: int) -> Accumulator:
        """Return an empty accumulator for one round.

        Args:
            layout: Layout of the model.
            server: Weights before the round, the same on every rank.
            total_weight: Upper bound of the sum of the updates' weights.
        """


@dataclass(frozen=True)
class CoverageMean(Reducer):
    """Mean of each coordinate over the clients that voted on it; without votes the server keeps its value."""

    def start(self, layout: Layout, server: Weights, total_weight: int) -> Accumulator:
        """See :class:`Reducer`."""
        return Accumulator(layout, Grid.of(layout, server, total_weight), silence_counts=False)


@dataclass(frozen=True)
class PlainMean(Reducer):
    """Mean of each coordinate over all clients, where a missing vote counts as no change (FedSpa, eq. 4)."""

    def start(self, layout: Layout, server: Weights, total_weight: int) -> Accumulator:
        """See :class:`Reducer`."""
        return Accumulator(layout, Grid.of(layout, server, total_weight), silence_counts=True)


class _Block(NamedTuple):
    """Coordinates of one tensor that are added at once."""

    term: Tensor
    """Memory for the term."""
    total: Tensor
    """Part of the sum."""
    constant: float
    """Number that rounds to the tensor's grid when it is added and subtracted."""
    buffer: bool
    """Whether the tensor is a buffer."""


class Accumulator:
    """Accumulator of updates in one float64 sum, whose memory does not grow with the number of updates.

    Args:
        layout: Layout of the model.
        grid: Grid of the round, the same on every rank.
        silence_counts: Whether a coordinate that an update does not vote on counts as unchanged.
    """

    def __init__(self, layout: Layout, grid: Grid, *, silence_counts: bool) -> None:
        self.layout, self.grid, self.silence_counts = layout, grid, silence_counts
        self.device = grid.device
        self._votes: Tensor | None = None
        self._votes_dtype = torch.int32 if grid.total_weight <= _LARGEST_INT32 else torch.float64
        self._dense_voters = 0
        self._not_sent = [0] * len(layout.names)
        self._updates = 0
        self._extra: dict[str, dict[str, ExactSum]] = {}
        self._large: dict[str, ExactSum] = {}
        self._total = 0
        self._kind: Literal["weights", "difference"] | None = "difference" if silence_counts else None
        self._grid, self._bounds = grid.constants, grid.bounds
        parts = [layout.size, len(layout.names), len(self._facts())]
        self._terms = torch.zeros(sum(parts), dtype=torch.float64, device=self.device)
        self._sum, self._counts, self._numbers = self._terms.split(parts)
        self._scratch = torch.empty(2, max(layout.sizes), dtype=torch.float64, device=self.device)
        self._blocks = list(self._divided())

    def _divided(self) -> Iterator[_Block]:
        """Yield the blocks of all tensors, in the order of the layout."""
        for name, constant, total in zip(self.layout.names, self._grid, self._pieces(self._sum), strict=True):
            for part in total.split(_BLOCK):
                yield _Block(self._scratch[0, : len(part)], part, constant, name in self.layout.buffers)

    def check(self, update: Update, message: Message) -> None:
        """Check whether the sum takes an update, whatever those of the other clients are.

        Args:
            update: Update of the client.
            message: Message that the client received.

        Raises:
            InvalidUpdate: If silence counts and the client did not receive a tensor of the update.
        """
        if self.silence_counts:
            _require_received(update, message, "federation.reducer")

    def add(self, update: Update, message: Message, num_examples: int) -> None:
        """Add one client's update.

        Args:
            update: Update of the client, whose `weight` is a positive integer.
            message: Message that the client received.
            num_examples: Number of its training samples, the weight of buffers in their mean.

        Raises:
            InvalidOption: If the kinds of updates differ, or a weight is not a positive integer.
            InvalidUpdate: If silence counts and the client did not receive a tensor of the update, or a tensor of an
                extra tree has another shape than that of another client.
        """
        kind = self._checked_kind(update)
        self._add_extra(update)
        self._kind = kind
        self._updates += 1
        if update.weights or self.silence_counts:
            self._add_weights(update, message, num_examples)

    def _add_weights(self, update: Update, message: Message, num_examples: int) -> None:
        values, votes = update.weights, voted(update, message)
        known = {name: vote for name, vote in votes.items() if name in self.layout.shapes}
        self.layout.check(known, "The votes of an update", torch.bool)
        if self.silence_counts:
            values = changes_of(update, message, "federation.reducer")
        vector = self._on_grid(values, votes)
        if vector is None:
            self._add_tensors(values, votes, update.weight, num_examples)
        else:
            self._add_vector(vector, update.weight, num_examples)
        self._count_voters(update, votes)
        self._count(update, votes, num_examples)

    def _on_grid(self, values: Weights, votes: Masks) -> Tensor | None:
        """Return the vector of a tree with all names and no large value, with zeros where it does not vote, or None."""
        if len(values) < len(self.layout.names) or not self.layout.uniform:
            return None
        vector = self.layout.flatten(values).detach().to(self.device)
        if votes:
            kept = [votes[name].reshape(-1) if name in votes else None for name in self.layout.names]
            voting = zip(self._pieces(vector), kept, strict=True)
            vector = torch.cat([piece if vote is None else piece * vote.to(self.device) for piece, vote in voting])
        small = 2 * float(torch.linalg.vector_norm(vector)) <= min(self._bounds)  # 2 allows for rounding
        return vector if small or not self._beyond_grid(values) else None

    def _add_vector(self, vector: Tensor, weight: int, num_examples: int) -> None:
        """Add the values of all tensors, block by block."""
        pieces = vector.split([len(block.total) for block in self._blocks])
        for piece, (term, total, constant, buffer) in zip(pieces, self._blocks, strict=True):
            term.copy_(piece)
            term *= num_examples if buffer else weight
            total += term.add_(constant).sub_(constant)

    def _add_tensors(self, values: Weights, votes: Masks, weight: int, num_examples: int) -> None:
        """Add tensor by tensor in preallocated memory, since page faults take longer than the arithmetic."""
        large = self._beyond_grid(values)
        for name, constant, total in zip(self.layout.names, self._grid, self._pieces(self._sum), strict=True):
            if name in values:
                term, vote = self._scratch[:, : total.numel()]
                term.copy_(values[name].detach().reshape(-1))
                term *= num_examples if name in self.layout.buffers else weight
                if name in votes:
                    term *= vote.copy_(votes[name].reshape(-1))
                if name in large:
                    self._large.setdefault(name, ExactSum(term.shape, self.device)).add(term)
                else:
                    total += term.add_(constant).sub_(constant)

    def _beyond_grid(self, values: Weights) -> set[str]:
        """Return the names of tensors with a value too large for the grid."""
        bound_of = {
            name: bound
            for name, bound in zip(self.layout.names, self._bounds, strict=True)
            if name in values and values[name].numel()
        }
        if not bound_of:
            return set()
        flat = {name: values[name].detach().reshape(-1).float() for name in bound_of}
        squares = torch.stack([value.dot(value) for value in flat.values()]).tolist()
        # the Euclidean norm is an upper bound of the maximum in a tenth of its time; 2 allows for rounding
        near = [name for name, square in zip(bound_of, squares, strict=True) if not 2 * square < bound_of[name] ** 2]
        return {name for name in near if float(flat[name].abs().max()) > bound_of[name]}

    def _fold_large(self) -> None:
        """Add the sums without a grid to the others, after the reduction over ranks."""
        for name, total in zip(self.layout.names, self._pieces(self._sum), strict=True):
            if name in self._large:
                total += self._large.pop(name).value()

    def _pieces(self, vector: Tensor) -> Sequence[Tensor]:
        """Split a vector into the flat tensors of the layout, in its order."""
        pieces: Sequence[Tensor] = vector.split(self.layout.sizes)
        return pieces

    def _checked_kind(self, update: Update) -> Literal["weights", "difference"] | None:
        """Return the kind of the round's updates, with which this one must agree."""
        if not isinstance(update.weight, int) or update.weight < 1:
            raise InvalidOption(f"`Update(weight={update.weight!r})`: expected a positive integer, samples or 1.")
        if not update.weights:  # of any kind: a client that took no step is not asked which
            return self._kind
        kind: Literal["weights", "difference"] = "difference" if self.silence_counts else update.kind
        if self._kind not in (None, kind):
            raise InvalidOption(
                f"`Update(kind={update.kind!r})`: expected {self._kind!r} as from the other clients of the round."
            )
        return kind

    def _count(self, update: Update, votes: Masks, num_examples: int) -> None:
        weights = [num_examples if n in self.layout.buffers else update.weight for n in self.layout.names]
        sent = [self.silence_counts or n in update.weights for n in self.layout.names]
        counts = [weight * was_sent for weight, was_sent in zip(weights, sent, strict=True)]
        if not votes or self.silence_counts:
            self._counts += torch.tensor(counts, dtype=torch.float64, device=self.device)
            return
        self._spread(votes, counts, self._start_votes()[1])

    def _start_votes(self) -> Tensor:
        """Return the number of votes on each coordinate and, unless silence counts, the sum of their weights."""
        if self._votes is None:
            shape = (1 if self.silence_counts else 2, self.layout.size)
            self._votes = torch.zeros(shape, dtype=self._votes_dtype, device=self.device)
        return self._votes

    @property
    def _voters(self) -> Tensor | None:
        """Number of votes on each coordinate; None = all updates are dense."""
        return None if self._votes is None else self._votes[0]

    @property
    def _coordinate_counts(self) -> Tensor | None:
        """Sum of the weights of the votes on each coordinate; None = no masks, or silence counts."""
        return None if self._votes is None or self.silence_counts else self._votes[1]

    def _count_voters(self, update: Update, votes: Masks) -> None:
        """Count the votes; a name that was not sent counts as voted on in the coverage, unless `votes` has a mask."""
        for place, name in enumerate(self.layout.names):
            self._not_sent[place] += name not in update.weights and name not in votes
        if not votes:
            self._dense_voters += 1
            return
        amounts = [int(name in update.weights or name not in votes) for name in self.layout.names]
        self._spread(votes, amounts, self._start_votes()[0])

    def _spread(self, votes: Masks, amounts: Sequence[int], onto: Tensor) -> None:
        """Add each tensor's amount to the coordinates that were voted on."""
        for name, amount, piece in zip(self.layout.names, amounts, self._pieces(onto), strict=True):
            if name in votes:
                piece.add_(votes[name].to(self.device).reshape(-1), alpha=amount)
            else:
                piece.add_(amount)

    def coverage_min(self, clients: int) -> float:
        """Return the minimum over coordinates of the fraction of clients that voted on them.

        Args:
            clients: Number of clients merged in the round.
        """
        voters = self._dense_voters + (0 if self._voters is None else int(self._voters.min()))
        return voters / max(clients, 1)

    def _add_extra(self, update: Update) -> None:
        """Add the extra trees without a grid, since the server has no tensors to derive one from."""
        terms = {
            (k, n): update.weight * t.detach().double() for k, tree in update.extra.items() for n, t in tree.items()
        }
        for (key, name), term in terms.items():
            if not bool(torch.isfinite(term).all()):
                raise InvalidOption(f"`Update.extra[{key!r}][{name!r}]` has values that are not finite.")
            known: ExactSum | Tensor = self._extra.get(key, {}).get(name, term)
            require_equal_shapes(key, name, known.shape, term.shape)
        self._total += update.weight
        for (key, name), term in terms.items():
            sums = self._extra.setdefault(key, {})
            if name not in sums:
                sums[name] = ExactSum(term.shape, self.device)
            sums[name].add(term)

    def all_reduce(self, reduce: AllReduce, headers: SumHeaders) -> None:
        """Sum over the ranks; the facts are in the tensor of the sum, since a call takes time whatever its size.

        Args:
            reduce: Function that sums a tensor over the ranks in place.
            headers: Merged headers of all ranks' sums without a grid, in the same order on all ranks.
        """
        self._numbers.copy_(torch.tensor(self._facts(), dtype=torch.float64))
        reduce(self._terms)
        self._set_facts(self._numbers.tolist())
        votes = [] if self._votes is None else [self._votes]
        digits = (digit for _, total, header in self._exact_sums(headers) for digit in total.align(header))
        reduce_together(reduce, [*votes, *digits])

    def _facts(self) -> list[float]:
        """Return the numbers of the sum that are no vectors, which add up over its parts."""
        masked, voted = self._coordinate_counts is not None, self._voters is not None
        kinds = [self._kind == kind for kind in KINDS]
        return [masked, voted, self._total, self._dense_voters, *kinds, self._updates, *self._not_sent]

    def _set_facts(self, facts: Sequence[float]) -> None:
        _, voted, total, dense_voters, whole, differences, updates, *not_sent = facts
        if whole and differences:
            raise InvalidUpdate(f"The updates of the round have the kinds {KINDS}; expected one kind.")
        self._total, self._dense_voters = int(total), int(dense_voters)
        self._updates, self._not_sent = int(updates), [int(count) for count in not_sent]
        self._kind = "difference" if differences else self._kind
        if voted:
            self._start_votes()

    def _exact_sums(self, headers: SumHeaders) -> Iterator[tuple[str, ExactSum, SumHeader]]:
        """Yield the sums without a grid that headers name, with the path of each."""
        for key, header_of in headers.items():
            mine = self._large if key == _LARGE else self._extra.setdefault(key.removeprefix(EXTRA), {})
            for name, header in header_of.items():
                yield f"{key}/{name}", mine.setdefault(name, ExactSum(header.shape, self.device)), header

    def integers(self, headers: SumHeaders) -> dict[str, Tensor]:
        """Return the sum as integers, which add up over its parts also modulo a power of two (secure sums).

        Args:
            headers: Merged headers of all parts' sums without a grid.

        Returns:
            Vectors of int64: ``facts``, ``counts`` (one for each tensor), ``sum``, ``coordinate_counts`` and ``voters``
            (one for each coordinate, zero where none are counted), and one for each sum without a grid.
        """
        zeros = torch.zeros(self.layout.size, device=self.device)
        vectors = (self._in_steps(), self._counts, self._coordinate_counts, self._voters)
        named = {name: zeros if v is None else v for name, v in zip(_PARTS, vectors, strict=True)}
        named["facts"] = torch.tensor(self._facts())
        named.update({path: total.integers(header) for path, total, header in self._exact_sums(headers)})
        return {name: vector.to(torch.int64) for name, vector in named.items()}

    def add_integers(self, parts: Mapping[str, Tensor], headers: SumHeaders) -> None:
        """Add the sum of other parts, as if their updates had been added here.

        Args:
            parts: Sums of the vectors that :meth:`integers` returns.
            headers: The headers that they were made with.
        """
        self._set_facts([mine + more for mine, more in zip(self._facts(), parts["facts"].tolist(), strict=True)])
        steps = zip(self.grid.steps, self._pieces(self._sum), self._pieces(parts["sum"]), strict=True)
        for step, total, integers in steps:
            total += integers.to(self.device).double() * step
        for name, own in zip(_PARTS[1:], (self._counts, self._coordinate_counts, self._voters), strict=True):
            if own is not None:
                own += parts[name].to(own)
        for path, exact, header in self._exact_sums(headers):
            exact.add_integers(parts[path], header)

    def _in_steps(self) -> Tensor:
        steps = zip(self.grid.steps, self._pieces(self._sum), strict=True)
        return torch.cat([total / step for step, total in steps])

    def collect(self, gather: Gather) -> None:
        """Exchange between ranks what cannot be reduced by a sum; a mean has no such data.

        Args:
            gather: Function that returns the values of all ranks.
        """

    def headers(self) -> SumHeaders:
        """Return the headers of the sums without a grid: of extra trees, and of tensors with large values."""
        trees = {EXTRA + key: tree for key, tree in self._extra.items()}
        if self._large:
            trees[_LARGE] = self._large
        return {key: {name: total.header for name, total in tree.items()} for key, tree in trees.items()}

    def result(self, reports: Mapping[int, Mapping[str, float]]) -> Merged:
        """Divide the sums by the counts and return the merged update.

        Args:
            reports: Metrics by client, passed on to the algorithm.
        """
        self._fold_large()
        mean = torch.empty(self.layout.size, dtype=self.layout.dtype, device=self.device)
        voters, covered = self._voters_by_name(), {}
        for counts, (name, total), (_, target) in zip(
            self.weights_of_votes().values(), self.layout.split(self._sum), self.layout.split(mean), strict=True
        ):
            target.copy_(total / counts.clamp_min(1))  # the sum is zero where the count is
            votes = voters.get(name, counts) if self.silence_counts else counts
            covered[name] = (votes > 0).expand(total.shape)
        complete = bool(torch.stack([mask.all() for mask in covered.values()]).all())
        weight, wide = max(self._total, 1), torch.promote_types(self.layout.dtype, torch.float32)
        extra = {k: {n: (tree[n].value() / weight).to(wide) for n in sorted(tree)} for k, tree in self._extra.items()}
        return Merged(
            weights=self.layout.tree(mean),
            covered={} if complete else covered,
            kind=self._kind or "weights",
            extra=extra,
            reports=reports,
            voters=voters,
        )

    def weights_of_votes(self) -> dict[str, Tensor]:
        """Return the sums of the weights of the votes, by name, for all coordinates of a tensor or for each of them."""
        votes = self._coordinate_counts
        spread = {} if votes is None else dict(self.layout.split(votes))
        named = zip(self.layout.names, self._counts, strict=True)
        return {name: count + spread[name] if name in spread else count for name, count in named}

    def _voters_by_name(self) -> dict[str, Tensor]:
        """Return the number of votes on each coordinate, without the tensors on which all clients voted everywhere."""
        zeros = torch.zeros(1, dtype=torch.int32, device=self.device).expand(self.layout.size)
        counts = self._dense_voters + (zeros if self._voters is None else self._voters.to(torch.int32))
        return {
            name: count - not_sent
            for not_sent, (name, count) in zip(self._not_sent, self.layout.split(counts), strict=True)
            if self._voters is not None or self._dense_voters - not_sent < self._updates
        }


def voted(update: Update, message: Message) -> Masks:
    """Return the masks of the coordinates that an update votes on; all coordinates of a missing name.

    Args:
        update: Update of a client; `votes` of None means the coordinates that the message lets the client change.
        message: Message that the client received.
    """
    return intersect(message.trainable, message.masks) if update.votes is None else update.votes


def changes_of(update: Update, message: Message, option: str) -> Weights:
    """Return the differences of an update from the received weights.

    Args:
        update: Update of a client.
        message: Message that the client received.
        option: Name of the option that needs them, for the error message.

    Raises:
        InvalidUpdate: If the client did not receive a tensor of the update, so that its difference is undefined.
    """
    if update.kind == "difference":
        return update.weights
    _require_received(update, message, option)
    return {name: value - message.weights[name] for name, value in update.weights.items()}


def _require_received(update: Update, message: Message, option: str) -> None:
    unknown = [name for name in update.weights if name not in message.weights]
    if unknown and update.kind != "difference":
        raise InvalidUpdate(
            f"`{option}` needs the difference from the received weights, but {unknown[0]!r} was not sent to the "
            f"client; send it (`download`), or change `{option}`."
        )
