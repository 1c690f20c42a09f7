"""Batches of tensors: content, order, and what augmentation may do."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler

from lightning_sparsefl.data import CropFlip, Examples, FlipRotate, Normalize
from lightning_sparsefl.data.examples import order_of
from lightning_sparsefl.errors import InvalidOption


def numbered(n: int) -> Examples:
    return Examples(torch.arange(n).float()[:, None], torch.arange(n))


def test_loader_yields_every_example_with_its_label():
    batches = list(numbered(10).loader(4, shuffle=True))
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    assert all(torch.equal(inputs[:, 0].long(), labels) for inputs, labels in batches)
    assert torch.cat([labels for _, labels in batches]).sort().values.tolist() == list(range(10))


def test_order_comes_from_the_global_generator():
    def order(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return torch.cat([labels for _, labels in numbered(20).loader(6, shuffle=True)]).tolist()

    assert order(0) == order(0) != order(1)


@pytest.mark.parametrize(
    "make",
    [
        RandomSampler,
        SequentialSampler,
        lambda data: RandomSampler(data, replacement=True, num_samples=9),
        lambda data: RandomSampler(data, num_samples=30),
        lambda data: RandomSampler(data, generator=torch.Generator().manual_seed(5)),
    ],
)
def test_the_order_of_a_sampler_is_what_it_yields(make):
    orders = []
    for read in (order_of, lambda sampler: torch.tensor(list(sampler))):
        torch.manual_seed(7)
        orders.append((read(make(numbered(20))), torch.rand(3)))
    (ours, ours_after), (theirs, theirs_after) = orders
    assert torch.equal(ours, theirs)
    assert torch.equal(ours_after, theirs_after)


def test_one_example_is_a_row_of_its_batch():
    examples = Examples(torch.rand(5, 3, 4, 4), torch.arange(5), Normalize((0.5,) * 3, (0.2,) * 3))
    inputs, labels = examples.__getitems__([3, 1])
    assert torch.equal(examples[3][0], inputs[0])
    assert int(examples[1][1]) == int(labels[1]) == 1


def test_fetching_does_not_change_what_is_stored():
    stored = torch.rand(5, 1, 4, 4)
    before = stored.clone()
    examples = Examples(stored, torch.arange(5), CropFlip(2, then=Normalize((0.5,), (0.2,))))
    list(examples.loader(5))
    examples[0]
    assert torch.equal(stored, before)


def test_workers_see_the_same_examples():
    labels = [label for _, batch in numbered(6).loader(2, num_workers=1) for label in batch.tolist()]
    assert labels == list(range(6))


def test_normalize_each_channel():
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.5, 0.6])
    expected = (images.double() / 255 - mean[:, None, None]) / std[:, None, None]
    out = Normalize(mean.tolist(), std.tolist())(images)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_crop_and_flip_is_one_of_the_crops_of_the_padded_image():
    torch.manual_seed(0)
    images = torch.randint(1, 256, (40, 3, 6, 5), dtype=torch.uint8)
    out = CropFlip(padding=2)(images)
    padded = torch.nn.functional.pad(images, [2] * 4)
    flips, corners = set(), set()
    for image, around in zip(out, padded, strict=True):
        windows = {(top, left): around[:, top : top + 6, left : left + 5] for top in range(5) for left in range(5)}
        found = [(corner, False) for corner, window in windows.items() if torch.equal(image, window)]
        found += [(corner, True) for corner, window in windows.items() if torch.equal(image, window.flip(2))]
        assert len(found) == 1
        corners.add(found[0][0])
        flips.add(found[0][1])
    assert flips == {False, True}
    assert {top for top, _ in corners} == {left for _, left in corners} == set(range(5))


def test_crop_without_padding_only_flips():
    torch.manual_seed(0)
    images = torch.rand(20, 1, 4, 4)
    out = CropFlip(padding=0)(images)
    assert all(torch.equal(o, i) or torch.equal(o, i.flip(2)) for o, i in zip(out, images, strict=True))


@pytest.mark.parametrize("padding", [-1, 1.5, True, None])
def test_a_padding_that_is_no_number_of_pixels_is_refused(padding):
    with pytest.raises(InvalidOption, match=f"`CropFlip.padding` is {padding}; expected a whole number >= 0"):
        CropFlip(padding)


@pytest.mark.parametrize("degrees", [math.nan, math.inf, "30"])
def test_an_angle_that_is_not_finite_is_refused(degrees):
    with pytest.raises(InvalidOption, match=f"`FlipRotate.degrees` is {degrees!r}; expected a finite number"):
        FlipRotate(degrees)


def test_augmentation_repeats_with_the_global_generator():
    images = torch.rand(8, 3, 8, 8)
    torch.manual_seed(3)
    first = CropFlip(4)(images)
    torch.manual_seed(3)
    assert torch.equal(CropFlip(4)(images), first)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mean": (math.nan,), "std": (0.2,)}, r"`Normalize.mean` is \(nan,\); expected finite numbers"),
        ({"mean": (0.5,), "std": (0.2, 0.0)}, r"`Normalize.std` is \(0.2, 0.0\); expected finite numbers above 0"),
        ({"mean": (0.5,), "std": (0.2,), "high": -1.0}, r"`Normalize.high` is -1.0; expected a finite number above 0"),
    ],
)
def test_a_normalisation_by_no_deviation_is_refused(options, words):
    with pytest.raises(InvalidOption, match=words):
        Normalize(**options)
