"""How good the global and the personal models are."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_sparsefl.federated.client import Client, ClientWorker, Split
from lightning_sparsefl.federated.distributed.placement import longest_first
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.types import ServerState, Weights

_POOLED = -1
_FALLING = {
    "loss",
    "error",
    "err",
    "perplexity",
    "ppl",
    "mse",
    "rmse",
    "mae",
    "nll",
    "bce",
    "kl",
    "wer",
    "cer",
    "fid",
    "ece",
}


@dataclass(frozen=True)
class Scores:
    """Metrics as the user's module logs them."""

    pooled: Mapping[str, float]
    """Of the global model on all clients' data."""
    personal: Mapping[int, Mapping[str, float]]
    """Of each client's own model on its own data."""
    unseen: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """The same of clients that are held out of training."""

    def summary(self) -> dict[str, float]:
        """The logged keys: ``global/*``, ``personal/*`` and ``unseen/*``; ``_std`` is over clients.

        ``unseen/*_gap`` is the participation gap: the mean of the clients that train less that of those that do not
        (Yuan, Morningstar, Ning, Singh 2022, arXiv:2110.14216).

        Example:
            >>> scores = Scores({"val_acc": 0.5}, {0: {"val_acc": 0.25}, 1: {"val_acc": 0.75}}, {2: {"val_acc": 0.25}})
            >>> keys = scores.summary()
            >>> keys["personal/val_acc_worst10"], keys["unseen/val_acc_gap"]
            (0.25, 0.25)
        """
        pooled = {f"global/{name}": value for name, value in self.pooled.items()}
        return {**pooled, **self.groups("personal")}

    def groups(self, personal: str) -> dict[str, float]:
        """Means, spreads and gap over clients.

        Args:
            personal: What the group of the clients that train is called; ``personal`` itself, or a part that stands
                before ``unseen`` too.
        """
        unseen = "unseen" if personal == "personal" else f"{personal}_unseen"
        keys = {**spread(personal, self.personal), **spread(unseen, self.unseen)}
        for name in _metrics(self.unseen) & _metrics(self.personal):
            keys[f"{unseen}/{name}_gap"] = keys[f"{personal}/{name}"] - keys[f"{unseen}/{name}"]
        return dict(sorted(keys.items())) if self.unseen else keys


def spread(group: str, personal: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Mean, standard deviation and worst tenth over clients, unweighted.

    Args:
        group: First part of the keys.
        personal: Metrics by client number.

    Example:
        >>> spread("finetuned", {0: {"acc": 1.0}})
        {'finetuned/acc': 1.0, 'finetuned/acc_std': 0.0, 'finetuned/acc_worst10': 1.0}
    """
    keys: dict[str, float] = {}
    for name in sorted(_metrics(personal)):
        values = [metrics[name] for metrics in personal.values() if name in metrics]
        keys[f"{group}/{name}"] = mean = statistics.fmean(values)
        keys[f"{group}/{name}_std"] = math.sqrt(statistics.fmean((value - mean) ** 2 for value in values))
        keys[f"{group}/{name}_worst10"] = worst_tenth(values, higher_is_better(name))
    return keys


def _metrics(personal: Mapping[int, Mapping[str, float]]) -> set[str]:
    return {name for metrics in personal.values() for name in metrics}


def higher_is_better(name: str) -> bool:
    """Whether a metric of this name should rise; losses, errors and the like should fall.

    Example:
        >>> higher_is_better("val_acc"), higher_is_better("val_loss"), higher_is_better("test_ppl")
        (True, False, False)
    """
    words = set(re.split(r"[^a-z]+", name.lower()))
    return not words & _FALLING and "loss" not in name.lower()


def worst_tenth(values: Sequence[float], rising: bool) -> float:
    """Mean of the worst tenth of the values, of at least one.

    Example:
        >>> worst_tenth([0.1, 0.9, 0.8], rising=True)
        0.1
    """
    ordered = sorted(values, reverse=not rising)
    return statistics.fmean(ordered[: max(1, math.ceil(len(ordered) / 10))])


def evaluate(
    own: Callable[[Client], Weights | None] | None,
    server: ServerState,
    clients: Sequence[int],
    bench: ClientWorker,
    ranks: Ranks,
    split: Split,
    make_client: Callable[[int], Client],
    seed: int,
    unseen: frozenset[int] = frozenset(),
) -> Scores:
    """Score the global model on the pooled set, and each client's own model on its own.

    Args:
        own: A client's own weights; None = it has none, and no score. None instead of a function where no client is
            scored.
        server: Of the finished round.
        clients: To score.
        bench: Of this rank.
        ranks: Share the work.
        split: ``val`` or ``test``.
        make_client: A client of its number, with its memory.
        seed: Of the run.
        unseen: Which of the clients are held out of training.
    """
    loads = {i: float(bench.data.num_examples(i)) for i in clients}
    loads[_POOLED] = sum(loads.values())

    def score(job: int) -> dict[str, float]:
        if job == _POOLED:
            return dict(score_global(server, bench, split, seed))
        assert own is not None
        client = make_client(job)
        weights = own(client)
        if weights is None:
            return {}
        return dict(client.evaluate(weights, split))

    parts = ranks.share(lambda: {job: score(job) for job in longest_first(loads, ranks.size)[ranks.rank]})
    merged = {job: metrics for part in parts for job, metrics in part.items()}
    pooled, scored = merged.pop(_POOLED), sorted(merged)
    return Scores(
        pooled=pooled,
        personal={i: merged[i] for i in scored if i not in unseen},
        unseen={i: merged[i] for i in scored if i in unseen},
    )


def score_global(server: ServerState, bench: ClientWorker, split: Split, seed: int) -> Mapping[str, float]:
    """Metrics of the global model on all clients' data."""
    loader: Any = getattr(bench.data, f"{split}_dataloader")()
    return bench.score(apply(server.weights, server.masks), loader, split, (seed, server.round, "evaluate global"))


def not_finite(metrics: Mapping[str, float]) -> Iterator[str]:
    """Names of metrics that are not finite.

    Example:
        >>> list(not_finite({"train_loss": float("nan"), "train_acc": 0.5}))
        ['train_loss']
    """
    return (name for name, value in metrics.items() if not math.isfinite(value))
