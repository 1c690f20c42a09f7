"""The quickstart's network on the quickstart's data."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lightning_sparsefl.data import FederatedDigits
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import SmallCNN


def test_learns_the_digits_in_three_epochs():
    torch.manual_seed(0)
    data = FederatedDigits(num_clients=1, batch_size=16, seed=0)
    model = SmallCNN(data.num_classes, data.sample_shape)
    optimizer = model.configure_optimizers()
    for _ in range(3):
        for inputs, labels in data.train_dataloader():
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    right = sum(int((model(inputs).argmax(1) == labels).sum()) for inputs, labels in data.test_dataloader())
    assert right / 355 > 0.95


@pytest.mark.parametrize("width", [0, 6, -4])
def test_refuses_widths_that_groups_do_not_divide(width):
    with pytest.raises(InvalidOption, match=r"model\.width"):
        SmallCNN(width=width)
