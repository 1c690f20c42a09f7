"""Callbacks that act before a step, under manual optimization."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.callbacks import (
    BudgetAwareExtrusion,
    DynamicMask,
    DynamicPruningWithFeedback,
    GradientOffset,
    GradientSum,
    GradualPruning,
    GroupPenalty,
    LotteryRewind,
    NMPruning,
    OrderedDropout,
    ProximalTerm,
    StepMeter,
)
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.units import find_groups

MAKERS = {
    "BudgetAwareExtrusion": BudgetAwareExtrusion,
    "ProximalTerm": lambda: ProximalTerm(strength=1.0),
    "GroupPenalty": lambda: GroupPenalty(strength=1.0, stairs=None),
    "GradientOffset": lambda: GradientOffset({"net.0.weight": torch.ones(3, 4)}),
    "GradientSum": GradientSum,
    "OrderedDropout": lambda: OrderedDropout(groups=find_groups(Manual(bare=False), torch.ones(1, 4))),
    "StepMeter": lambda: StepMeter(mu=0),
}


class SubclassedSGD(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class Manual(L.LightningModule):
    def __init__(self, bare: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
        self.bare, self.automatic_optimization = bare, False

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=not self.bare)
        optimizer.zero_grad()
        self.manual_backward(self(batch[0]).square().mean())
        optimizer.step()

    def configure_optimizers(self):
        return SubclassedSGD(self.parameters(), lr=0.01)


def fit(tmp_path, bare, callback):
    module = Manual(bare)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=2, default_root_dir=tmp_path, callbacks=[callback], **options)
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4))
    return trainer


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_that_lightning_does_not_report_is_refused(name, tmp_path):
    words = rf"`{name}`: `Manual.training_step` steps a bare optimizer.*; expected `self.optimizers\(\)`"
    callback = MAKERS[name]()
    with pytest.raises(InvalidOption, match=words):
        fit(tmp_path, True, callback)
    trainer = fit(tmp_path, False, callback)
    assert trainer.global_step == 4
    trainer.optimizers[0].step()  # by the user, after the fit


SCHEDULES = {
    "GradualPruning": lambda: GradualPruning(density=0.5, every_n_steps=1),
    "NMPruning": lambda: NMPruning(n=1, m=2, start=0.5),
    "DynamicPruningWithFeedback": lambda: DynamicPruningWithFeedback(density=0.5, every_n_steps=1),
    "LotteryRewind": lambda: LotteryRewind(density=0.5, cycles=2),
    "DynamicMask": lambda: DynamicMask(density=0.5, every_n_steps=1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_no_step_moves_says_why(name, tmp_path):
    with pytest.warns(UserWarning, match=rf"`{name}`: .*, since Lightning reports no steps of `optimizers\(use_pl_opt"):
        fit(tmp_path, True, SCHEDULES[name]())
