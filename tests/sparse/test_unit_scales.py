from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sparsefl.models import PreResNet18
from lightning_sparsefl.sparse.unit_scales import drop_smallest_scales, scaled_groups, scaled_units, unit_scales
from lightning_sparsefl.sparse.unit_tables import groups_of, unit_tables
from lightning_sparsefl.sparse.units import find_groups, unit_masks

NET = nn.Sequential(
    nn.Conv2d(1, 4, 3),
    nn.BatchNorm2d(4),
    nn.ReLU(),
    nn.Conv2d(4, 3, 1),
    nn.PReLU(3),
    nn.Flatten(),
    nn.Linear(12, 6),
    nn.LayerNorm(6),
    nn.Linear(6, 2),
)
WEIGHTS = {name: value.clone() for name, value in NET.state_dict().items()}
WEIGHTS["1.weight"] = torch.tensor([0.5, -0.1, 0.0, 2.0])
GROUPS = find_groups(NET, torch.zeros(1, 1, 4, 4))


@pytest.mark.parametrize("groups", [GROUPS, groups_of(unit_tables(GROUPS))], ids=["found", "unpacked"])
def test_groups_with_scales_are_those_with_norms(groups):
    assert [group.name for group in groups] == ["0", "3", "6"]
    scaled = scaled_groups(groups, WEIGHTS)
    assert [group.name for group in scaled] == ["0", "6"]
    scales = unit_scales(scaled, WEIGHTS)
    assert scales["0"].tolist() == pytest.approx([0.5, 0.1, 0.0, 2.0])
    assert scales["6"].tolist() == [1.0] * 6


def test_a_norm_without_parameters_scales_nothing():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1))
    assert scaled_groups(find_groups(net, torch.zeros(1, 2)), net.state_dict()) == ()


def test_units_of_a_residual_stream_have_the_sum_of_their_scales():
    net = PreResNet18(num_classes=4)
    groups = scaled_groups(find_groups(net, torch.zeros(1, 3, 16, 16)), net.state_dict())
    several = [name for name, scales in unit_scales(groups, net.state_dict()).items() if float(scales[0]) > 1]
    assert several
    assert any(name not in several for name in (group.name for group in groups))


def test_held_units_are_those_that_masks_of_units_keep():
    kept = {"0": torch.tensor([True, False, True, True]), "6": torch.tensor([True] * 5 + [False])}
    scaled = scaled_groups(GROUPS, WEIGHTS)
    held = scaled_units(scaled, unit_masks(scaled, kept, WEIGHTS))
    assert {name: units.tolist() for name, units in held.items()} == {n: u.tolist() for n, u in kept.items()}


# LeNet-5's 6 and 16 channels (floors 3 and 8), and the 10 and 20 of its form for MNIST: floor(.45 n) + 1 are dropped
@pytest.mark.parametrize(
    ("size", "floor", "sizes"),
    [(6, 3, [3, 3]), (16, 8, [8, 8]), (10, 3, [5, 5]), (20, 8, [10, 10]), (64, 8, [35, 19, 10, 10])],
)
def test_channels_are_dropped_down_to_the_floor(size, floor, sizes):
    scales = {"conv": torch.rand(size, generator=torch.Generator().manual_seed(0))}
    kept = {"conv": torch.ones(size, dtype=torch.bool)}
    for left in sizes:
        kept = drop_smallest_scales(scales, kept, 0.45, [floor])
        assert int(kept["conv"].sum()) == left
        assert scales["conv"][kept["conv"]].min() > scales["conv"][~kept["conv"]].max()


def test_the_last_floor_holds_for_all_further_groups():
    scales = {name: torch.arange(1.0, 7) for name in "abc"}
    kept = {name: torch.ones(6, dtype=torch.bool) for name in "abc"}
    left = drop_smallest_scales(scales, kept, 0.45, [4, 3])
    assert [int(left[name].sum()) for name in "abc"] == [6, 3, 3]
