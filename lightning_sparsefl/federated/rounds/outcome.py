"""What every rank learns of one client's part in a round or in an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from lightning_sparsefl.cost import Charge
from lightning_sparsefl.federated.exchange.orders import Split
from lightning_sparsefl.types import PendingUpdate


@dataclass(frozen=True)
class Outcome:
    """One client's result, small enough to be gathered on all ranks."""

    client: int
    """Number of the client."""
    status: Literal["counted", "failed", "late"] = "counted"
    """Whether the update is merged in the round that the client was drawn in."""
    num_examples: int = 0
    """Number of the client's training samples."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the local fit."""
    charge: Charge | None = None
    """What the client is charged for."""
    record: Mapping[str, Any] | None = None
    """What the server keeps about the client from now on, as plain values."""
    version: int | None = None
    """Version of the record that the node has made; None = it keeps none."""
    densities: Mapping[str, float] = field(default_factory=dict)
    """Fraction that the client held of each masked tensor; without masks, of what it voted on."""
    changed: float = 0.0
    """Fraction of the mask that local training changed."""
    scores: Mapping[Split, Mapping[str, float]] = field(default_factory=dict)
    """Metrics by split: of a scored client, or right after the local training."""
    scoring_bytes: int = 0
    """Size of the message that was sent for scoring or fine-tuning."""
    simulated_seconds: float | None = None
    """Time on the client's own device, if the algorithm simulates it."""
    pending: PendingUpdate | None = None
    """Update of a late client that a later round merges; its `arrival` is the time since the start of the round."""
    failure: str | None = None
    """Why the client failed, as a clause."""
    rank: int = 0
    """Process that did the work."""
    elapsed: float = 0.0
    """Wall-clock seconds of that process."""

    @property
    def report(self) -> dict[str, float]:
        """Metrics of the local fit, with the simulated time as ``seconds``, for the algorithm."""
        simulated = self.simulated_seconds
        return {**self.metrics} if simulated is None else {**self.metrics, "seconds": simulated}

    def to_plain(self) -> dict[str, Any]:
        """Return what is logged of the outcome, as plain values."""
        return asdict(replace(self, record=None, pending=None))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Outcome:
        """Restore an outcome.

        Args:
            plain: Values from :meth:`to_plain`.
        """
        charge = plain["charge"]
        return cls(**{**plain, "charge": None if charge is None else Charge(**charge)})


def longest(outcomes: Iterable[Outcome]) -> float:
    """Return the simulated time of the slowest client whose update is merged; 0 if time is not simulated.

    Args:
        outcomes: Outcomes of a round.
    """
    return float(max((o.simulated_seconds or 0.0 for o in outcomes if o.status == "counted"), default=0.0))
