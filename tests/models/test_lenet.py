"""LeNet-5 in its two variants."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import LeNet5


@pytest.mark.parametrize(("variant", "classes", "parameters"), [("caffe", 26, 439_096), ("1998", 10, 61_706)])
def test_the_published_sizes(variant, classes, parameters):
    assert sum(p.numel() for p in LeNet5(classes, variant=variant).parameters()) == parameters


def test_the_variant_of_1998_is_its_definition():
    torch.manual_seed(0)
    model, x = LeNet5(10, variant="1998"), torch.randn(3, 1, 28, 28)
    w = dict(model.net.named_parameters())
    h = F.max_pool2d(F.conv2d(x, w["conv1.weight"], w["conv1.bias"], padding=2).relu(), 2)
    h = F.max_pool2d(F.conv2d(h, w["conv2.weight"], w["conv2.bias"]).relu(), 2).flatten(1)
    for layer in ("fc1", "fc2"):
        h = F.linear(h, w[f"{layer}.weight"], w[f"{layer}.bias"]).relu()
    assert h.shape == (3, 84)
    torch.testing.assert_close(model(x), F.linear(h, w["fc3.weight"], w["fc3.bias"]))


@pytest.mark.parametrize("side", [16, 17, 23, 28])
def test_the_variant_of_1998_takes_any_side(side):
    assert LeNet5(3, (2, side, side + 1), variant="1998")(torch.zeros(1, 2, side, side + 1)).shape == (1, 3)


def test_an_unknown_variant_is_refused():
    with pytest.raises(InvalidOption, match=r"`model.variant` is 'lenet-300'; expected 'caffe' or '1998'"):
        LeNet5(variant="lenet-300")
