"""Scores of the global model and of the clients' own models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_sparsefl.federated.rounds.round_metrics import metric_names, require_free, spread


@dataclass(frozen=True)
class Scores:
    """Metrics as the user's module logs them."""

    pooled: Mapping[str, float]
    """Metrics of the global model on all clients' data."""
    personal: Mapping[int, Mapping[str, float]]
    """Metrics of each client's own model on its own data."""
    unseen: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """The same of clients that are held out of training."""
    downlink_bytes: int = 0
    """Size of the messages that were sent for scoring."""

    def summary(self) -> dict[str, float]:
        """Return the logged keys: ``global/*``, ``personal/*`` and ``unseen/*``; ``_std`` is over clients.

        ``unseen/*_gap`` is the participation gap: the mean over the clients that train minus the mean over those that
        do not (Yuan, Morningstar, Ning, Singh 2022, arXiv:2110.14216).

        Example:
            >>> scores = Scores({"val_acc": 0.5}, {0: {"val_acc": 0.25}, 1: {"val_acc": 0.75}}, {2: {"val_acc": 0.25}})
            >>> keys = scores.summary()
            >>> keys["personal/val_acc_worst10"], keys["unseen/val_acc_gap"]
            (0.25, 0.25)
        """
        pooled = {f"global/{name}": value for name, value in self.pooled.items()}
        return {**pooled, **self.groups("personal")}

    def groups(self, personal: str) -> dict[str, float]:
        """Return means, spreads and the gap over clients.

        Args:
            personal: Name of the group of the clients that train: ``personal``, or another first part of the keys,
                which stands before ``unseen`` too.
        """
        unseen = "unseen" if personal == "personal" else f"{personal}_unseen"
        keys = {**spread(personal, self.personal), **spread(unseen, self.unseen)}
        names = metric_names(self.unseen) & metric_names(self.personal)
        for name in names:
            require_free(names, name, "_gap")
            keys[f"{unseen}/{name}_gap"] = keys[f"{personal}/{name}"] - keys[f"{unseen}/{name}"]
        return dict(sorted(keys.items())) if self.unseen else keys
