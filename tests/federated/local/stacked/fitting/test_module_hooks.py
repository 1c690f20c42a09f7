"""Hooks of a module that change weights, layers and metric objects between the steps of a stack."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import Metric

from lightning_sparsefl import FLASH, SNIP, FedDIP, FedLPS, FedSpa, SplitMix
from lightning_sparsefl.federated.local.stacked.recording.recorder import PassRecorder
from tests.federated.local.stacked import test_odd_modules as odd
from tests.federated.local.stacked.test_odd_modules import Plain, check


class Raised(Plain):
    """Writes weights that a mask does not keep, in one of the hooks."""

    hook = ""

    def on_train_start(self):
        self.write("on_train_start")

    def on_train_epoch_start(self):
        self.write("on_train_epoch_start")

    def on_train_epoch_end(self):
        self.write("on_train_epoch_end")

    def on_train_end(self):
        self.write("on_train_end")

    @torch.no_grad()
    def write(self, hook):
        if hook == self.hook:
            for parameter in self.parameters():
                parameter.add_(0.01)


OTHERS = [FedDIP(), FedLPS(ratio="fixed"), FLASH(), SNIP(), SplitMix(bases=2)]
METHODS = [FedSpa(), *(pytest.param(algorithm, marks=pytest.mark.slow) for algorithm in OTHERS)]


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end"])
@pytest.mark.parametrize("algorithm", METHODS, ids=lambda algorithm: type(algorithm).__name__)
def test_what_a_hook_writes_under_a_mask_is_zeroed(algorithm, hook, tmp_path):
    sizes, _ = check(type("Raised", (Raised,), {"hook": hook}), tmp_path, algorithm=algorithm)
    assert sizes


class Normed(Plain):
    def layers(self):
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))


class StopsStatistics(Normed):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[1].eval()


class StopsStatisticsLater(Normed):
    def on_train_epoch_end(self):
        self.net[1].eval()


class SwapsALayer(Plain):
    def on_train_epoch_start(self):
        self.net[1] = nn.Tanh() if self.current_epoch == 0 else nn.Sigmoid()


class AddsAHook(Plain):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[1].register_forward_hook(lambda layer, given, output: 0.5 * output)

    def on_train_end(self):
        self.net[1]._forward_hooks.clear()


@pytest.mark.parametrize("kind", [StopsStatistics, StopsStatisticsLater, SwapsALayer, AddsAHook])
def test_a_recorded_step_does_not_outlive_a_change_of_layers(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [40] * 4)
    repeated, before = [], PassRecorder.do
    monkeypatch.setattr(PassRecorder, "do", lambda *args: repeated.append(before(*args)) or repeated[-1])
    sizes, _ = check(kind, tmp_path)
    assert sizes == [4, 4]
    assert any(each is not None for each in repeated)


class Counted(Metric):
    """A metric that divides by the number of its updates."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, value):
        self.total = self.total + value.detach()

    def compute(self):
        return self.total / self._update_count


class BeginsWithAValue(Plain):
    """Resets a metric in a hook, where clients have made different numbers of updates."""

    def __init__(self):
        super().__init__()
        self.counted = Counted()

    def on_train_epoch_start(self):
        self.counted.reset()
        self.counted.update(self.net[0].weight.norm())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.counted.update(loss)
        self.log("counted", self.counted.compute())
        return loss + 0.1 * self.counted.compute() * self.net[0].weight.norm()


class BeginsAnew(BeginsWithAValue):
    """Resets a metric in each step, which is recorded."""

    def on_train_epoch_start(self):
        pass

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.counted.reset()
        self.counted.update(loss)
        return loss

    def on_train_epoch_end(self):
        self.log("counted", self.counted.compute())


@pytest.mark.parametrize(("kind", "sizes", "epochs"), [(BeginsWithAValue, odd.SIZES, 2), (BeginsAnew, [80] * 4, 1)])
def test_a_reset_and_an_update_are_one_update(kind, sizes, epochs, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", sizes)
    assert check(kind, tmp_path, max_epochs=epochs)[0] == [4, 4]
