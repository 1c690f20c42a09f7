"""The digits that scikit-learn ships."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.data import FederatedDigits


def test_facts_are_those_of_the_data():
    data = FederatedDigits()
    images, labels, test_images, test_labels = data.load()
    assert images.shape == (data.num_train, *data.sample_shape)
    assert test_images.shape == (355, 1, 8, 8)
    assert images.dtype == torch.uint8
    assert (int(images.min()), int(images.max())) == (0, 16)
    shares = labels.bincount() / len(labels), test_labels.bincount() / len(test_labels)
    torch.testing.assert_close(*shares, atol=0.002, rtol=0)
    assert len(torch.cat([images, test_images]).flatten(1).unique(dim=0)) == 1797


def test_inputs_are_normalised():
    inputs = torch.cat([inputs for inputs, _ in FederatedDigits().train_dataloader()])
    assert inputs.mean().item() == pytest.approx(0, abs=0.01)
    assert inputs.std().item() == pytest.approx(1, abs=0.01)


def test_twenty_clients_by_default():
    data = FederatedDigits()
    assert data.num_clients == 20
    data.setup()
    assert set(data.client_sizes) == {72, 73}
