"""The ledger: bytes and operations charged to each client, with the sums of a round and of the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption

_KEYS = {
    "comm/uplink_bytes": ("uplink_bytes",),
    "comm/downlink_bytes": ("downlink_bytes",),
    "comm/mask_bytes": ("mask_bytes",),
    "comm/paper_bytes": ("paper_bytes_down", "paper_bytes_up"),
    "flops/train": ("flops_train",),
    "flops/paper": ("flops_paper",),
}
"""Keys of the log, with the fields of a charge that each one sums."""


@dataclass(frozen=True, kw_only=True)
class Charge:
    """Costs of one client in one round."""

    round: int
    """Number of the round, from 0."""
    client: int
    """Number of the client, from 0."""
    downlink_bytes: int = 0
    """Encoded bytes from the server to the client, including masks."""
    uplink_bytes: int = 0
    """Encoded bytes from the client to the server, including masks."""
    mask_bytes: int = 0
    """Bytes of masks (bits or positions) in both directions, included in the two above."""
    paper_bytes_down: float = 0.0
    """Bytes from the server to the client by the paper's formula."""
    paper_bytes_up: float = 0.0
    """Bytes from the client to the server by the paper's formula."""
    flops_train: float = 0.0
    """Operations that the hardware has to execute."""
    flops_paper: float = 0.0
    """Operations by the paper's formula."""


class Ledger:
    """Sums of charges, which do not depend on the order of the charges; rows are stored for the current round only.

    Args:
        counts_flops: Whether the FLOPs of the charges are known; if not, the log has no keys for them.

    Example:
        >>> ledger = Ledger()
        >>> ledger.add(Charge(round=0, client=3, uplink_bytes=10))
        >>> ledger.add(Charge(round=1, client=4, uplink_bytes=5))
        >>> ledger.round_totals(1)["comm/uplink_bytes"], ledger.totals["comm/uplink_bytes_total"]
        (5, 15)
    """

    def __init__(self, counts_flops: bool = True) -> None:
        self.counts_flops = counts_flops
        self._closed: dict[str, float] = dict.fromkeys(_KEYS, 0)
        self._rows: list[Charge] = []

    def add(self, charge: Charge) -> None:
        """Add one charge; the first charge of a round closes the previous round.

        Args:
            charge: Charge of the current round or a later one.

        Raises:
            InvalidOption: If the charge's round is closed.
        """
        current = self._current
        if charge.round < current:
            raise InvalidOption(f"`Charge(round={charge.round})`: expected {current} or later; the round is closed.")
        if charge.round > current:
            self._closed = {key: self._closed[key] + value for key, value in _sums(self._rows).items()}
            self._rows = []
        self._rows.append(charge)

    def rows(self, round: int) -> tuple[Charge, ...]:
        """Return the charges of the current round, ordered by client.

        Args:
            round: Number of the current round, or of a later one, which has no charges yet.

        Raises:
            InvalidOption: If the round is closed.
        """
        if round < self._current:
            raise InvalidOption(f"`round={round}`: expected {self._current} or later; earlier rows are not stored.")
        rows = (row for row in self._rows if row.round == round)
        return tuple(sorted(rows, key=lambda row: row.client))

    def round_totals(self, round: int) -> dict[str, float]:
        """Return the sums of the current round under the log's keys.

        Args:
            round: Number of the round, as for :meth:`rows`.

        Raises:
            InvalidOption: If the round is closed.
        """
        return self._known(_sums(self.rows(round)))

    @property
    def totals(self) -> dict[str, float]:
        """Sums of all rounds under the log's keys, with the suffix ``_total``."""
        sums = self._known(_sums(self._rows))
        return {f"{key}_total": self._closed[key] + value for key, value in sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and the current round's rows in plain types."""
        return {"closed": dict(self._closed), "rows": [dict(vars(row)) for row in self._rows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums and rows that :meth:`state_dict` returned.

        Args:
            state: State to restore.

        Raises:
            CheckpointMismatch: If the state has another layout.
        """
        names = {field.name for field in fields(Charge)}
        closed, rows = state.get("closed"), state.get("rows")
        if not (isinstance(closed, Mapping) and set(closed) == set(_KEYS) and _all_numbers(closed)):
            raise CheckpointMismatch(f"The ledger's sums are {closed!r}, expected a number for each of {list(_KEYS)}.")
        if not (isinstance(rows, list) and all(_is_row(row, names) for row in rows)):
            raise CheckpointMismatch(f"The ledger's rows are {rows!r}, expected a list of {sorted(names)}.")
        self._closed, self._rows = dict(closed), [Charge(**row) for row in rows]

    def _known(self, sums: dict[str, float]) -> dict[str, float]:
        return {key: value for key, value in sums.items() if self.counts_flops or not key.startswith("flops/")}

    @property
    def _current(self) -> int:
        return self._rows[-1].round if self._rows else 0


def _sums(rows: Iterable[Charge]) -> dict[str, float]:
    return {key: _sum([getattr(row, name) for row in rows for name in names]) for key, names in _KEYS.items()}


def _sum(values: list[float]) -> float:
    """Sum with a single rounding, so that the order does not matter; a sum of integers is an integer."""
    return sum(values) if all(isinstance(value, int) for value in values) else math.fsum(values)


def _is_row(row: Any, names: set[str]) -> bool:
    return isinstance(row, Mapping) and set(row) == names and _all_numbers(row)


def _all_numbers(amounts: Mapping[str, Any]) -> bool:
    return all(isinstance(amount, int | float) for amount in amounts.values())
