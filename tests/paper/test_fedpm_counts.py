"""Scores and bits of the network of FedPM's table for CIFAR-10 (arXiv:2209.15328, Conv6)."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn

from lightning_sparsefl import FedPM
from lightning_sparsefl.cost import count_layers
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.types import ClientView, CostFacts


class Conv6(L.LightningModule):
    """Six convolutions, pooled by twos, and three linear layers."""

    def __init__(self):
        super().__init__()
        layers, inputs = [], 3
        for width in (64, 128, 256):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
            layers, inputs = [*layers, nn.ReLU(), nn.MaxPool2d(2)], width
        head = (nn.Linear(4096, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        self.net = nn.Sequential(*layers, nn.Flatten(), *head)


def test_conv6_sends_a_bit_for_each_of_2262602_scores():
    method, module = FedPM(), Conv6()
    method.adapt(module)
    view = ClientView(id=0, num_examples=1, capacity=1.0, round=0, max_rounds=200, seed=0)
    weights = {name: value.detach() for name, value in module.named_parameters()}
    message = method.download(method.init(weights, Fleet([view], frozenset(), torch.device("cpu"))), view)
    assert sum(value.numel() for value in message.extra["scores"].values()) == 2_262_602
    assert message.weights == {}
    layers = count_layers(module.net, torch.zeros(1, 3, 32, 32))
    costs = method.costs(CostFacts(view=view, message=message, layers=layers, epochs=1, samples=1, batch_size=1))
    assert costs.bytes_up_paper == 282_826
    assert costs.bytes_down_paper == 4 * 2_262_602
    assert costs.flops_paper == 3 * sum(2 * layer.macs + layer.bias for layer in layers)
