"""One client's part in one sum: the terms of its update, in the form that the clients have agreed on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning_sparsefl.federated.aggregation.exact_sum import SumHeaders
from lightning_sparsefl.federated.aggregation.grid import Grid
from lightning_sparsefl.federated.aggregation.reducers import Accumulator, PlainMean, Reducer, voted
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.exchange.orders import Order
from lightning_sparsefl.sparse.masks import digest as digest_of
from lightning_sparsefl.types import Update
from torch import Tensor

from lightning_sparsefl_flower.secure_sum.errors import SecureSumRefused
from lightning_sparsefl_flower.secure_sum.headers import plain_headers, read_headers
from lightning_sparsefl_flower.secure_sum.messages import digest, join, parts
from lightning_sparsefl_flower.secure_sum.party import Party
from lightning_sparsefl_flower.secure_sum.support import (
    common_support,
    message_on_cpu,
    restricted,
    unpack_bits,
    update_on_cpu,
)
from lightning_sparsefl_flower.secure_sum.vectors import Form, Mode

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Given:
    """An update that the server may learn in a sum."""

    order: Order
    """Order that the update answers."""
    update: Update
    """The update."""


class ClientSum:
    """One client's part in one sum: its terms, and its party.

    Args:
        given: Update that the server may learn in a sum.
        layout: Layout of the model.
        reducer: Reducer of the run.
        make_party: Function that makes the party from the number of the client and the context of the sum.
        least: Least number of votes on a coordinate that is summed.
        payload: What the server sends to begin: the grid, and in the second sum the coordinates.
        again: Whether this is the second sum of the round.

    Raises:
        SecureSumRefused: If the payload is wrong.
    """

    def __init__(
        self,
        given: Given,
        layout: Layout,
        reducer: Reducer,
        make_party: Callable[[int, bytes], Party],
        least: int,
        payload: bytes,
        again: bool,
    ) -> None:
        header, bits = parts(payload)
        self.layout, self.least, self.again = layout, least, again
        self.order, update = given.order, given.update
        self.grid = _read_grid(header, layout)
        self.support = unpack_bits(bits, layout.size) if again else None
        votes = voted(update, self.order.message)
        self.unsent = [name for name in layout.names if name not in update.weights]
        self.default = digest_of(voted(replace(update, votes=None), self.order.message))
        self.usual = digest_of(votes) == self.default
        self.votes = votes
        if self.support is not None:
            update = restricted(update, votes, self.support, layout)
        silence = isinstance(reducer, PlainMean)
        self.terms = Accumulator(layout, self.grid, silence_counts=silence)
        self.terms.add(update_on_cpu(update), message_on_cpu(self.order.message), self.order.facts.num_examples)
        self.kind = update.kind if update.weights else None
        self.party = make_party(self.order.client, context_of(self.order.run, self.order.round, 2 if again else 1))
        self.form: Form | None = None
        self.headers: SumHeaders = {}

    def advertise(self) -> bytes:
        """Return the advert, with what the server must know of the terms' form."""
        headers = self.terms.headers()
        if "weights" in headers:
            name = next(iter(headers["weights"]))
            raise SecureSumRefused(
                f"The update of client {self.order.client} has values in {name!r} that are too large for the grid of "
                "a secure sum."
            )
        facts = {
            "headers": plain_headers(headers),
            "votes": self.default if self.usual and not self.again else None,
            "unsent": self.unsent,
            "kind": self.kind,
        }
        return self.party.advertise(json.dumps(facts, separators=(",", ":")).encode())

    def share(self, payload: bytes) -> bytes:
        """Return encrypted shares, once the plan of the sum is found to be one that this client accepts."""
        plan, roster = parts(payload)
        mode, headers = plan.get("mode"), read_headers(plan.get("headers"), 4 * self.layout.size + 2**16)
        checked = self._checked_mode(mode)
        self._check(headers)
        self.headers = headers
        shares = self.party.share(roster)
        self.form = form_of(self.layout, checked, headers, self._support(checked), self.party.clients, self.grid)
        return shares

    def mask(self, payload: bytes) -> bytes:
        """Return the masked vector of the terms."""
        if self.form is None:
            raise SecureSumRefused(f"Client {self.order.client} has not shared its secrets yet.")
        words = self.form.words(self.terms.integers(self.headers))
        return self.form.pack(self.party.mask(words, payload))

    def _checked_mode(self, mode: Any) -> Mode:
        """Return the mode if it hides this client's votes where they are few; else raise."""
        accepted: dict[Mode, bool] = {
            "common": self.usual and not self.again,
            "coverage": not self.again,
            "ragged": self.again or self.least == 1,
        }
        for known, fits in accepted.items():
            if mode == known and fits:
                return known
        raise SecureSumRefused(
            f"The mode of a secure sum is {mode!r}, which client {self.order.client} does not accept with "
            f"`secure_sum.min_coverage` {self.least}."
        )

    def _check(self, headers: SumHeaders) -> None:
        """Raise unless this client's extra trees fit the headers of all."""
        for key, tree in self.terms.headers().items():
            for name, own in tree.items():
                found = headers.get(key, {}).get(name, own)
                if found.shape != own.shape or (own.top is not None and (found.top is None or found.top < own.top)):
                    raise SecureSumRefused(f"The server states another form of {key}/{name} than the client has.")

    def _support(self, mode: Mode) -> Tensor | None:
        """Return the coordinates that are sent."""
        return common_support(self.layout, self.votes, self.unsent) if mode == "common" else self.support


def context_of(run: str, round: int, number: int) -> bytes:
    """Return the bytes that tell a sum from all others of its clients.

    Args:
        run: Identifier of the run.
        round: Number of the round.
        number: 1, or 2 for the second sum of a round.
    """
    return digest(join({"run": run, "round": round, "sum": number}))


def form_of(layout: Layout, mode: Mode, headers: SumHeaders, support: Tensor | None, clients: int, grid: Grid) -> Form:
    """Return the form of a sum's vectors; numbers of votes have no extra trees.

    Args:
        layout: Layout of the model.
        mode: What the vector holds.
        headers: Merged headers of sums without a grid.
        support: Coordinates that are sent; None = all.
        clients: Number of clients that advertised keys.
        grid: Grid of the round.
    """
    return Form(layout, mode, {} if mode == "coverage" else headers, support, clients, grid.total_weight)


def _read_grid(header: dict[str, Any], layout: Layout) -> Grid:
    """Return the grid that the server states, whose steps are powers of two."""
    steps, weight = header.get("steps"), header.get("total_weight")
    fits = isinstance(steps, list) and len(steps) == len(layout.names) and type(weight) is int and 1 <= weight < 2**40
    if not fits or not all(type(step) is float and step > 0 and math.frexp(step)[0] == 0.5 for step in steps or ()):
        raise SecureSumRefused("The grid of a secure sum is not one; expected a power of two for each tensor.")
    assert isinstance(steps, list)
    assert isinstance(weight, int)
    return Grid(steps, weight, _CPU)
