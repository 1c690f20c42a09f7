"""What all networks have in common."""

from __future__ import annotations

import math
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import (
    MLP,
    VGG11,
    VGG13,
    VGG16,
    AlexNet,
    LeNet5,
    MNISTNet,
    MobileNet,
    PreResNet18,
    ResNet18,
    SmallCNN,
)

ZOO = [AlexNet, LeNet5, MLP, MNISTNet, MobileNet, PreResNet18, ResNet18, SmallCNN, VGG11, VGG13, VGG16]
PARAMETERS = {
    AlexNet: 23_272_266,
    LeNet5: 439_096,
    MLP: 50_890,
    MNISTNet: 21_840,
    MobileNet: 3_309_476,
    PreResNet18: 11_172_170,
    ResNet18: 11_220_132,
    SmallCNN: 10_026,
    VGG11: 9_231_114,
    VGG13: 9_416_010,
    VGG16: 14_728_266,
}
"""With the default classes and sample shape; the networks of the papers as their tables imply."""
TOO_SMALL = {
    AlexNet: 14,
    LeNet5: 15,
    MLP: 0,
    MNISTNet: 15,
    MobileNet: 16,
    PreResNet18: 8,
    ResNet18: 7,
    SmallCNN: 1,
    VGG11: 31,
    VGG13: 31,
    VGG16: 31,
}


@pytest.fixture(params=ZOO, ids=lambda model_class: model_class.__name__)
def model_class(request):
    return request.param


def test_parameter_count(model_class):
    assert sum(p.numel() for p in model_class().parameters()) == PARAMETERS[model_class]


@pytest.mark.parametrize("sample_shape", [(1, 32, 32), (3, 64, 40)])
def test_any_classes_and_any_large_enough_samples(model_class, sample_shape):
    model = model_class(num_classes=7, sample_shape=sample_shape)
    assert model(torch.zeros(2, *sample_shape)).shape == (2, 7)


def test_smallest_samples(model_class):
    side = TOO_SMALL[model_class] + 1
    assert model_class(num_classes=3, sample_shape=(2, side, side))(torch.zeros(1, 2, side, side)).shape == (1, 3)


def test_refuses_samples_that_are_too_small(model_class):
    side = TOO_SMALL[model_class]
    with pytest.raises(InvalidOption, match=f"sides of at least {side + 1} pixels"):
        model_class(sample_shape=(3, 64, side))
    with pytest.raises(InvalidOption, match="at least 1 channel"):
        model_class(sample_shape=(0, 64, 64))


@pytest.mark.parametrize("dropout", [-0.1, 1.5, math.nan])
def test_a_dropout_that_is_no_probability_is_refused(dropout):
    with pytest.raises(InvalidOption, match=rf"`model.dropout` is {dropout}; expected a number in \[0, 1\]"):
        AlexNet(dropout=dropout)


def test_parameters_are_defined_in_the_order_of_the_forward_pass(model_class):
    model = model_class()
    used: list[str] = []
    for name, layer in model.named_modules():
        if any(True for _ in layer.parameters(recurse=False)):
            layer.register_forward_hook(lambda *_, name=name: used.append(name))
    model(torch.zeros(1, *model.hparams.sample_shape))
    defined = [name.rpartition(".")[0] for name, _ in model.named_parameters()]
    assert used == list(dict.fromkeys(defined))


def test_only_float_parameters_travel(model_class):
    model = model_class()
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


def test_hyper_parameters_are_plain_and_rebuild_the_model(model_class, tmp_path: Path):
    model = model_class(num_classes=4, sample_shape=(1, 32, 32), lr=0.2, momentum=0.5, weight_decay=0.01)
    torch.save(dict(model.hparams), tmp_path / "hparams.pt")
    plain = torch.load(tmp_path / "hparams.pt", weights_only=True)
    assert plain["sample_shape"] == (1, 32, 32)
    assert (plain["num_classes"], plain["lr"], plain["momentum"], plain["weight_decay"]) == (4, 0.2, 0.5, 0.01)
    again = model_class(**plain)
    assert again.hparams == model.hparams
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers")
@pytest.mark.parametrize("small_class", [LeNet5, MLP, MNISTNet, SmallCNN])
def test_a_step_in_a_plain_trainer_moves_every_parameter(small_class, tmp_path: Path):
    torch.manual_seed(0)
    model = small_class(num_classes=3, sample_shape=(1, 16, 16), lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = L.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    batch = TensorDataset(torch.randn(16, 1, 16, 16), torch.arange(16) % 3)
    loader = DataLoader(batch, batch_size=16)
    trainer.fit(model, loader, loader)
    assert trainer.callback_metrics["train_loss"].isfinite()
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []


@pytest.mark.parametrize("large_class", [AlexNet, MobileNet, PreResNet18, ResNet18, VGG11, VGG13, VGG16])
def test_gradients_reach_every_parameter(large_class):
    torch.manual_seed(0)
    model = large_class(num_classes=3)
    model(torch.randn(2, 3, 32, 32)).logsumexp(1).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
