from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.sparse.kept_values import held_mean, kept_values, with_zeros


def test_values_and_masks_give_the_weights_back():
    weights = {"w": torch.tensor([[1.0, 0.0], [0.0, 4.0]]), "b": torch.tensor([5.0])}
    masks = {"w": torch.tensor([[True, False], [True, True]])}
    values = kept_values(weights, masks)
    assert values["w"].tolist() == [1, 0, 4]
    assert values["b"] is weights["b"]
    assert all(torch.equal(weight, weights[name]) for name, weight in with_zeros(values, masks).items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_mean_of_many_is_rounded_once(dtype):
    others = [({"w": torch.tensor([sign], dtype=dtype)}, {}) for sign in (1.0, -1.0) for _ in range(300)]
    found = held_mean(({"w": torch.zeros(1, dtype=dtype)}, {}), others)["w"]
    assert found.dtype == dtype
    assert found.abs().item() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_equal_weights_stay_as_they_are(dtype):
    weight = torch.rand(50, generator=torch.Generator().manual_seed(0)).to(dtype)
    mask = {"w": torch.arange(50) % 3 > 0}
    kept = {"w": weight * mask["w"]}
    assert torch.equal(held_mean(({"w": weight}, {}), [(kept, mask)] * 2)["w"], weight)
