from __future__ import annotations

import math

import pytest
import torch

from lightning_sparsefl.errors import MalformedPayload
from lightning_sparsefl.wire import bitmask, indices


@pytest.mark.parametrize("positions", [0, 1, 2, 7, 64, 65, 1000, 4096])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.02, 0.2, 0.5, 0.97, 1.0])
def test_positions_survive(positions, density):
    mask = torch.rand(positions, generator=torch.Generator().manual_seed(positions)) < density
    count = int(mask.sum())
    data = indices.encode(mask)
    assert len(data) == indices.size(positions, count)
    assert torch.equal(indices.decode(memoryview(data), positions, count), mask)


def test_every_subset_of_a_few_positions():
    for positions in range(9):
        for bits in range(2**positions):
            mask = torch.tensor([bool(bits >> place & 1) for place in range(positions)], dtype=torch.bool)
            count = int(mask.sum())
            data = indices.encode(mask)
            assert len(data) == indices.size(positions, count)
            assert torch.equal(indices.decode(memoryview(data), positions, count), mask)


@pytest.mark.parametrize("clump", [slice(0, 50), slice(950, 1000), slice(0, 1000, 20)])
def test_the_size_does_not_depend_on_where_they_are(clump):
    mask = torch.zeros(1000, dtype=torch.bool)
    mask[clump] = True
    assert len(indices.encode(mask)) == indices.size(1000, 50)


def test_close_to_the_best_possible_and_below_bits_when_few():
    positions = 2_359_296
    for count in (100, 10_000, 200_000):
        best = math.log2(math.e) * (
            math.lgamma(positions + 1) - math.lgamma(count + 1) - math.lgamma(positions - count + 1)
        )
        assert best < 8 * indices.size(positions, count) < best + 0.7 * count + 16
    assert indices.size(1000, 200) < bitmask.size(1000) < indices.size(1000, 400)


@pytest.mark.parametrize(
    ("data", "positions", "count", "words"),
    [
        (b"\x00\x00", 16, 2, "holds 0 positions; expected 2 of 16"),
        (b"\x00\x07", 16, 2, "holds 3 positions; expected 2 of 16"),
        (b"\x00\x03", 4, 2, "do not ascend; expected 2 ascending positions below 4"),
        (b"\xff", 3, 3, "padding bits that are set"),
    ],
)
def test_wrong_counts_are_refused(data, positions, count, words):
    with pytest.raises(MalformedPayload, match=words):
        indices.decode(memoryview(data.ljust(indices.size(positions, count), b"\x00")), positions, count)


def test_every_string_of_bytes_is_refused_or_is_a_mask():
    for positions, count in ((5, 1), (9, 2), (13, 3)):
        length = indices.size(positions, count)
        assert length <= 2
        for number in range(256**length):
            data = number.to_bytes(length, "little")
            try:
                mask = indices.decode(memoryview(data), positions, count)
            except MalformedPayload:
                continue
            assert indices.encode(mask) == data
