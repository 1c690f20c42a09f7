"""The task in an ordinary Trainer."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import MLP, Classifier

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers")


@pytest.fixture
def trainer(tmp_path: Path) -> L.Trainer:
    return L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )


@pytest.fixture
def samples() -> TensorDataset:
    """21 samples: batches of 8, 8 and 5, so that means must be weighted."""
    rng = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(21, 6, generator=rng), torch.randint(0, 3, (21,), generator=rng)
    return TensorDataset(inputs, labels)


def test_logs_means_over_samples_of_every_split(trainer, samples):
    torch.manual_seed(0)
    model = Classifier(nn.Linear(6, 3), num_classes=3, lr=1e-12)
    inputs, labels = samples.tensors
    logits = model(inputs).detach()
    loss = F.cross_entropy(logits, labels).item()
    acc = (logits.argmax(1) == labels).float().mean().item()

    loader = DataLoader(samples, batch_size=8)
    trainer.fit(model, loader, loader)
    seen = dict(trainer.callback_metrics)
    seen |= trainer.test(model, loader, verbose=False)[0]

    assert set(seen) == {f"{split}_{name}" for split in ("train", "val", "test") for name in ("loss", "acc")}
    for split in ("train", "val", "test"):
        assert float(seen[f"{split}_loss"]) == pytest.approx(loss, rel=1e-5)
        assert float(seen[f"{split}_acc"]) == pytest.approx(acc, rel=1e-5)


def test_trains(trainer, samples):
    inputs, _ = samples.tensors
    learnable = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    model = Classifier(nn.Linear(6, 2), num_classes=2, lr=0.5)
    trainer.fit_loop.max_epochs = 20
    loader = DataLoader(learnable, batch_size=8)
    trainer.fit(model, loader, loader)
    assert trainer.callback_metrics["val_acc"] > 0.9


def test_optimizer_is_the_sgd_asked_for():
    optimizer = Classifier(
        nn.Linear(2, 2), num_classes=2, lr=0.3, momentum=0.5, weight_decay=0.01
    ).configure_optimizers()
    assert type(optimizer) is torch.optim.SGD
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.3, 0.5, 0.01)


def test_weights_are_the_networks_alone():
    assert list(Classifier(nn.Linear(2, 2), num_classes=2).state_dict()) == ["net.weight", "net.bias"]


@pytest.mark.filterwarnings(
    "ignore:.*configure_optimizers. will be overridden",
    # Lightning 2.6 calls names that jsonargparse 4.49 and later call deprecated.
    "ignore::DeprecationWarning",
)
def test_lightning_cli_can_replace_the_optimizer(monkeypatch):
    args = ["--model.num_classes=3", "--optimizer=Adam", "--optimizer.lr=0.01", "--trainer.logger=false"]
    monkeypatch.setattr("sys.argv", ["train.py", *args])
    cli = LightningCLI(MLP, run=False, save_config_callback=None, seed_everything_default=False)
    optimizer = cli.model.configure_optimizers()
    assert type(optimizer) is torch.optim.Adam
    assert optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_classes": 1}, "`model.num_classes` is 1; expected a whole number >= 2; change it or `data`."),
        ({"lr": 0.0}, "`model.lr` is 0.0; expected a number above 0."),
        ({"lr": float("nan")}, "`model.lr` is nan; expected a number above 0."),
        ({"momentum": 1.0}, r"`model.momentum` is 1.0; expected a number in \[0, 1\)."),
        ({"weight_decay": -1.0}, "`model.weight_decay` is -1.0; expected a number >= 0."),
    ],
)
def test_refuses_numbers_out_of_range(wrong, message):
    with pytest.raises(InvalidOption, match=message):
        Classifier(nn.Linear(2, 2), **{"num_classes": 2, **wrong})
    with pytest.raises(InvalidOption, match=message):
        MLP(**wrong)
