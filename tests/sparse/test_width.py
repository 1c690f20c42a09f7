from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.unit_tables import groups_of, unit_tables
from lightning_sparsefl.sparse.units import find_groups, unit_masks, unit_norms
from lightning_sparsefl.sparse.width import (
    block_units,
    held_units,
    largest_rate,
    live_units,
    make_norms_static,
    prefix_units,
    ranked_units,
)

GROUPS = find_groups(
    nn.Sequential(nn.Linear(3, 10), nn.ReLU(), nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 2)), torch.zeros(1, 3)
)


@pytest.mark.parametrize("rate", [0.01, 0.07, 0.125, 0.3, 0.5, 0.7, 1.0])
def test_a_prefix_is_the_first_units_rounded_up(rate):
    for name, kept in prefix_units(GROUPS, rate).items():
        count = math.ceil(round(rate * {"0": 10, "2": 7}[name], 9))
        assert kept.tolist() == [place < count for place in range(len(kept))]


@pytest.mark.parametrize("rate", [0.0, 1.1, -1.0])
def test_a_prefix_has_a_width(rate):
    with pytest.raises(InvalidOption, match=r"expected a number in \(0, 1\]"):
        prefix_units(GROUPS, rate)


@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
def test_blocks_share_nothing_and_leave_nothing(blocks):
    for name in ("0", "2"):
        kept = torch.stack([block_units(GROUPS, block, blocks)[name] for block in range(blocks)])
        assert bool((kept.sum(0) == 1).all())
        assert int(kept.sum(1).max() - kept.sum(1).min()) <= 1
        first = [int(row.nonzero()[0]) for row in kept]
        assert all(one < other for one, other in pairwise(first))


def test_more_blocks_than_units_are_refused_by_name():
    with pytest.raises(InvalidOption, match="`2` has 7 units; expected at least one for each of 8 networks"):
        block_units(GROUPS, 0, 8)


def test_static_norms_use_the_batch_in_both_modes():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.GroupNorm(1, 3), nn.BatchNorm1d(3, affine=False))
    names = [name for name, _ in net.named_parameters()]
    make_norms_static(net)
    make_norms_static(net)  # a second time changes nothing
    assert [name for name, _ in net.named_parameters()] == names == list(net.state_dict())
    x = torch.randn(5, 2)
    assert torch.equal(net.train()(x), net.eval()(x))


def test_a_window_is_as_wide_as_a_prefix_and_goes_around():
    for turn in range(-12, 25):
        for name, kept in ranked_units(GROUPS, 0.3, "rolling", turn=turn).items():
            first = prefix_units(GROUPS, 0.3)[name]
            assert torch.equal(kept, first.roll(turn))


def test_magnitude_keeps_the_largest_rows():
    weights = {"0.weight": torch.zeros(10, 3), "2.weight": torch.zeros(7, 10)}
    weights["0.weight"][[2, 5]], weights["2.weight"][6] = -1.0, 0.1
    kept = ranked_units(GROUPS, 0.2, "magnitude", weights=weights)
    assert kept["0"].nonzero().flatten().tolist() == [2, 5]
    assert kept["2"].nonzero().flatten().tolist() == [0, 6]  # of equal ones, the lower index


@pytest.mark.parametrize(("rounding", "counts"), [("up", [3, 2]), ("nearest", [2, 1])])
def test_numbers_of_units_are_rounded_as_asked(rounding, counts):
    kept = ranked_units(GROUPS, 0.21, "random", seed=3, rounding=rounding)
    assert [int(units.sum()) for units in kept.values()] == counts


@pytest.mark.parametrize("pattern", ["ordered", "random", "rolling"])
def test_masks_tell_which_units_they_keep(pattern):
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 8), nn.GRU(8, 5))
    groups = find_groups(net[:4], torch.zeros(1, 1, 4, 4))
    kept = ranked_units(groups, 0.4, pattern, turn=4, seed=1)
    masks = unit_masks(groups, kept, dict(net.named_parameters()))
    assert {name: units.tolist() for name, units in held_units(groups, masks).items()} == {
        name: units.tolist() for name, units in kept.items()
    }


def test_tables_of_units_make_the_same_masks():
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 8), nn.Linear(8, 2)
    )
    groups = find_groups(net, torch.zeros(1, 2, 4, 4))
    again = groups_of(unit_tables(groups))
    assert [(g.name, g.size, g.layers) for g in again] == [(g.name, g.size, tuple(g.layers)) for g in groups]
    weights = dict(net.named_parameters())
    kept = ranked_units(groups, 0.4, "random", seed=1)
    ours, theirs = (unit_masks(each, kept, weights) for each in (again, groups))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    norms = [unit_norms(each, weights) for each in (again, groups)]
    assert all(torch.equal(norms[0][name], norms[1][name]) for name in norms[1])


@pytest.mark.parametrize(("threshold", "live"), [(0.25, [True, True, False]), (0.6, [False, True, False])])
def test_a_unit_at_the_threshold_is_alive_and_of_a_dead_group_the_largest(threshold, live):
    groups = find_groups(nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)), torch.zeros(1, 1))
    weights = {"0.weight": torch.tensor([[0.25], [-0.5], [0.0]]), "1.weight": torch.zeros(1, 3)}
    assert live_units(groups, weights, threshold)["0"].tolist() == live


def test_a_client_has_the_largest_rate_within_its_capacity():
    assert [largest_rate((0.25, 1.0, 0.5), capacity) for capacity in (0.25, 0.49, 0.5, 1.0)] == [0.25, 0.25, 0.5, 1.0]
    with pytest.raises(InvalidOption, match=r"the capacity 0.2, and the smallest of `algorithm.rates` is 0.25"):
        largest_rate((0.5, 0.25), 0.2)
