"""ResNet-18 against the definition."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl.models import ResNet18


def test_a_block_is_its_definition():
    torch.manual_seed(0)
    block = ResNet18().net.stage2[0]
    for norm in (block.norm1, block.norm2, block.shortcut.norm):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    x = torch.randn(2, 64, 8, 8)

    def normed(y, norm):
        return F.group_norm(y, 32, norm.weight, norm.bias)

    hidden = normed(F.conv2d(x, block.conv1.weight, stride=2, padding=1), block.norm1).relu()
    residual = normed(F.conv2d(hidden, block.conv2.weight, padding=1), block.norm2)
    shortcut = normed(F.conv2d(x, block.shortcut.conv.weight, stride=2), block.shortcut.norm)
    torch.testing.assert_close(block(x), (residual + shortcut).relu())


def test_three_shortcuts_have_weights():
    names = [name for name, _ in ResNet18().named_parameters() if "shortcut.conv" in name]
    assert names == [f"net.stage{stage}.0.shortcut.conv.weight" for stage in (2, 3, 4)]


def test_no_convolution_has_a_bias():
    assert all(layer.bias is None for layer in ResNet18().modules() if isinstance(layer, nn.Conv2d))


def test_batch_norm_has_as_many_parameters_and_keeps_statistics():
    model = ResNet18(norm="batch")
    assert sum(p.numel() for p in model.parameters()) == 11_220_132
    assert sum(b.numel() for b in model.net.buffers() if b.is_floating_point()) == 9_600
