from __future__ import annotations

import torch

from lightning_sparsefl.sparse import scores


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
