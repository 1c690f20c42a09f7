"""All clients of a run, and the only way to ask many of them at once."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, overload

import torch

from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.distributed.placement import longest_first
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.sparse.units import UnitGroup
from lightning_sparsefl.types import ClientView, Weights

_MOST_LISTED = 1000


class KnowsUnits(Protocol):
    """Whatever holds the model."""

    @property
    def units(self) -> Sequence[UnitGroup]:
        """The model's groups of units."""
        ...


class LazyClientViews(Sequence[ClientView]):
    """The views of many clients, each made when it is asked for.

    Args:
        clients: Their numbers.
        view: Makes one.
    """

    def __init__(self, clients: Sequence[int], view: Callable[[int], ClientView]) -> None:
        self._clients, self._view = clients, view

    def __len__(self) -> int:
        return len(self._clients)

    @overload
    def __getitem__(self, place: int) -> ClientView: ...
    @overload
    def __getitem__(self, place: slice) -> LazyClientViews: ...
    def __getitem__(self, place: int | slice) -> ClientView | LazyClientViews:
        chosen = self._clients[place]
        return self._view(chosen) if isinstance(chosen, int) else LazyClientViews(chosen, self._view)


def sizes_fact(data: Any) -> list[int] | str:
    """The clients' training samples as a short fact, which differs where one of them does.

    Args:
        data: The clients' data. Where its `client_sizes` follow from a rule, they may say which in an attribute `rule`,
            so that no client needs to be asked.

    Returns:
        The sizes of up to 1,000 clients; of more, the rule or a digest.
    """
    rule = getattr(getattr(data, "client_sizes", None), "rule", None)
    if data.num_clients > _MOST_LISTED and rule is not None:
        return str(rule)
    sizes = (int(data.num_examples(client)) for client in range(data.num_clients))
    if data.num_clients <= _MOST_LISTED:
        return list(sizes)
    return "digest " + hashlib.blake2b(array("q", sizes).tobytes(), digest_size=16).hexdigest()


class Fleet:
    """What a method may know of all clients, and what it may ask of them.

    Args:
        views: The facts of the clients that train, before round 0; :class:`LazyClientViews` where they are many.
        buffers: Names of the model's floating-point buffers, which no mask may hold.
        device: Where the server's weights live.
        bench: Knows the model's units.
        client: Makes a client of its number; None where none can be asked.
        ranks: The processes; None = this one alone.
        clients_per_round: Clients of a cohort; None = all.
        execution: How units are left out of local training, `federation.execution`.
    """

    def __init__(
        self,
        views: Sequence[ClientView],
        buffers: frozenset[str],
        device: torch.device,
        bench: KnowsUnits | None = None,
        client: Callable[[int], Client] | None = None,
        ranks: Ranks | None = None,
        clients_per_round: int | None = None,
        execution: Literal["mask", "cut"] = "mask",
    ) -> None:
        self.views, self.buffers, self.device = views, buffers, device
        self.seed, self.max_rounds = views[0].seed, views[0].max_rounds
        self.clients_per_round, self.execution = clients_per_round or len(views), execution
        self._bench, self._client, self._ranks = bench, client, ranks

    @property
    def units(self) -> Sequence[UnitGroup]:
        """The model's groups of units.

        Raises:
            InvalidOption: If they cannot be found.
        """
        return () if self._bench is None else self._bench.units

    def __len__(self) -> int:
        return len(self.views)

    def map(self, ask: Callable[[Client], Any]) -> dict[int, Any]:
        """What every client answers, by client number; each is asked on one rank.

        Args:
            ask: Called with the client; its answer travels between processes.

        Raises:
            RuntimeError: Where no client can work.
        """
        if self._client is None:
            raise RuntimeError("Clients cannot be asked here, since nothing is trained.")
        if self._ranks is None:
            return {view.id: ask(self._client(view.id)) for view in self.views}
        loads = {view.id: float(view.num_examples) for view in self.views}
        mine, client = longest_first(loads, self._ranks.size)[self._ranks.rank], self._client
        parts = self._ranks.share(lambda: {i: ask(client(i)) for i in mine})
        answers = {i: answer for part in parts for i, answer in part.items()}
        return dict(sorted(answers.items()))

    def mean(self, ask: Callable[[Client], Weights]) -> Mapping[str, torch.Tensor]:
        """The mean of what every client answers, weighted by its training samples, summed in client order."""
        answers = self.map(ask)
        sizes = {view.id: view.num_examples for view in self.views}
        total = sum(sizes[i] for i in answers)
        sums: dict[str, torch.Tensor] = {}
        dtypes = {name: tensor.dtype for tree in answers.values() for name, tensor in tree.items()}
        for i, tree in answers.items():
            for name, tensor in tree.items():
                term = sizes[i] * tensor.double()
                sums[name] = sums[name] + term if name in sums else term
        return {name: (tensor / total).to(dtypes[name]) for name, tensor in sums.items()}
