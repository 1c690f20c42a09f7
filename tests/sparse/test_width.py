from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.units import find_groups
from lightning_sparsefl.sparse.width import block_units, make_norms_static, prefix_units

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
    with pytest.raises(InvalidOption, match="`2` has 7 units, expected at least one for each of 8 networks"):
        block_units(GROUPS, 0, 8)


def test_static_norms_use_the_batch_in_both_modes():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.GroupNorm(1, 3), nn.BatchNorm1d(3, affine=False))
    names = [name for name, _ in net.named_parameters()]
    make_norms_static(net)
    make_norms_static(net)  # a second time changes nothing
    assert [name for name, _ in net.named_parameters()] == names == list(net.state_dict())
    x = torch.randn(5, 2)
    assert torch.equal(net.train()(x), net.eval()(x))
