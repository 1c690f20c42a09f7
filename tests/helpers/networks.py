"""Small networks to train in tests."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl.testing.networks import Classifier


class DeepClassifier(Classifier):
    """Two hidden layers, of which a client may own one."""

    def __init__(self, width=16):
        super().__init__(width)
        self.net.insert(4, nn.Linear(width, width))
        self.net.insert(5, nn.ReLU())


class EarlyExits(Classifier):
    """The classifier in two blocks with an exit after each: the mean of logits predicts, the mean of losses trains."""

    def __init__(self, width=16):
        super().__init__(width)
        layers = list(self.net)
        self.net = nn.ModuleDict(
            {
                "first": nn.Sequential(*layers[:3]),
                "one": nn.Linear(width, 4),
                "second": nn.Sequential(layers[3], nn.Linear(width, width), nn.ReLU()),
                "two": layers[4],
            }
        )
        for exit in ("one", "two"):  # so that the untrained module is right by chance only
            nn.init.zeros_(self.net[exit].weight)
        self.exits, self.depth = {"net.first": "net.one", "net.second": "net.two"}, 2

    def logits(self, x):
        hidden = self.net["first"](x.flatten(1))
        found = [self.net["one"](hidden)]
        return found if self.depth == 1 else [*found, self.net["two"](self.net["second"](hidden))]

    def forward(self, x):
        return torch.stack(self.logits(x)).mean(0)

    def training_step(self, batch, batch_idx):
        found = self.logits(batch[0])
        loss = torch.stack([F.cross_entropy(logits, batch[1]) for logits in found]).mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        right = (torch.stack(found).mean(0).argmax(1) == batch[1]).float().mean()
        self.log("train_acc", right, on_step=False, on_epoch=True)
        return loss


class LowRank(nn.Module):
    """A linear layer with an adapter of rank 4: ``W x + B A x``."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.lora_A, self.lora_B = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


class Adapted(Classifier):
    """The classifier with an adapter at its first layer."""

    def __init__(self, width=16):
        super().__init__(width)
        self.net[0] = LowRank(8, width)


MODULES: dict[str, Callable[[], L.LightningModule]] = {
    "DepthFL": EarlyExits,
    "ScaleFL": EarlyExits,
    "FLASC": Adapted,
    "FedP3": DeepClassifier,
}
"""Modules for methods that need more of a module than the classifier has, such as exits, by the method's name."""


def module_for(algorithm: object) -> Callable[[], L.LightningModule]:
    """Return the class of the small module that an algorithm trains in the contract tests."""
    return MODULES.get(type(algorithm).__name__, Classifier)
