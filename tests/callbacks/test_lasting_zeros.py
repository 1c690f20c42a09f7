"""Masked weights of a stack are zeroed where an optimizer, a callback or a step may have moved them, and only there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_sparsefl.callbacks import StaticMask
from lightning_sparsefl.callbacks.stacking import StackedCallback, stacked


class Writes(StackedCallback):
    """May write weights."""


class Reads(StackedCallback):
    """Writes no weights."""

    def writes(self, name):
        return False


class Acts(Reads):
    """Acts on gradients."""

    def before_step(self, leaves, steps):
        for leaf in leaves.values():
            leaf.grad.fill_(1.0)


def sgd(leaves):
    return torch.optim.SGD(leaves, lr=0.1, momentum=0.9, weight_decay=0.1)


def adam(leaves, eps=1e-8):
    return torch.optim.Adam(leaves, lr=0.1, eps=eps)


def masked(before=(), behind=(), optimizer=sgd):
    """Return weights of two clients, and the callback that masks them, after the optimizer is made."""
    masks = [{"weight": torch.tensor([True, False])}, {"weight": torch.tensor([False, True])}]
    mask = stacked([StaticMask(masks=each) for each in masks], torch.nn.Linear(2, 1), [1, 1])
    leaves = {"weight": torch.ones(2, 2, requires_grad=True)}
    mask.start(leaves)
    mask.prepare(optimizer(list(leaves.values())), False, [*before, mask, *behind])
    return leaves, mask


HELD = torch.eye(2)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("before", [(), (Reads(), Acts())], ids=["alone", "with others"])
def test_weights_that_stay_0_are_left_alone(optimizer, before):
    leaves, mask = masked(before, [Reads()], optimizer)
    assert torch.equal(leaves["weight"], HELD)
    leaves["weight"].data.fill_(5.0)  # without a trace
    mask.after_step(leaves)
    assert torch.equal(leaves["weight"], torch.full((2, 2), 5.0))
    mask.end_epoch()
    assert torch.equal(leaves["weight"], 5 * HELD)


@pytest.mark.parametrize(
    "chain",
    [
        {"before": [Writes()]},
        {"behind": [Writes()]},
        {"behind": [Acts()]},
        {"optimizer": lambda leaves: adam(leaves, eps=0.0)},
        {"optimizer": torch.optim.ASGD},
    ],
)
def test_weights_that_may_have_moved_are_masked_after_a_step(chain):
    leaves, mask = masked(**chain)
    leaves["weight"].data.fill_(5.0)
    mask.after_step(leaves)
    assert torch.equal(leaves["weight"], 5 * HELD)


@pytest.mark.parametrize("writes", [False, True])
def test_weights_that_a_step_of_some_clients_writes_are_masked(writes):
    leaves, mask = masked()
    part, rows = {"weight": leaves["weight"].detach()[1:]}, mask.rows(1, 2)
    rows.before_batch(SimpleNamespace(leaves=part))
    with torch.no_grad():
        (part["weight"] if writes else part["weight"].data).fill_(5.0)
    rows.before_step(part, [1])
    assert torch.equal(leaves["weight"][1], torch.tensor([0.0, 5.0] if writes else [5.0, 5.0]))
