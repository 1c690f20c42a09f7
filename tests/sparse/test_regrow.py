from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.sparse.prune import prune, random_masks
from lightning_sparsefl.sparse.regrow import grow_share, growth_counts, regrow


def test_the_largest_scores_outside_the_mask_come_back():
    masks = {"w": torch.tensor([True, False, False, False]), "v": torch.tensor([False, True])}
    grown = regrow({"w": torch.tensor([9.0, 1.0, 5.0, 5.0]), "v": torch.ones(2)}, masks, {"w": 2})
    assert grown["w"].tolist() == [True, False, True, False]
    assert grown["v"] is masks["v"]
    assert masks["w"].tolist() == [True, False, False, False]


def test_what_was_dropped_may_return():
    masks = {"w": torch.tensor([True, True, False])}
    pruned = prune({"w": torch.tensor([1.0, 2.0, 0.0])}, masks, 0.5)
    assert regrow({"w": torch.tensor([3.0, 0.0, 1.0])}, pruned, {"w": 2})["w"].tolist() == [True, True, False]


def test_what_is_barred_does_not_return():
    masks, barred = {"w": torch.tensor([True, False, False, False])}, {"w": torch.tensor([True, True, False, False])}
    grown = regrow({"w": torch.tensor([0.0, 9.0, 1.0, 2.0])}, masks, {"w": 2}, barred)
    assert grown["w"].tolist() == [True, False, False, True]
    with pytest.raises(InvalidOption, match=r"`counts\['w'\]=4`: expected 1 \(kept already\) to 3"):
        regrow({"w": torch.ones(4)}, masks, {"w": 4}, barred)


def test_drop_and_grow_keep_the_counts():
    generator = torch.Generator().manual_seed(0)
    wanted = {"a": 40, "b": 5, "full": 6}
    shapes = {"a": (10, 10), "b": (5, 2), "full": (6,)}
    masks = random_masks(shapes, wanted, generator)
    for _ in range(5):
        scores = {name: torch.rand(mask.shape, generator=generator) for name, mask in masks.items()}
        moved = regrow(scores, prune(scores, masks, 0.3), wanted)
        assert counts(moved) == wanted
        masks = moved
    assert bool(masks["full"].all())


def test_no_scores_needed_for_a_full_or_unchanged_count():
    masks = {"w": torch.tensor([True, False])}
    scores = {"w": torch.full((2,), float("nan"))}
    assert regrow(scores, masks, {"w": 1})["w"].tolist() == [True, False]
    assert regrow(scores, masks, {"w": 2})["w"].tolist() == [True, True]


@pytest.mark.parametrize("count", [0, 3])
def test_a_count_that_cannot_be_reached_is_refused(count):
    masks = {"w": torch.tensor([True, False])}
    with pytest.raises(InvalidOption, match=rf"`counts\['w'\]={count}`: expected 1 \(kept already\) to 2"):
        regrow({"w": torch.ones(2)}, masks, {"w": count})


def test_a_mask_needs_a_score():
    with pytest.raises(IncompatibleMasks, match="`w` has a mask but its score is missing"):
        regrow({}, {"w": torch.tensor([True, False])}, {"w": 2})


def test_a_mask_at_the_bound_still_grows_and_one_above_it_does_not():
    scores = {"w": torch.arange(4.0)}
    at, above = torch.tensor([True, True, False, False]), torch.tensor([True, True, True, False])
    assert grow_share(scores, {"w": at}, share=0.5, bound=0.5)["w"].tolist() == [True, True, False, True]
    assert grow_share(scores, {"w": above}, share=1.0, bound=0.5)["w"].equal(above)


@pytest.mark.parametrize(
    ("total", "worth", "room", "expected"),
    [
        (0, [1.0, 2.0], [3, 3], [0, 0]),
        (6, [1.0, 2.0], [9, 9], [2, 4]),
        (7, [1.0, 2.0, 3.0], [9, 9, 9], [1, 2, 4]),  # 1.17, 2.33, 3.5: the largest remainder first
        (2, [1.0, 1.0, 1.0], [9, 9, 9], [1, 1, 0]),  # of equal remainders the first
        (9, [8.0, 1.0, 1.0], [2, 9, 9], [2, 4, 3]),  # 7.2 do not fit; 7 are left for two equal ones
        (9, [8.0, 2.0, 1.0], [2, 3, 9], [2, 3, 4]),  # then 4.67 do not fit either
        (4, [1.0, 0.0], [2, 9], [2, 2]),  # nothing else has room
        (4, [0.0, 0.0], [9, 9], [2, 2]),
        (12, [5.0, 0.0, 1.0], [4, 0, 8], [4, 0, 8]),
    ],
)
def test_growth_is_in_proportion_as_far_as_there_is_room(total, worth, room, expected):
    names = ["a", "b", "c"][: len(worth)]
    counts = growth_counts(total, dict(zip(names, worth, strict=True)), dict(zip(names, room, strict=True)))
    assert list(counts) == names
    assert list(counts.values()) == expected


def test_growth_without_room_is_refused():
    with pytest.raises(InvalidOption, match=r"`total=6`: expected at most 5"):
        growth_counts(6, {"a": 1.0, "b": 1.0}, {"a": 2, "b": 3, "c": 9})
