from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.errors import MalformedPayload
from lightning_sparsefl.wire import bitmask


@pytest.mark.parametrize("positions", [0, 1, 7, 8, 9, 64, 1000])
def test_bits_survive(positions):
    mask = torch.rand(positions, generator=torch.Generator().manual_seed(positions)) < 0.5
    data = bitmask.encode(mask)
    assert len(data) == bitmask.size(positions)
    assert torch.equal(bitmask.decode(memoryview(data), positions), mask)


def test_bits_past_the_end_are_refused():
    with pytest.raises(MalformedPayload, match="A mask of 3 positions has padding bits that are set; expected zeros"):
        bitmask.decode(memoryview(b"\x0d"), 3)
