from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.errors import IncompatibleMasks
from lightning_sparsefl.sparse import scores
from lightning_sparsefl.sparse.prune import keep_largest


def test_magnitude_and_gradient_are_absolute_and_detached():
    weights = {"w": torch.tensor([-3.0, 2.0], requires_grad=True)}
    for score in (scores.magnitude(weights)["w"], scores.gradient(weights)["w"]):
        assert score.tolist() == [3.0, 2.0]
        assert not score.requires_grad


def test_random_is_a_function_of_the_generator_and_the_shapes():
    tensors, shapes = {"a": torch.zeros(2, 3), "b": torch.zeros(())}, {"a": (2, 3), "b": ()}
    first = scores.random(tensors, torch.Generator().manual_seed(3))
    again = scores.random(shapes, torch.Generator().manual_seed(3))
    other = scores.random(shapes, torch.Generator().manual_seed(4))
    assert all(torch.equal(first[name], again[name]) and first[name].shape == tensors[name].shape for name in shapes)
    assert not torch.equal(first["a"], other["a"])
    assert scores.random(shapes)["a"].shape == (2, 3)


def test_snip_is_the_slope_of_a_gate_and_taylor_the_squared_price_of_dropping_on_a_linear_loss():
    weight, gate = torch.tensor([-3.0, 2.0, 0.5]), torch.ones(3, requires_grad=True)
    slope = torch.tensor([1.0, -4.0, 2.0])
    ((weight * gate) * slope).sum().backward()
    assert torch.equal(scores.snip({"w": weight}, {"w": slope})["w"], gate.grad.abs())
    price = torch.tensor([float(((weight * (torch.arange(3) != i)) * slope).sum()) for i in range(3)])
    assert torch.equal(scores.taylor({"w": weight}, {"w": slope})["w"], (price - (weight * slope).sum()) ** 2)


@pytest.mark.parametrize("score", [scores.snip, scores.taylor])
def test_every_weight_needs_its_gradient(score):
    parameter = torch.ones(2, requires_grad=True)
    found = score({"w": parameter}, {"w": torch.ones(2), "other": torch.ones(1)})
    assert list(found) == ["w"]
    assert not found["w"].requires_grad
    with pytest.raises(IncompatibleMasks, match="`w` cannot be scored: its gradient is missing"):
        score({"w": parameter}, {})
    with pytest.raises(IncompatibleMasks, match=r"gradient of `w` has shape \(3,\), expected \(2,\)"):
        score({"w": parameter}, {"w": torch.ones(3)})


def test_learned_scores_are_their_own_values():
    parameter = torch.nn.Parameter(torch.tensor([-1.0, 2.0]))
    found = scores.learned({"w": parameter})["w"]
    assert found.tolist() == [-1, 2]
    assert not found.requires_grad
    with pytest.raises(IncompatibleMasks, match="`w` is not finite; lower the scores' learning rate"):
        scores.learned({"w": torch.tensor([1.0, float("nan")])})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gate_is_exactly_the_mask_and_the_gradient_passes(dtype):
    score = torch.randn(200, generator=torch.Generator().manual_seed(0)).mul(1e4).to(dtype).requires_grad_()
    mask = keep_largest(score, 70)
    gate = scores.straight_through(score, mask)
    assert gate.dtype == dtype
    assert torch.equal(gate, mask.to(dtype))
    slope = torch.arange(200).to(dtype)
    (gate * slope).sum().backward()
    assert torch.equal(score.grad, slope)


def test_a_dropped_score_that_would_help_returns():
    weight, target = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0])
    score = torch.tensor([0.5, 0.4], requires_grad=True)
    for _ in range(3):
        gate = scores.straight_through(score, keep_largest(score, 1))
        (gradient,) = torch.autograd.grad(((weight * gate - target) ** 2).sum(), score)
        score = (score - 0.1 * gradient).detach().requires_grad_()
    assert keep_largest(score, 1).tolist() == [False, True]
