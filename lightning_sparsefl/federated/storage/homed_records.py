"""Node records of a run on several ranks: each has one home, and visits the rank that trains its client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.storage.record_store import Packed, RecordStore


class HomedRecords:
    """The node records that a rank works with in one phase of a round.

    New records are staged, and reach their home when the round is closed: a round that is given up leaves no trace.

    Args:
        store: Divided store of this rank's own records.
        ranks: Processes of the run.
    """

    def __init__(self, store: RecordStore, ranks: Ranks) -> None:
        self.store, self._ranks = store, ranks
        self._visiting: dict[int, Packed] = {}
        self._staged: dict[int, tuple[int, Packed]] = {}

    def get(self, client: int, version: int) -> Packed | None:
        """Return a version of a client's record; None if it is not here.

        Args:
            client: Number of the client.
            version: Number of finished rounds after which the record was made.
        """
        if client in self._visiting:
            return self._visiting[client]
        return self.store.get(client, version)

    def put(self, client: int, packed: Packed, version: int, keep: tuple[int, ...]) -> None:
        """Stage a new version of a client's record.

        Args:
            client: Number of the client.
            packed: The record as plain values.
            version: Number of finished rounds, the current one included.
            keep: Rounds whose versions may be asked for again; the store knows them as its pinned round.
        """
        self._staged[client] = (version, packed)

    def staged(self, client: int) -> Packed | None:
        """Return the record that a client's work has staged, or None."""
        return self._staged[client][1] if client in self._staged else None

    def fetch(self, versions: Mapping[int, int], plan: Iterable[Iterable[int]] | None) -> None:
        """Bring records to the ranks that need them; called on all ranks, with the same arguments.

        Args:
            versions: Version of the record of each client that has one.
            plan: Clients of each rank; None = any rank may work on any client.
        """
        self._visiting.clear()
        self._staged.clear()
        if self._ranks.size == 1 or not versions:
            return
        everybody = range(self._ranks.size)
        needs = [set(versions) for _ in everybody] if plan is None else [set(part) & set(versions) for part in plan]
        if not any(self.store.home(client) != rank for rank in everybody for client in needs[rank]):
            return
        outgoing = [self._leaving(needs[rank], rank, versions) for rank in everybody]
        for part in self._ranks.exchange(outgoing):
            self._visiting.update(part)

    def _leaving(self, needed: set[int], rank: int, versions: Mapping[int, int]) -> dict[int, Packed]:
        """Return the records of this rank's own clients that another rank needs."""
        me = self._ranks.rank
        mine = [client for client in sorted(needed) if self.store.home(client) == me] if rank != me else []
        found = {client: self.store.get(client, versions[client]) for client in mine}
        return {client: packed for client, packed in found.items() if packed is not None}

    def settle(self, made: Mapping[int, int]) -> None:
        """Send the staged records home and keep them; called on all ranks when a round is closed.

        Args:
            made: Rank that made a new record, by client; the same on all ranks.
        """
        me, home = self._ranks.rank, self.store.home
        staged = {client: self._staged[client] for client, rank in made.items() if rank == me}
        arrived = [{client: record for client, record in staged.items() if home(client) == me}]
        if any(home(client) != rank for client, rank in made.items()):
            outgoing = [
                {client: record for client, record in staged.items() if home(client) == rank != me}
                for rank in range(self._ranks.size)
            ]
            arrived += self._ranks.exchange(outgoing)
        for client, (version, packed) in sorted(
            (item for part in arrived for item in part.items()), key=lambda item: item[0]
        ):
            self.store.put(client, packed, version)
        self._visiting.clear()
        self._staged.clear()
