from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.sparse.allocate import best_ratio, reallocate

VALUES, TIMES = torch.tensor([0.9, 0.5, 0.2, 0.05, 0.01]), torch.tensor([1.0, 1.0, 2.0, 0.1, 1.0])


def test_items_are_taken_while_they_are_above_the_ratio():
    taken = best_ratio(VALUES, TIMES, 1.0, 10.0)
    assert taken.tolist() == [True, True, False, True, False]
    ratio = (1 + float(VALUES[taken].sum())) / (10 + float(TIMES[taken].sum()))
    assert ratio == pytest.approx(0.2024793, abs=6e-8)


def test_costs_are_added_in_float64():
    """In float32 the cost before the last item would be 2**24 + 1 - 2**24 = 0."""
    assert best_ratio(torch.tensor([2.0**24, 1.5]), torch.tensor([2.0**24, 1.0]), 0.0, 0.0).tolist() == [False, True]


@pytest.mark.parametrize("seed", range(20))
def test_the_result_is_that_of_the_loop(seed):
    rng = torch.Generator().manual_seed(seed)
    values, costs = torch.rand(30, generator=rng).round(decimals=1), torch.rand(30, generator=rng) + 0.1
    value, cost = 0.5, 4.0
    left, expected = set(range(30)), set()
    while left:
        best = max(left, key=lambda i: (float(values[i] / costs[i]), -i))
        if not float(values[best]) / float(costs[best]) > value / cost:
            break
        value, cost = value + float(values[best]), cost + float(costs[best])
        expected.add(best)
        left.remove(best)
    assert set(best_ratio(values, costs, 0.5, 4.0).nonzero().flatten().tolist()) == expected


def test_equal_times_take_a_prefix_of_the_values():
    values = torch.tensor([0.1, 0.8, 0.4, 0.7])
    assert best_ratio(values, torch.ones(4), 0.3, 1.0).tolist() == [False, True, False, True]  # 1.8 / 3 is above .4


@pytest.mark.parametrize(("cost", "taken"), [(0.0, [True, False]), (1.0, [False, False])])
def test_without_a_base_the_best_item_is_taken(cost, taken):
    assert best_ratio(torch.tensor([0.5, 0.1]), torch.ones(2), 0.9 * cost, cost).tolist() == taken


def test_no_item_is_no_mask():
    assert best_ratio(torch.empty(0), torch.empty(0), 1.0, 1.0).tolist() == []


def test_reallocation_keeps_large_weights_whatever_they_are_worth():
    weights = {"a": torch.tensor([3.0, -1.0, 2.0, 0.0]), "b": torch.tensor([[1.0, 0.5]])}
    masks = {"a": torch.tensor([True, True, True, False]), "b": torch.tensor([[True, True]])}
    values = {"a": torch.tensor([0.0, 9.0, 0.0, 5.0]), "b": torch.tensor([[0.0, 0.1]])}
    seconds = {"a": 1.0, "b": 2.0}
    # sure: a 3 and 2, b 1, together 0 in 4 s; 9 and 5 per second are taken, then .05 is below 14 / 6
    new = reallocate(weights, masks, values, seconds, 0.5)
    assert {n: m.tolist() for n, m in new.items()} == {"a": [True, True, True, True], "b": [[True, False]]}
    new = reallocate(weights, masks, values, seconds, 0.5, base_value=30.0)  # 30 / 4, then 39 / 5 is above 5
    assert new["a"].tolist() == [True, True, True, False]
    new = reallocate(weights, masks, values, seconds, 0.5, base_value=30.0, base_seconds=100.0)
    assert new["a"].all()


def test_a_fraction_of_0_drops_no_weight():
    masks = {"a": torch.tensor([True, True, False])}
    new = reallocate({"a": torch.zeros(3)}, masks, {"a": torch.tensor([0.0, 1.0, 0.4])}, {"a": 1.0}, 0.0)
    assert new["a"].tolist() == [True, True, False]
