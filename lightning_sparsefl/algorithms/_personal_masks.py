"""What methods share in which each client prunes its own mask, round by round, as far as its accuracy allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from lightning_sparsefl.errors import InvalidOption, require
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.exchange.orders import Split
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.report.measures.direction import higher_is_better
from lightning_sparsefl.sparse.density import listed
from lightning_sparsefl.sparse.masks import counts, dense_like
from lightning_sparsefl.sparse.prune import shrink
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.types import ClientView, Masks, ServerState, Weights

Counts = Mapping[str, int]
"""Numbers of kept positions by name."""


def start(weights: Weights, fleet: Fleet, parameters: Weights) -> ServerState:
    """Return the first state: all clients start with masks that keep everything.

    Args:
        weights: Initial weights of the module.
        fleet: All clients.
        parameters: Parameters that have masks, which tells a client the names of what may be pruned.
    """
    masks = dense_like(parameters)
    share = torch.tensor(fleet.clients_per_round / len(fleet), dtype=torch.float64)
    return ServerState(round=0, weights=weights, extra={"first_masks": masks, "plan": {"participations": share}})


def masks_of(server: ServerState, view: ClientView) -> Masks:
    """Return the masks that a client uploaded last, or its first ones.

    Only :func:`expected` gives the server masks of its own, in `profile`, where they stand for those of all clients.

    Args:
        server: State of the server.
        view: View of the client.
    """
    masks: Masks = server.masks or view.shared.get("masks", server.extra["first_masks"])
    return masks


def require_gate(min_score: float, metric: str) -> None:
    """Raise :class:`InvalidOption` if a score cannot be exceeded, or is one that falls as a model improves.

    Args:
        min_score: Score that a pruning must exceed, option `min_score` of a method.
        metric: Name of the score, option `metric` of a method.
    """
    require(not math.isnan(min_score), "algorithm.min_score", min_score, "a number")
    expected = "a score that rises as a model improves, such as 'val_acc'"
    require(higher_is_better(metric), "algorithm.metric", metric, expected)


def score(client: Client, weights: Weights, split: Split, metric: str) -> float:
    """Return the score by which a client decides whether to prune.

    Args:
        client: The client.
        weights: Weights to score.
        split: Split of the client's data; test data decide nothing.
        metric: Name under which the module's `validation_step` logs the score.

    Raises:
        InvalidOption: If the module does not log the metric, or the client has no samples.
    """
    scores = client.evaluate(weights, split)
    try:
        return float(scores[metric])
    except KeyError:
        clause = f"which the module's `validation_step` does not log; expected one of {listed(scores)}."
        if not scores:
            clause = f"of which client {client.id} has no value in the split {split!r}; expected samples there."
        raise InvalidOption(f"`algorithm.metric` is {metric!r}, {clause}") from None


def participations(server: ServerState, round: int) -> int:
    """Return in how many rounds before one a client takes part on average, rounded down.

    Args:
        server: State of the server, from :func:`start`.
        round: Number of the round, from 0.
    """
    return int(round * float(server.extra["plan"]["participations"]) + 1e-6)


def expected(
    server: ServerState, round: int, prune: Callable[[Counts], Counts], most: int | None = None
) -> ServerState:
    """Return the state of `profile` at the start of a round, with the masks of a client that could always prune.

    A client participates in the mean share of the rounds; what it keeps is the largest of the initial weights.

    Args:
        server: State of the server before round 0.
        round: Number of the round, from 0.
        prune: Function from the numbers of kept positions before a pruning to those after it.
        most: Largest number of prunings; None = until nothing changes.
    """
    masks = server.extra["first_masks"]
    left: Counts = counts(masks)
    times = participations(server, round)
    for _ in range(times if most is None else min(times, most)):
        after = prune(left)
        if after == left:
            break
        left = after
    return replace(server, round=round, masks=shrink(magnitude(server.weights), masks, left))
