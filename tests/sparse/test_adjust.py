from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.sparse.adjust import adjusted, exchanged, reallocated
from lightning_sparsefl.sparse.masks import counts

MASK = torch.tensor([[True, True, True, True, False, False]])


def test_no_more_weights_are_exchanged_than_there_are_places():
    assert exchanged({"w": MASK}, 0.5) == {"w": 2}
    assert exchanged({"w": MASK}, 0.3) == {"w": 1}  # rounded down
    assert exchanged({"w": MASK}, 1.0) == {"w": 2}
    assert exchanged({"w": MASK}, 0.0) == {"w": 0}


def test_the_smallest_go_and_the_largest_growth_comes():
    scores = {"w": torch.tensor([[4.0, 1.0, 3.0, 2.0, 9.0, 9.0]])}
    growth = {"w": torch.tensor([[9.0, 0.0, 9.0, 0.0, 1.0, 2.0]])}
    kept, masks = adjusted(scores, growth, {"w": MASK}, {"w": 2})
    assert kept["w"].tolist() == [[True, False, True, False, False, False]]
    assert masks["w"].tolist() == [[True, False, True, False, True, True]]


def test_what_was_dropped_may_return_where_it_has_the_largest_growth():
    scores, growth = {"w": torch.tensor([[4.0, 1.0, 3.0, 2.0, 0.0, 0.0]])}, {"w": torch.zeros(1, 6)}
    _, masks = adjusted(scores, growth, {"w": MASK}, {"w": 1})
    assert masks["w"].tolist() == [[True, True, True, True, False, False]]  # of equal growth the lower index


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_layer_that_is_not_finite_counts_as_one_of_zeros(value):
    def moved(first):
        weights = {"a": torch.tensor([first, first, 0.0, 0.0, 0.0]), "b": torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])}
        masks = {name: torch.tensor([True, True, False, False, False]) for name in weights}
        return counts(reallocated(weights, masks, 0.5, {name: torch.arange(5.0) for name in masks}))

    assert moved(value) == moved(0.0) == {"a": 1, "b": 3}
