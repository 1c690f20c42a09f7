"""Batch norm that keeps nothing, and the counts of the networks that use it."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import VGG11, VGG13, VGG16


@pytest.mark.parametrize(
    ("model", "classes", "side", "parameters"),
    [(VGG11, 10, 32, 9_231_114), (VGG13, 100, 32, 9_462_180), (VGG16, 200, 64, 15_132_936)],
)
def test_the_networks_of_fedlps_have_the_published_sizes_and_no_buffer(model, classes, side, parameters):
    network = model(classes, (3, side, side), norm="batch_static")
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert not list(network.net.buffers())


def test_statistics_are_the_batch_s_in_evaluation_too():
    model, images = VGG11(norm="batch_static"), torch.randn(4, 3, 32, 32)
    layers = torch.nn.Sequential(model.net.conv1, model.net.norm1).eval()
    values = layers(images)
    assert values.mean((0, 2, 3)).abs().max() < 1e-4
    assert values.std((0, 2, 3)).sub(1).abs().max() < 1e-2


def test_an_unknown_norm_is_refused():
    with pytest.raises(InvalidOption, match=r"`model.norm` is 'layer'; expected 'group', 'batch' or 'batch_static'"):
        VGG11(norm="layer")
