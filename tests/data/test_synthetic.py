"""The toy set."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import InvalidOption


def test_shapes_and_sizes_are_those_asked_for():
    data = FederatedBlobs(num_clients=3, num_classes=5, dim=7, num_train=50, num_test=20)
    assert (data.sample_shape, sum(data.client_sizes)) == ((1, 1, 7), 50)
    inputs, labels, test_inputs, test_labels = data.load()
    assert (inputs.shape, test_inputs.shape) == ((50, 1, 1, 7), (20, 1, 1, 7))
    assert labels.bincount().tolist() == [10] * 5
    assert test_labels.bincount().tolist() == [4] * 5


def test_noise_is_the_spread_within_a_class():
    inputs, labels, *_ = FederatedBlobs(num_train=4000, noise=0.3, seed=1).load()
    within = torch.stack([inputs[labels == label].std(0).mean() for label in range(4)])
    assert within.tolist() == pytest.approx([0.3] * 4, rel=0.05)


def test_the_seed_draws_the_examples():
    def first(seed: int) -> torch.Tensor:
        return FederatedBlobs(seed=seed).load()[0]

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))


@pytest.mark.parametrize("wrong", [{"num_classes": 0}, {"dim": 0}, {"num_test": 0}, {"num_train": 5}])
def test_refuses_empty_sets(wrong):
    with pytest.raises(InvalidOption, match=r"change `data\."):
        FederatedBlobs(**wrong)
