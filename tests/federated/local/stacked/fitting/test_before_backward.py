"""A module's `on_before_zero_grad`: called once for all clients between their training step and its backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl import APFL, SCAFFOLD, FedDIP, FedLPS, FedMef, FedSpa, HeteroFL, PerFedMask, PFedMe
from tests.federated.local.stacked import test_odd_modules as odd
from tests.federated.local.stacked.test_odd_modules import Plain, check, check_alone, said_alone


class Smoothed(Plain):
    """Moves the weights of a second network after those of the first one, and trains by it."""

    def __init__(self):
        super().__init__()
        self.slow = self.layers().requires_grad_(False)

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer):
        for slow, own in zip(self.slow.parameters(), self.net.parameters(), strict=True):
            slow.mul_(0.9).add_(own, alpha=0.1)

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        return F.cross_entropy(logits, batch[1]) + F.mse_loss(logits, self.slow(batch[0]))


class SmoothedByData(Smoothed):
    """Does so in the words of many projects, in a buffer for each weight."""

    def on_before_zero_grad(self, *args, **kwargs):
        for slow, own in zip(self.slow.parameters(), self.net.parameters(), strict=True):
            slow.data.mul_(0.9).add_(own.data, alpha=0.1)


class SmoothedStatistics(Plain):
    """Reads statistics that the training step has moved."""

    def layers(self):
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def on_before_zero_grad(self, optimizer):
        self.mean.mul_(0.5).add_(self.net[1].running_mean)
        self.log("size", self.mean.norm())


class Logs(Plain):
    def training_step(self, batch, batch_idx):
        self.log("both", 1.0, on_step=False, on_epoch=True)
        self.log("loss", loss := self.loss(batch))
        return loss

    def on_before_zero_grad(self, optimizer):
        self.log("norm", self.net[0].weight.norm())
        self.log("mean", self.net[0].weight.mean(), on_step=True, on_epoch=True)
        self.log("rate", optimizer.param_groups[0]["lr"], on_step=False, on_epoch=True)
        self.log("step", float(self.global_step + self.trainer.fit_loop.batch_idx), on_step=False, on_epoch=True)


class Counts(Plain):
    def __init__(self):
        super().__init__()
        self.calls, self.norms = 0, []

    def on_before_zero_grad(self, optimizer):
        self.calls += 1
        self.norms.append(self.net[0].weight.detach().norm())

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / (1 + self.calls)

    def on_train_epoch_end(self):
        self.log("norms", torch.stack(self.norms).sum())


class SetsToNone(Plain):
    """Clears gradients as the documentation of earlier versions of Lightning advises, and counts."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.calls += 1 + epoch + batch_idx
        optimizer.zero_grad(set_to_none=True)
        self.log("calls", float(self.calls), on_step=True, on_epoch=True)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / (1 + self.calls)


class CallsBase(Smoothed):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class BesideAnOwnStep(Counts):
    """Sees what the start of an own step has set."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.scale = 1.0 + batch_idx
        optimizer.step(closure=optimizer_closure)
        optimizer.param_groups[0]["lr"] *= 0.9

    def on_before_zero_grad(self, optimizer):
        super().on_before_zero_grad(optimizer)
        self.log("scale", self.scale * optimizer.param_groups[0]["lr"], on_step=False, on_epoch=True)


class Bounds(Plain):
    """Writes weights that no backward pass needs, by numbers of each client."""

    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            self.net[0].bias.clamp_(-0.05, 0.05)
            if self.net[2].bias.norm() > 0.3:
                self.net[2].bias.zero_()


AT_ONCE = [Smoothed, SmoothedByData, SmoothedStatistics, Logs, Counts, SetsToNone, CallsBase, Bounds]


@pytest.mark.parametrize("sizes", [[20] * 4, [10, 14, 22, 30]], ids=["even", "ragged"])
@pytest.mark.parametrize("kind", AT_ONCE)
def test_the_hook_runs_once_for_all(kind, sizes, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", sizes)
    stacks, said = check(kind, tmp_path)
    assert stacks
    assert not said_alone(said)


def test_it_runs_within_an_own_step(tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [20] * 4)
    stacks, said = check(BesideAnOwnStep, tmp_path)
    assert stacks == [4, 4]
    assert not said_alone(said)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("kind", AT_ONCE)
def test_it_runs_before_the_first_of_accumulated_passes(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [23] * 4)
    stacks, said = check(kind, tmp_path, accumulate_grad_batches=2)
    assert stacks
    assert not said_alone(said)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("kind", [Smoothed, Logs, Counts, Bounds])
@pytest.mark.parametrize(
    "algorithm",
    [
        FedSpa(density=0.5),
        FedDIP(),
        SCAFFOLD(),
        PerFedMask(),
        HeteroFL(),
        FedLPS(ratio="fixed"),
        FedMef(),
        APFL(),
        PFedMe(lam=1.0),
    ],
)
def test_methods_that_act_beside_it(algorithm, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [20] * 4)
    check(kind, tmp_path, algorithm=algorithm)


class ReadsGradients(Plain):
    """Reads the gradients of the batch before."""

    def on_before_zero_grad(self, optimizer):
        grad = self.net[0].weight.grad
        self.log("before", 0.0 if grad is None else grad.norm())


class ReadsParameters(Plain):
    def on_before_zero_grad(self, optimizer):
        for parameter in optimizer.param_groups[0]["params"]:
            self.log("norm", parameter.detach().norm())


class Zeroes(Plain):
    def on_before_zero_grad(self, optimizer):
        optimizer.zero_grad()


class KeepsZeros(Plain):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


class AddsGradientsUp(Plain):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class ClearsByTheModule(Plain):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.zero_grad()


class WritesWeights(Plain):
    """Writes weights of the first layer, which only the backward pass of several clients needs."""

    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            self.net[0].weight.add_(0.01)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ReadsGradients, "is followed by `on_before_zero_grad`, which reads the gradient (`grad`) of a tensor"),
        (ReadsParameters, "is followed by `on_before_zero_grad`, which reads the optimizer's parameters"),
        (Zeroes, "is followed by `on_before_zero_grad`, which reads the optimizer's parameters"),
        (KeepsZeros, "is followed by `optimizer_zero_grad`, which does something else than to set gradients to None"),
        (ClearsByTheModule, "is followed by `optimizer_zero_grad`, which reads the gradient (`grad`) of a tensor"),
        (WritesWeights, "writes into a tensor that the backward pass needs"),
    ],
)
def test_what_it_cannot_do_for_all_is_named(kind, words, tmp_path):
    check_alone(kind, words, tmp_path)


class Projects(odd.Images):
    """Projects kernels that the step has reshaped, in the second batch and only by `data`."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + self.net[0].weight.flatten(1).square().sum() ** 2

    def on_before_zero_grad(self, optimizer):
        if self.global_step == 1:
            self.net[0].weight.data.mul_(0.5)


def test_kernels_that_are_written_in_a_later_batch_undo_the_stack(tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [20] * 4)
    _, said = check(Projects, tmp_path)
    assert any("writes into a kernel of a convolution before the backward pass" in text for text in said)


def test_gradients_that_are_not_cleared_in_a_later_batch_undo_the_stack(tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [20] * 4)
    _, said = check(AddsGradientsUp, tmp_path)
    assert any("does something else than to set gradients to None" in text for text in said)
