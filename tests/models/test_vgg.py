"""VGG-11's own initialisation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sparsefl.models import VGG11


def test_init_is_the_papers():
    torch.manual_seed(0)
    net = VGG11().net
    assert net.conv8.weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.02)
    assert net.fc.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not any(layer.bias.any() for layer in net if isinstance(layer, nn.Conv2d | nn.Linear))
    assert all(layer.weight.eq(1).all() for layer in net if isinstance(layer, nn.GroupNorm))


def test_layers_are_configuration_a_with_group_norm():
    net = VGG11().net
    assert [layer.out_channels for layer in net if isinstance(layer, nn.Conv2d)] == [64, 128, 256, 256, *[512] * 4]
    assert [layer.num_groups for layer in net if isinstance(layer, nn.GroupNorm)] == [32] * 8
    assert sum(isinstance(layer, nn.MaxPool2d) for layer in net) == 5
