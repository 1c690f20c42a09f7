from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.sparse.masks import counts, dense_like
from lightning_sparsefl.sparse.prune import (
    keep_largest,
    prune,
    prune_to,
    random_masks,
    scatter,
    shrink,
    shrink_globally,
)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 6])
def test_ties_go_to_the_lower_index(count):
    keep = keep_largest(torch.tensor([[1.0, 2.0, 2.0], [2.0, 0.0, 2.0]]), count)
    order = [1, 2, 3, 5, 0, 4]
    assert keep.reshape(-1).nonzero().reshape(-1).tolist() == sorted(order[:count])
    assert keep.shape == (2, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_any_type_of_score(dtype):
    assert keep_largest(torch.tensor([3, 1, 2, 3], dtype=dtype), 3).tolist() == [True, False, True, True]


def test_infinite_and_missing_scores_are_ranked_too():
    score = torch.tensor([float("nan"), float("-inf"), 0.0, float("inf"), float("inf")])
    assert keep_largest(score, 1).tolist() == [False, False, False, True, False]
    assert keep_largest(score, 3).tolist() == [False, False, True, True, True]
    assert keep_largest(score, 4).tolist() == [True, False, True, True, True]


def test_no_dimension_and_no_element():
    assert keep_largest(torch.tensor(3.0), 1).tolist() is True
    assert keep_largest(torch.empty(0), 0).tolist() == []


@pytest.mark.parametrize("count", [-1, 3])
def test_a_count_outside_the_tensor_is_refused(count):
    with pytest.raises(InvalidOption, match=f"`count={count}`: expected 0 to 2"):
        keep_largest(torch.ones(2), count)


def test_prune_drops_the_rounded_up_share_of_each_tensor():
    scores = {"a": torch.arange(10.0), "b": torch.tensor([1.0, 1.0, 1.0]), "unmasked": torch.ones(4)}
    masks = {"a": torch.ones(10, dtype=torch.bool), "b": torch.tensor([True, True, False])}
    pruned = prune(scores, masks, 0.1)
    assert pruned["a"].tolist() == [False] + [True] * 9
    assert pruned["b"].tolist() == [True, False, False]
    assert set(pruned) == {"a", "b"}
    assert counts(masks) == {"a": 10, "b": 2}


def test_pruned_masks_are_subsets_even_if_scores_are_not_finite():
    scores = {"a": torch.full((8,), float("-inf"))}
    masks = {"a": torch.tensor([0, 1, 0, 1, 1, 0, 1, 0], dtype=torch.bool)}
    pruned = prune(scores, masks, 0.5)["a"]
    assert pruned.nonzero().reshape(-1).tolist() == [1, 3]


@pytest.mark.parametrize(("fraction", "left"), [(0.0, 5), (1.0, 0)])
def test_prune_nothing_and_everything(fraction, left):
    weights = {"w": torch.randn(5, generator=torch.Generator().manual_seed(0))}
    assert counts(prune(weights, dense_like(weights), fraction)) == {"w": left}


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_outside_the_range_is_refused(fraction):
    with pytest.raises(InvalidOption, match=rf"`fraction={fraction}`: expected a number in \[0, 1\]"):
        prune({}, {}, fraction)


def test_a_mask_needs_a_score_of_its_shape():
    masks = {"w": torch.ones(2, dtype=torch.bool)}
    with pytest.raises(IncompatibleMasks, match="`w` has a mask but its score is missing"):
        prune({}, masks, 0.5)
    with pytest.raises(IncompatibleMasks, match=r"score of `w` has shape \(1, 2\), expected \(2,\)"):
        prune({"w": torch.ones(1, 2)}, masks, 0.5)
    with pytest.raises(IncompatibleMasks, match="`w` has a mask but its score is missing"):
        prune_to({}, {"w": 1})


def test_prune_to_keeps_the_counts():
    scores = {"a": torch.tensor([[0.1, 0.9], [0.5, 0.7]]), "other": torch.ones(3)}
    assert prune_to(scores, {"a": 2})["a"].tolist() == [[False, True], [False, True]]
    assert set(prune_to(scores, {"a": 2})) == {"a"}


def test_random_masks_keep_the_counts_and_repeat():
    shapes, counts_ = {"a": (20, 30), "b": torch.zeros(7)}, {"a": 123, "b": 7}
    first = random_masks(shapes, counts_, torch.Generator().manual_seed(5))
    again = random_masks(shapes, counts_, torch.Generator().manual_seed(5))
    other = random_masks(shapes, counts_, torch.Generator().manual_seed(6))
    assert counts(first) == counts_
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["a"], other["a"])
    assert not random_masks({"w": (3,)}, {"w": 0})["w"].any()
    with pytest.raises(InvalidOption, match=r"`counts\['b'\]=8`: expected 0 to 7"):
        random_masks(shapes, {"b": 8})


def test_random_masks_are_spread_evenly():
    generator = torch.Generator().manual_seed(0)
    hits = sum(random_masks({"w": (10,)}, {"w": 3}, generator)["w"].int() for _ in range(2000))
    assert (hits.float() / 2000 - 0.3).abs().max() < 0.05


def test_scatter_writes_in_order():
    mask = torch.tensor([[True, False], [True, True]])
    assert scatter(mask, torch.tensor([False, True, True])).tolist() == [[False, False], [True, True]]


def test_what_was_dropped_does_not_return_when_shrinking():
    scores = {"a": torch.tensor([5.0, 1.0, 9.0]), "b": torch.tensor([2.0, 8.0])}
    masks = {"a": torch.tensor([True, True, False]), "b": torch.tensor([True, True])}
    assert shrink(scores, masks, {"a": 1})["a"].tolist() == [True, False, False]
    assert shrink(scores, masks, {"a": 1})["b"] is masks["b"]
    left = shrink_globally(scores, masks, 2)
    assert (left["a"].tolist(), left["b"].tolist()) == ([True, False, False], [False, True])


def test_shrinking_globally_may_empty_a_mask_and_ties_go_to_the_earlier():
    scores = {"a": torch.zeros(2, 2), "b": torch.zeros(3)}
    left = shrink_globally(scores, dense_like(scores), 4)
    assert counts(left) == {"a": 4, "b": 0}
    assert shrink_globally({}, {}, 0) == {}


def test_the_first_of_each_mask_stay_whatever_the_others_score():
    scores = {"a": torch.tensor([torch.inf, torch.inf]), "b": torch.tensor([1.0, 2.0])}
    left = shrink_globally(scores, dense_like(scores), 2, least=1)
    assert (left["a"].tolist(), left["b"].tolist()) == ([True, False], [False, True])
    for count in (1, 5):
        with pytest.raises(InvalidOption, match=rf"`count={count}`: expected 2 \(1 of each layer\) to 4\."):
            shrink_globally(scores, dense_like(scores), count, least=1)


@pytest.mark.parametrize("count", [-1, 4])
def test_shrinking_to_more_than_there_is_is_refused(count):
    scores, masks = {"a": torch.ones(4)}, {"a": torch.tensor([True, True, True, False])}
    with pytest.raises(InvalidOption, match="expected 0 to 3"):
        shrink(scores, masks, {"a": count})
    with pytest.raises(InvalidOption, match="expected 0 to 3"):
        shrink_globally(scores, masks, count)


def test_a_mask_without_a_score_cannot_shrink():
    with pytest.raises(IncompatibleMasks, match="`a` has a mask but its score is missing"):
        shrink_globally({}, {"a": torch.ones(2, dtype=torch.bool)}, 1)
