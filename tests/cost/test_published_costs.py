"""The cost columns of FedSpa's tables (T. Huang et al., "Achieving personalized federated learning with sparse
local models", arXiv:2201.11380), to the printed digits: every parameter is in the pool, mask bits are free, 10
clients a round.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from lightning_sparsefl.cost import count_layers, forward_flops
from lightning_sparsefl.sparse.density import erk, kept_counts, uniform
from lightning_sparsefl.sparse.masks import kept
from lightning_sparsefl.sparse.prune import random_masks

CLIENTS, EPOCHS, BATCH = 10, 5, 128


def vgg11():
    layers, width = [], 3
    for out in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if out:
            layers += [nn.Conv2d(width, out, 3, padding=1), nn.GroupNorm(32, out), nn.ReLU()]
            width = out
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


class Block(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.GroupNorm(32, out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.GroupNorm(32, out)
        self.shortcut = nn.Identity()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.GroupNorm(32, out))

    def forward(self, x):
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


def resnet18():
    layers, width = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()], 64
    for out, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(Block(width, out, stride))
        width = out
    return nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(512, 100))


def lenet5():
    convolutions = [nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 26))


NETS = {vgg11: ((3, 32, 32), 500, 1000), resnet18: ((3, 32, 32), 500, 1000), lenet5: ((1, 28, 28), 1248, 400)}
"""Shape of a sample, training samples of a client, rounds."""


@functools.cache
def counted(net):
    module = net()
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    return shapes, count_layers(module, torch.zeros(1, *NETS[net][0]))


def cost(net, density, spread=erk):
    """Gigabytes and 1e14 FLOPs of the whole run, by the paper's formulas."""
    (shapes, layers), (_, samples, rounds) = counted(net), NETS[net]
    masks = random_masks(shapes, kept_counts(shapes, spread(shapes, density)), torch.Generator().manual_seed(0))
    client = EPOCHS * samples * 3 * forward_flops(layers, masks)
    client += BATCH * 3 * forward_flops(layers) if density < 1 else 0
    return kept(masks) * 4 * 2 * CLIENTS * rounds / 1e9, client * CLIENTS * rounds / 1e14


@pytest.mark.parametrize(("net", "parameters"), [(vgg11, 9_231_114), (resnet18, 11_220_132), (lenet5, 439_096)])
def test_parameters(net, parameters):
    assert sum(value.numel() for value in net().parameters()) == parameters


@pytest.mark.parametrize(
    ("net", "density", "gigabytes", "flops"),
    [
        (vgg11, 1.0, "738.5", "229.3"),
        (vgg11, 0.5, "369.2", "172.9"),
        (resnet18, 1.0, "897.6", "833.2"),
        (resnet18, 0.5, "448.8", "705.0"),
        (lenet5, 1.0, "14.1", "3.5"),
        (lenet5, 0.5, "7.0", "2.0"),
    ],
)
def test_table_1(net, density, gigabytes, flops):
    found = cost(net, density)
    assert (f"{found[0]:.1f}", f"{found[1]:.1f}") == (gigabytes, flops)


@pytest.mark.parametrize(
    ("density", "gigabytes", "flops"),
    [(0.8, "718.1", "8.2"), (0.6, "538.6", "7.6"), (0.4, "359.0", "6.5"), (0.2, "179.5", "4.6")],
)
def test_table_3(density, gigabytes, flops):
    found = cost(resnet18, density)
    assert (f"{found[0]:.1f}", f"{found[1] / 100:.1f}") == (gigabytes, flops)


def test_table_4_uniform():
    found = cost(resnet18, 0.5, uniform)
    assert (f"{found[0]:.1f}", f"{found[1] / 100:.1f}") == ("448.8", "4.6")


def test_layer_densities_at_one_half():
    shapes, _ = counted(vgg11)
    densities = [value for name, value in erk(shapes, 0.5).items() if len(shapes[name]) > 1]
    assert [round(value, 3) for value in densities] == [1, 1, 1, 0.848, 0.634, 0.422, 0.422, 0.422, 1]
