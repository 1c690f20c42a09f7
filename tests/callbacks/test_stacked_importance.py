"""The counterpart of `UnitScores` for several clients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from lightning_sparsefl.callbacks.stacking import stacked
from lightning_sparsefl.callbacks.stacking.importance import StackedScores
from lightning_sparsefl.callbacks.stacking.rows import StackedRows
from lightning_sparsefl.callbacks.unit_scores import ScoreSteps, UnitScores
from lightning_sparsefl.sparse.submodel import cut
from lightning_sparsefl.sparse.units import find_groups


class Joined(nn.Module):
    """Two layers whose units take turns among the inputs of a third one."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(4, 1)
        self.trainer = None

    def forward(self, inputs):
        return self.last(torch.stack([self.first(inputs), self.second(inputs)], 2).flatten(1))


def scores(net, kept):
    found, weights = find_groups(net, torch.zeros(1, 2)), net.state_dict()
    groups = [replace(group, masks_only="") for group in found]  # those of `Joined` are not cut in a run
    steps = ScoreSteps({group.name: torch.ones(group.size) for group in groups}, 0.1, 1.0, "sum")
    return UnitScores(steps, groups, kept, weights)


def kind(net, *kept):
    """Return the class of the counterpart for clients that keep some units, one after another in a cut module."""
    callbacks = [scores(net, units) for units in kept]
    return type(stacked(callbacks, cut(net, callbacks[0].groups, kept[0]), [1] * len(kept)))


def test_units_in_the_same_places_are_stacked():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    net.trainer = None
    one, two = torch.tensor([True, False, True]), torch.tensor([False, True, True])
    assert kind(net, {"0": one}, {"0": two}) is StackedScores


def test_units_in_other_places_are_scored_client_by_client():
    both, one, other = torch.tensor([True, True]), torch.tensor([True, False]), torch.tensor([False, True])
    assert kind(Joined(), {"first": both, "second": one}, {"first": both, "second": one}) is StackedScores
    assert kind(Joined(), {"first": both, "second": one}, {"first": both, "second": other}) is StackedRows
