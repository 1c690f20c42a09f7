from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sparsefl.sparse.importance import narrow_groups, tie
from lightning_sparsefl.sparse.units import find_groups


def by_autograd(scores, norms, reduction):
    """The gradients of the term as it is written."""
    own = {name: score.clone().requires_grad_() for name, score in scores.items()}
    lengths = {name: norm.clone().requires_grad_() for name, norm in norms.items()}
    means = {name: norm.mean().clamp_min(torch.finfo(norm.dtype).tiny) for name, norm in lengths.items()}
    squares = [(own[name] - torch.sigmoid(norm / means[name])).square() for name, norm in lengths.items()]
    total = torch.stack([getattr(square, reduction)() for square in squares]).sum()
    found = torch.autograd.grad(total, [*own.values(), *lengths.values()])
    return dict(zip(own, found[: len(own)], strict=True)), dict(zip(own, found[len(own) :], strict=True))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("units", [1, 2, 7, 64])
def test_the_gradients_of_the_tie_are_those_of_autograd(units, dtype, reduction):
    rng = torch.Generator().manual_seed(units)
    scores = {name: torch.rand(units, generator=rng, dtype=dtype) for name in "ab"}
    norms = {"a": 30 * torch.rand(units, generator=rng, dtype=dtype), "b": torch.zeros(units, dtype=dtype)}
    expected = by_autograd(scores, norms, reduction)
    for ours, theirs in zip(tie(scores, norms, reduction), expected, strict=True):
        for name in scores:
            torch.testing.assert_close(ours[name], theirs[name], rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_narrow_groups_have_the_given_tensors_and_are_whole_where_nothing_is_said():
    net = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Linear(2, 1))
    groups, weights = find_groups(net, torch.zeros(1, 1)), dict(net.named_parameters())
    first, second = narrow_groups(groups, {"0": torch.tensor([False, True, True])}, weights)
    assert [slot.name for slot in first.slots] == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    assert [slot.positions.tolist() for slot in first.slots] == [[[0], [1]]] * 5
    assert (second.size, second.slots[0].positions.tolist()) == (2, [[0], [1]])
