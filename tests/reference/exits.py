"""The harness' module with early exits, and what the NumPy twins compute of it."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from reference.harness import CLASSES, FEATURES, Net
from reference.numpy_network import probabilities

BLOCKS = [("first", "one"), ("second", "two"), ("third", "three")]
"""Hidden layer and exit of each block."""
SIDES = [8, 7, 6]
"""Number of outputs of each hidden layer."""


class Exits(Net):
    """The first `count` hidden layers with an exit after each: means of losses train, and means of logits predict."""

    count = len(BLOCKS)

    def __init__(self, lr, momentum=0.0, weight_decay=0.0, clip=None, norm=False):
        super().__init__(lr, momentum, weight_decay, clip)
        del self.net
        self.exits, self.depth = dict(BLOCKS[: self.count]), self.count
        for (layer, exit), reads, makes in zip(BLOCKS[: self.count], [FEATURES, *SIDES], SIDES, strict=False):
            self.add_module(layer, nn.Linear(reads, makes))
            self.add_module(exit, nn.Linear(makes, CLASSES))

    def logits(self, x):
        found = []
        for layer, exit in list(self.exits.items())[: self.depth]:
            x = self.get_submodule(layer)(x).relu()
            found.append(self.get_submodule(exit)(x))
        return found

    def forward(self, x):
        return torch.stack(self.logits(x)).mean(0)

    def training_step(self, batch):
        x, y, samples = batch
        self.trained_on.append((self.training, samples.numpy().copy()))
        return torch.stack([nn.functional.cross_entropy(logits, y) for logits in self.logits(x)]).mean()


class TwoExits(Exits):
    """The module with two blocks."""

    count = 2


def forward(weights, x, depth, width=1.0):
    """The input of each hidden layer, its output, and the logits of each exit; a sum is divided by the width."""
    inputs, hidden, logits = [], [], []
    for layer, exit in BLOCKS[:depth]:
        inputs.append(x)
        x = np.maximum((x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]) / width, 0.0)
        hidden.append(x)
        logits.append(x @ weights[f"{exit}.weight"].T + weights[f"{exit}.bias"])
    return inputs, hidden, logits


def backward(weights, inputs, hidden, by_logits, width=1.0):
    """The slopes by all weights, from those by the exits' logits."""
    slopes, above = {}, 0.0
    for at in reversed(range(len(by_logits))):
        layer, exit = BLOCKS[at]
        slopes[f"{exit}.weight"], slopes[f"{exit}.bias"] = by_logits[at].T @ hidden[at], by_logits[at].sum(axis=0)
        delta = (by_logits[at] @ weights[f"{exit}.weight"] + above) * (hidden[at] > 0) / width
        slopes[f"{layer}.weight"], slopes[f"{layer}.bias"] = delta.T @ inputs[at], delta.sum(axis=0)
        above = delta @ weights[f"{layer}.weight"]
    return slopes


def loss(weights, x, y):
    """Cross-entropy of the mean over all exits."""
    logits = np.mean(forward(weights, x, sum(f"{exit}.bias" in weights for _, exit in BLOCKS))[2], axis=0)
    return -np.log(probabilities(logits)[np.arange(len(y)), y]).mean()
