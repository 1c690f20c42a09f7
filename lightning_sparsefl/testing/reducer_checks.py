"""Promises of a reducer, checked in runs of HeteroFL, in which some clients vote on a part of the coordinates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lightning_sparsefl.algorithms import HeteroFL
from lightning_sparsefl.federated import Client, FederatedAlgorithm, Reducer
from lightning_sparsefl.testing import algorithm_checks
from lightning_sparsefl.testing.promises import promise, require_frozen_value
from lightning_sparsefl.testing.small_federation import SmallFederation
from lightning_sparsefl.types import Message, Update

_METHOD = HeteroFL(rates=(1.0, 0.5))


@dataclass(frozen=True, kw_only=True)
class _PartlySent(FederatedAlgorithm):
    """FedAvg in which each client trains the whole model and sends a random half of it."""

    def train(self, message: Message, client: Client) -> Update:
        """Train, and vote on a half of the coordinates."""
        update, rng = super().train(message, client), client.rng("votes")
        votes = {name: torch.rand(weight.shape, generator=rng) < 0.5 for name, weight in update.weights.items()}
        return replace(update, votes=votes)


@promise
def is_a_frozen_value(reducer: Reducer, federation: SmallFederation) -> None:
    """Check that a reducer is a frozen dataclass of options, which can be pickled.

    A run that is resumed compares its reducer with that of the run before.
    """
    require_frozen_value(reducer)


@promise
def learns(reducer: Reducer, federation: SmallFederation) -> None:
    """Check that a federation learns: personal accuracy on easy data rises by at least 0.2 in five rounds."""
    algorithm_checks.require_learning(_METHOD, federation)


@promise
def is_the_same_after_a_resume(reducer: Reducer, federation: SmallFederation) -> None:
    """Check that a run that is killed and resumed ends with the bytes of the one that was not.

    A reducer keeps nothing from one round to the next.
    """
    algorithm_checks.require_resumable(_METHOD, federation)


@promise
def is_the_same_when_encoded(reducer: Reducer, federation: SmallFederation) -> None:
    """Check that updates that are encoded are merged as those that are counted.

    Where a client does not vote, its weights are not sent: a reducer that reads them sees others in an encoded update.
    """
    algorithm_checks.require_equal_when_encoded(_PartlySent(), federation)


@promise
def is_the_same_on_several_ranks(reducer: Reducer, federation: SmallFederation) -> None:
    """Check that two and three ranks end with the bytes of one.

    The sum of a reducer does not depend on the order of the updates, nor on the rank that received them.
    """
    algorithm_checks.require_equal_ranks(_METHOD, federation)
