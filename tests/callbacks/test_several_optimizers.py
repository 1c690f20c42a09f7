"""With several optimizers, a callback that adds to gradients adds to each weight once, before its optimizer steps."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_sparsefl.callbacks import GradientOffset, GradientSum, GroupPenalty, ProximalTerm
from lightning_sparsefl.sparse.units import find_groups

RATES = {"0": 0.1, "2": 0.0, "4": 0.2}
"""Learning rates of the layers, of which the middle one has no optimizer."""


@pytest.fixture
def two(net):
    """Makes a module with two optimizers, which both step after the one backward pass of a batch."""

    class Two(type(net())):
        def __init__(self, scale):
            super().__init__(None)
            self.automatic_optimization, self.scale = False, scale

        def configure_optimizers(self):
            return SGD(self.net[0].parameters(), RATES["0"]), SGD(self.net[4].parameters(), RATES["4"])

        def training_step(self, batch):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(self.scale * self.loss(batch))
            for optimizer in self.optimizers():
                optimizer.step()

    return Two


def copied(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def squared_distance(weights):
    return sum((weight - 1).square().sum() for weight in weights.values()) / 2


def lasso(weights):
    """Half of the norms of the rows of hidden units, and of the columns that read them."""
    first, second, third = (weights[f"net.{place}.weight"] for place in (0, 2, 4))
    parts = [first.square().sum(1), second.square().sum(0), second.square().sum(1), third.square().sum(0)]
    return 0.5 * sum((part + 1e-8).sqrt().sum() for part in parts)


@pytest.mark.parametrize("name", ["GradientOffset", "ProximalTerm", "GroupPenalty"])
def test_a_term_is_added_once(name, two, net, fit):
    module = two(0)
    before, groups = copied(module), find_groups(nn.Sequential(OrderedDict(net=net().net)), torch.zeros(1, 4))
    callbacks = {
        "GradientOffset": (GradientOffset(before), lambda weights: sum(w.square().sum() for w in weights.values()) / 2),
        "ProximalTerm": (ProximalTerm(1.0, {n: torch.ones_like(w) for n, w in before.items()}), squared_distance),
        "GroupPenalty": (
            GroupPenalty(0.5, stairs=None, groups="units", units=lambda parameters: groups),
            lasso,
        ),
    }
    callback, term = callbacks[name]
    weights = {n: weight.clone().requires_grad_() for n, weight in before.items()}
    slopes = torch.autograd.grad(term(weights), list(weights.values()), allow_unused=True)
    fit(module, [callback], epochs=1, batches=1)
    for (n, weight), slope in zip(module.named_parameters(), slopes, strict=True):
        moved = 0 if slope is None else RATES[n.split(".")[1]] * slope
        torch.testing.assert_close(weight.detach(), before[n] - moved, rtol=0, atol=1e-6)


def test_a_gradient_is_summed_once(two, fit):
    module, callback = two(1), GradientSum()
    before = copied(module)
    fit(module, [callback], epochs=1, batches=1)
    for name, weight in module.named_parameters():
        rate = RATES[name.split(".")[1]]
        torch.testing.assert_close(rate * callback.sums[name], before[name] - weight.detach(), rtol=0, atol=1e-6)
