"""What every rank learns of one client's part in a round or in an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_sparsefl.cost import Charge
from lightning_sparsefl.federated.exchange.orders import Split


@dataclass(frozen=True)
class Outcome:
    """One client's result, small enough to be gathered on all ranks."""

    client: int
    """Number of the client."""
    status: Literal["counted", "failed", "late"] = "counted"
    """Whether the update is merged."""
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
    failure: str | None = None
    """Why the client failed, as a clause."""
    rank: int = 0
    """Process that did the work."""
    elapsed: float = 0.0
    """Wall-clock seconds of that process."""
