from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.callbacks import LossSquares

X = torch.randn(21, 3, generator=torch.Generator().manual_seed(0))


class Module(L.LightningModule):
    def __init__(self, manual=False):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.losses, self.automatic_optimization = nn.Linear(3, 1), [], not manual

    def training_step(self, batch):
        loss = self.net(batch[0]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss if self.automatic_optimization else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def fit(module, callback, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = L.Trainer(**quiet, enable_checkpointing=False, callbacks=[callback], **{"max_epochs": 3, **options})
    trainer.fit(module, DataLoader(TensorDataset(X), batch_size=5))
    return trainer


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_mean_of_the_squares_of_all_batches_is_logged(accumulate):
    module, callback = Module(), LossSquares()
    logged = fit(module, callback, accumulate_grad_batches=accumulate).callback_metrics["train_loss_sq"]
    assert len(module.losses) == 15
    assert float(logged) == pytest.approx(sum(loss**2 for loss in module.losses) / 15, rel=1e-6)
    first = list(module.losses)
    again = fit(module, callback, max_epochs=1).callback_metrics["train_loss_sq"]  # a new sum
    assert float(again) == pytest.approx(sum(loss**2 for loss in module.losses[len(first) :]) / 5, rel=1e-6)


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
def test_a_module_that_returns_no_loss_logs_nothing_and_the_key_is_an_option():
    assert fit(Module(manual=True), LossSquares()).callback_metrics == {}
    assert set(fit(Module(), LossSquares(key="squares")).callback_metrics) == {"squares"}


class Own(Module):
    """Its loss is the mean of a batch."""

    def training_step(self, batch):
        return 0 * self.net(batch[0]).sum() + batch[0].mean()


@pytest.fixture
def no_processes(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_several_processes_go_on_from_a_checkpoint_with_the_sums_of_all(no_processes, tmp_path):
    logged = []
    for epochs in ((2,), (1, 2)):  # a straight fit, and one that is resumed
        for limit in epochs:
            trainer = L.Trainer(
                max_epochs=limit,
                devices=2,
                strategy="ddp_fork",
                accelerator="cpu",
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[LossSquares(), ModelCheckpoint(tmp_path / str(len(epochs)), save_last=True)],
            )
            path = tmp_path / str(len(epochs)) / "last.ckpt" if limit != epochs[0] else None
            trainer.fit(Own(), DataLoader(TensorDataset(torch.tensor([[1.0] * 3, [3.0] * 3]))), ckpt_path=path)
        logged.append(float(trainer.callback_metrics["train_loss_sq"]))
    assert logged == [5.0, 5.0]


def test_with_several_processes_the_mean_is_over_all_of_them(no_processes):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    options = {"max_epochs": 1, "devices": 2, "strategy": "ddp_fork", "enable_checkpointing": False}
    trainer = L.Trainer(**quiet, **options, callbacks=[LossSquares()])
    trainer.fit(Own(), DataLoader(TensorDataset(torch.tensor([[1.0] * 3, [3.0] * 3]))))
    assert float(trainer.callback_metrics["train_loss_sq"]) == 5.0
