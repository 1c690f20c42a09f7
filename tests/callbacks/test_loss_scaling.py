"""Steps that loss scaling skips, since a gradient overflows: callbacks leave them out."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.callbacks import MetaStep, MoreauEnvelope, PersonalMixture, StepMeter

SCALE = 2.0**127
"""Scale of the loss at which a gradient of 2 or more is infinite in single precision, and at half of it is not."""


class Steep(L.LightningModule):
    """Has the loss 3 (w + 1)^2 / 2, whose gradient is 3 at w = 0, and is above 2 in the steps of these tests."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def training_step(self, batch):
        return (1.5 * (self.w + batch[0]) ** 2).sum()

    def configure_optimizers(self):
        return SGD(self.parameters(), 0.1)


@pytest.fixture
def trained(tmp_path):
    """Trains with a callback, with loss scaling that skips every other batch if `skips`; returns the module."""

    def run(callback, batches, skips=False):
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1)
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[callback],
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)] if skips else None,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        module = Steep()
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(batches, 1)), batch_size=1))
        return module

    return run


EVERY = {
    "meter": (lambda: StepMeter(mu=0), 1),
    "mixture": (lambda: PersonalMixture(alpha=0.5, adaptive=True), 1),
    "envelope": (lambda: MoreauEnvelope(strength=1.0, lr=0.01, steps=1), 2),
    "meta, first": (lambda: MetaStep(lr=0.1), 2),
    "meta, hessian": (lambda: MetaStep(lr=0.1, order="hessian", delta=0.1), 3),
}


@pytest.mark.parametrize(("make", "batches"), EVERY.values(), ids=EVERY)
def test_a_step_that_loss_scaling_skips_changes_nothing(make, batches, trained):
    plain, scaled = make(), make()
    expected = trained(plain, batches).w.item()
    assert trained(scaled, 2 * batches, skips=True).w.item() == pytest.approx(expected, rel=1e-6)
    assert expected != 0
    assert list(scaled.state_dict()) == list(plain.state_dict())
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(scaled.state_dict()[key], value)


def test_without_loss_scaling_a_training_that_diverges_shows(trained):
    class Broken(StepMeter):
        def on_after_backward(self, trainer, pl_module):
            pl_module.w.grad.fill_(torch.inf)

    meter = Broken(mu=0)
    assert not trained(meter, 2).w.isfinite()
    assert meter.steps == 2
