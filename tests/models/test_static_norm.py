"""Networks whose batch norm keeps nothing: PerFedMask's."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import AlexNet256, MobileNet, PreResNet18
from lightning_sparsefl.models.norm import norm2d


@pytest.mark.parametrize("kind", [MobileNet, PreResNet18])
def test_scores_depend_on_the_batch_in_training_and_evaluation_alike(kind):
    torch.manual_seed(0)
    model, images = kind(num_classes=3), torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        trained, scored = model.train()(images), model.eval()(images)
        alone = model(images[:2])
    assert torch.equal(trained, scored)
    assert not torch.allclose(alone, scored[:2], atol=1e-3)
    assert not list(model.buffers())


@pytest.mark.parametrize("kind", [MobileNet, PreResNet18])
def test_other_norms(kind):
    for norm in ("group", "batch"):
        model = kind(num_classes=3, norm=norm).eval()
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in kind(num_classes=3).parameters())
        assert bool(list(model.buffers())) == (norm == "batch")


def test_alexnet_for_large_images():
    torch.manual_seed(0)
    with torch.device("meta"):
        large = AlexNet256()
    assert sum(p.numel() for p in large.parameters()) == 57_063_498
    with torch.device("meta"):
        assert large.to("meta")(torch.zeros(2, 3, 256, 256)).shape == (2, 10)
        assert AlexNet256(norm="group")(torch.zeros(1, 3, 63, 63)).shape == (1, 10)


def test_a_single_sample_is_its_own_mean():
    norm = AlexNet256(num_classes=2).net.norm6
    with torch.no_grad():
        norm.bias.fill_(0.5)
        assert torch.equal(norm(torch.randn(1, 4096)), torch.full((1, 4096), 0.5))
        pair = norm(torch.randn(2, 4096))
    torch.testing.assert_close(pair.mean(0), torch.full((4096,), 0.5), atol=1e-3, rtol=0)


@pytest.mark.parametrize("norm", ["batch", "batch_static"])
def test_one_pixel_of_one_sample_is_refused(norm):
    layer = norm2d(norm, 4, 2).train()
    with pytest.raises(InvalidOption, match=r"received a batch of one sample and one pixel.*`data.drop_last: true`"):
        layer(torch.zeros(1, 4, 1, 1))
    assert layer(torch.zeros(2, 4, 1, 1)).shape == (2, 4, 1, 1)
    assert layer(torch.zeros(1, 4, 2, 1)).shape == (1, 4, 2, 1)
