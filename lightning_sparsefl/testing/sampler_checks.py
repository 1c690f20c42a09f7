"""Promises of a sampler of cohorts, checked in runs of FedAvg in a small federation that draws by it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from lightning_sparsefl.algorithms import FedAvg
from lightning_sparsefl.federated import CohortSampler
from lightning_sparsefl.testing import algorithm_checks
from lightning_sparsefl.testing.promises import Difference, promise, require_frozen_value
from lightning_sparsefl.testing.small_federation import SmallFederation


@promise
def is_a_frozen_value(sampler: CohortSampler, federation: SmallFederation) -> None:
    """Check that a sampler is a frozen dataclass of options, which can be pickled.

    Its state is what `start` and `learn` return, or a run could not be resumed.
    """
    require_frozen_value(sampler)


@promise
def draws_from_its_generator(sampler: CohortSampler, federation: SmallFederation) -> None:
    """Check that `draw` returns the same clients again with a generator of the same seed, whatever was drawn before.

    What a sampler draws comes from `rng`, and not from torch's global generator or from the clock.
    """

    def again(self: CohortSampler, state: Any, candidates: Any, rng: torch.Generator) -> Any:
        seed = rng.get_state()
        first = list(draw(self, state, candidates, rng))
        torch.rand(7)
        second = list(draw(self, state, candidates, torch.Generator().set_state(seed)))
        if first != second:
            raise Difference(f"`draw` returns {first}, and then {second}")
        return first

    draw = type(sampler).draw
    with mock.patch.object(type(sampler), "draw", again):
        federation(FedAvg())


@promise
def leaves_its_state_unchanged(sampler: CohortSampler, federation: SmallFederation) -> None:
    """Check that `draw` and `learn` do not change the state that they get, but return another one.

    The state before a round is that of a checkpoint, from which the round can be run again.
    """
    with algorithm_checks.watched(type(sampler), ("draw", "learn"), lambda state, *_, **__: {"state": state}):
        federation(FedAvg())


@promise
def is_the_same_after_a_resume(sampler: CohortSampler, federation: SmallFederation) -> None:
    """Check that a run that is killed and resumed draws the clients of the one that was not.

    The state of a sampler holds numbers, strings, tensors, and lists and mappings of them, which checkpoints hold.
    """
    algorithm_checks.require_resumable(FedAvg(), federation)


@promise
def is_the_same_on_several_ranks(sampler: CohortSampler, federation: SmallFederation) -> None:
    """Check that two and three ranks draw the clients of one.

    `draw` and `learn` are called on every rank with equal input.
    """
    algorithm_checks.require_equal_ranks(FedAvg(), federation)
