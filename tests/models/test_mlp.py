"""The perceptron's hidden layers."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import MLP


@pytest.mark.parametrize(
    ("hidden", "widths"), [((), [(12, 5)]), ((8,), [(12, 8), (8, 5)]), ((8, 4), [(12, 8), (8, 4), (4, 5)])]
)
def test_hidden_layers(hidden, widths):
    net = MLP(num_classes=5, sample_shape=(3, 2, 2), hidden=hidden).net
    assert [(layer.in_features, layer.out_features) for layer in net if isinstance(layer, nn.Linear)] == widths
    assert sum(isinstance(layer, nn.ReLU) for layer in net) == len(hidden)


def test_refuses_empty_layers():
    with pytest.raises(InvalidOption, match=r"`model.hidden` is .*; expected widths of at least 1"):
        MLP(hidden=(8, 0))
