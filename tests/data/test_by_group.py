"""Natural groups as clients: one group each, in sorted order, and what becomes of small groups."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.data import ByGroup, FederatedDigits
from lightning_sparsefl.errors import InvalidOption

GROUPS = torch.tensor([2, 0, 1, 0, 5, 2, 0, 7])


def lists(partition: ByGroup, num_clients: int, seed: int = 0) -> list[list[int]]:
    return [own.tolist() for own in partition.split(GROUPS, num_clients, seed)]


def test_each_client_is_a_group_in_sorted_order():
    assert ByGroup("x").num_groups(GROUPS) == 5
    assert lists(ByGroup("x"), 5) == [[1, 3, 6], [2], [0, 5], [4], [7]]


def test_small_groups_are_left_out_or_become_the_last_client():
    assert lists(ByGroup("x", min_examples=2), 2) == [[1, 3, 6], [0, 5]]
    assert lists(ByGroup("x", min_examples=2, small_groups="merge"), 3) == [[1, 3, 6], [0, 5], [2, 4, 7]]
    # 1, 5 and 7 have three examples together, which is still small
    assert ByGroup("x", min_examples=4, small_groups="merge").num_groups(GROUPS) == 1
    assert lists(ByGroup("x", min_examples=4, small_groups="merge"), 1) == [list(range(8))]
    with pytest.raises(InvalidOption, match=r"`data.partition.min_examples` is 9; expected at most 3, the size of the"):
        ByGroup("x", min_examples=9, small_groups="merge").num_groups(GROUPS)


@pytest.mark.parametrize("num_clients", [1, 3, 20])
@pytest.mark.parametrize("min_examples", [1, 30])
def test_a_client_is_a_whole_group(num_clients: int, min_examples: int):
    groups = torch.randint(40, (2000,), generator=torch.Generator().manual_seed(0))
    own = ByGroup("x", min_examples=min_examples).split(groups, num_clients, seed=3)
    for indices in own:
        (group,) = groups[indices].unique()
        assert indices.tolist() == (groups == group).nonzero().flatten().tolist()
    assert len({int(groups[indices[0]]) for indices in own}) == num_clients


def test_fewer_clients_are_drawn_by_the_seed():
    groups = torch.arange(100)
    drawn = [torch.cat(ByGroup("x").split(groups, 5, seed)).tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_refuses_more_clients_than_groups():
    with pytest.raises(InvalidOption, match=r"`data.num_clients` is 6; expected a number from 1 to 5, the number"):
        lists(ByGroup("x"), 6)
    with pytest.raises(InvalidOption, match=r"from 1 to 2, the number of groups with at least 2 examples"):
        lists(ByGroup("x", min_examples=2), 3)


def test_refuses_bad_options():
    with pytest.raises(InvalidOption, match=r"`data.partition.min_examples` is 0; expected a whole number >= 1"):
        ByGroup("x", min_examples=0)
    with pytest.raises(InvalidOption, match=r"small_groups` is 'keep'; expected one of 'drop', 'merge'"):
        ByGroup("x", small_groups="keep")


def test_refuses_data_without_columns():
    with pytest.raises(InvalidOption, match=r"is ByGroup\('writer'.*expected another partition, since FederatedDigits"):
        FederatedDigits(partition=ByGroup("writer"))


def test_its_text_has_no_values():
    assert repr(ByGroup(torch.zeros(3))) == "ByGroup(<Tensor>, min_examples=1, small_groups='drop')"
