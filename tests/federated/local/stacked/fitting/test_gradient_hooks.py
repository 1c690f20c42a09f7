"""Hooks of a module that see gradients: for all clients of a stack at once, or for each with views of its tensors."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch.nn import functional as F
from torchmetrics import MeanMetric

from lightning_sparsefl import (
    APFL,
    CS,
    FLASC,
    SCAFFOLD,
    FedBABU,
    FedDIP,
    FedDST,
    FedLPS,
    FedProx,
    FedSpa,
    HeteroFL,
    PerFedAvg,
    PerFedMask,
    PFedMe,
    PruneTrain,
    SpaFL,
)
from lightning_sparsefl.federated.local.stacked.fitting import fit
from lightning_sparsefl.federated.local.stacked.logs import SeesOneClient
from lightning_sparsefl.federated.local.stacked.states.findings import Findings
from tests.federated.local.stacked import test_odd_modules as odd
from tests.federated.local.stacked.test_odd_modules import Plain, check, check_alone, check_found, said_alone


class LogsNorms(Plain):
    """Logs the norm of each gradient, as the documentation of Lightning shows."""

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self.net, norm_type=2))


class ReadsNumbers(Plain):
    """Reads numbers out of gradients, which several clients at once do not have."""

    def on_after_backward(self):
        norms = [float(parameter.grad.norm()) for parameter in self.parameters() if parameter.grad is not None]
        self.log("largest", max(norms), on_step=False, on_epoch=True)
        self.log("steps", float(self.global_step))


class Clips(Plain):
    """Clips adaptively, by the norms of the steps before."""

    def __init__(self):
        super().__init__()
        self.norms = []

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        total = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.norms.append(total)
        limit = 0.5 * float(sum(self.norms)) / len(self.norms)
        self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")


class ClipsByValue(Plain):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        assert gradient_clip_algorithm is None
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")


class Centralizes(Plain):
    """Replaces gradients, and divides those of a group by its learning rate."""

    def on_after_backward(self):
        for layer in (self.net[0], self.net[2]):
            layer.weight.grad = layer.weight.grad - layer.weight.grad.mean(1, keepdim=True)

    def on_before_optimizer_step(self, optimizer):
        assert isinstance(optimizer, torch.optim.Optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(1 + group["lr"])


class Decoupled(Plain):
    """Adds a term of its own to the gradients, and counts in a metric object."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()
        self.seen = 0

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.seen += 1
        for name, parameter in self.named_parameters():
            if name.endswith("weight"):
                parameter.grad.add_(parameter, alpha=1e-2 * self.seen)
        self.mean.update(self.net[0].weight.grad.norm())
        self.log("mean", self.mean, on_step=False, on_epoch=True)


class NotTrained(Plain):
    """Has a layer without gradients."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)
        self.unused = torch.nn.Linear(3, 2)

    def on_before_optimizer_step(self, optimizer):
        assert self.net[0].weight.grad is None
        assert self.unused.weight.grad is None
        assert sum(parameter.requires_grad for parameter in self.parameters()) == 4
        self.log("slope", self.net[2].weight.grad.norm())


class StepsItsScheduler(Plain):
    """Steps a scheduler by the epoch, as those of other packages need it."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def lr_scheduler_step(self, scheduler, metric):
        assert metric is None
        if self.current_epoch == 0:
            scheduler.step()


class ClipsAsLightning(Plain):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class Accumulates(Plain):
    """Keeps a running mean of the gradients in an attribute, steps along it, and normalizes one by its layer."""

    def __init__(self):
        super().__init__()
        self.slopes = {}

    def on_before_optimizer_step(self, optimizer):
        for name, parameter in self.named_parameters():
            mean = self.slopes.get(name)
            self.slopes[name] = parameter.grad.clone() if mean is None else 0.9 * mean + 0.1 * parameter.grad
            parameter.grad = self.slopes[name] + 0.5 * parameter.grad.data
        weight = self.net[2].weight
        weight.grad /= weight.grad.detach().abs().max() + weight.data.norm()
        self.log("slopes", torch.tensor([slope.norm() for slope in self.slopes.values()]).sum())


class KeepsWhatItAssigns(Plain):
    """Assigns a momentum that it keeps, which the next hook then clips."""

    def __init__(self):
        super().__init__()
        self.momenta = {}

    def on_after_backward(self):
        for name, parameter in self.named_parameters():
            self.momenta[name] = 0.9 * self.momenta.get(name, torch.zeros_like(parameter)) + parameter.grad
            parameter.grad = self.momenta[name]

    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Swaps(Plain):
    def layers(self):
        linear = torch.nn.Linear
        return torch.nn.Sequential(linear(8, 8), torch.nn.Tanh(), linear(8, 8), torch.nn.Tanh(), linear(8, 4))

    def on_after_backward(self):
        first, second = self.net[0].weight, self.net[2].weight
        first.grad, second.grad = second.grad, first.grad


class SwapsAndReads(Swaps):
    def on_after_backward(self):
        if float(self.net[0].weight.grad.norm()) > 0:
            super().on_after_backward()


class ClipsAScalar(ClipsAsLightning):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs):
        return super().forward(inputs) * self.scale


class ReadsKernels(odd.Images):
    """Reads flat kernels and gradients, of which a stack makes copies."""

    def on_after_backward(self):
        grads = torch.cat([parameter.grad.flatten() for parameter in self.parameters()])
        kernels = self.net[0].weight.view(4, -1).norm(dim=1) + self.net[3].weight.grad.reshape(4, -1).norm(dim=1)
        self.log("sizes", grads.norm() + kernels.sum())


AT_ONCE = [
    LogsNorms, ClipsByValue, ClipsAsLightning, ClipsAScalar, Centralizes, Decoupled, Accumulates, KeepsWhatItAssigns,
    Swaps, ReadsKernels, NotTrained, StepsItsScheduler,
]  # fmt: skip


@pytest.fixture
def for_each(monkeypatch):
    """Names of the hooks that were called for one client after another."""
    names, before = [], fit.call_for_each
    monkeypatch.setattr(
        fit, "call_for_each", lambda name, *args, **options: (names.append(name), before(name, *args, **options))
    )
    return names


@pytest.mark.parametrize("sizes", [list(odd.SIZES), [20] * 4], ids=["ragged", "even"])
@pytest.mark.parametrize("kind", [*AT_ONCE, ReadsNumbers, Clips, SwapsAndReads])
def test_a_hook_sees_the_gradients_of_each_client(kind, sizes, for_each, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", sizes)
    stacks, said = check(kind, tmp_path)
    assert stacks == [4, 4], said
    assert not said_alone(said)
    assert bool(for_each) == (kind not in AT_ONCE)


class Alternates(Plain):
    """Changes attributes back at every second call, and reads numbers, so that there is one call for each client."""

    def __init__(self):
        super().__init__()
        self.now, self.next, self.layers_in_turn = 1.0, 0.5, deque(["net.0", "net.2"])

    def on_after_backward(self):
        if self.current_epoch and float(self.net[0].weight.grad.norm()) > 0:
            for name, parameter in self.named_parameters():
                parameter.grad.mul_(self.now if name.startswith(self.layers_in_turn[0]) else 0.5)
        self.now, self.next = self.next, self.now
        self.layers_in_turn.rotate(1)


class AlternatesLayers(Plain):
    def layers(self):
        return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4), torch.nn.Dropout(0.0))

    def on_after_backward(self):
        if float(self.net[0].weight.grad.norm()) > 0:
            self.net[3].train(not self.net[3].training)
            if self.net[3].training:
                self.net[0].weight.grad.mul_(0.5)


@pytest.mark.parametrize("kind", [Alternates, AlternatesLayers])
def test_what_every_second_call_changes_back_is_found(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [20] * 4)
    check(kind, tmp_path)


class WritesAttributesByData(Plain):
    """Divides gradients by a mean of their squares, which it writes without a new version."""

    def __init__(self):
        super().__init__()
        self.squares = torch.zeros(6, 8, dtype=torch.float64)

    def on_fit_start(self):
        self.squares.data.zero_()

    def on_after_backward(self):
        grad = self.net[0].weight.grad
        if float(grad.norm()) > 0:
            self.squares.data.mul_(0.9).add_(grad**2, alpha=0.1)
        if self.global_step >= 2:
            grad.div_(self.squares.sqrt() + 0.1)


def test_numbers_that_are_written_without_a_version_are_found(tmp_path):
    check_alone(WritesAttributesByData, "writes into the tensor `self.squares`", tmp_path)


class ReadsLater(Plain):
    """Reads a number at the third step, which the trial does not see."""

    def on_before_optimizer_step(self, optimizer):
        if self.global_step >= 3 and float(self.net[0].weight.grad.norm()) > 0:
            self.net[0].weight.grad.mul_(0.5)


def test_a_hook_that_reads_a_number_later_is_called_for_each_client_of_that_stack(for_each, tmp_path):
    stacks, said = check(ReadsLater, tmp_path)
    assert stacks == [4, 4], said
    assert not said_alone(said)
    assert any("called for each of its clients" in text for text in said)
    assert for_each


def test_a_hook_that_is_found_in_a_fit_is_one_of_that_fit_alone():
    findings, runs = Findings(), []

    def run():
        runs.append(set(findings.hooks))
        if "on_after_backward" not in findings.hooks:
            raise SeesOneClient("reads a number", "on_after_backward")

    findings.settled = True
    findings.repeat(run)
    findings.repeat(run)
    assert runs == [set(), {"on_after_backward"}] * 2
    findings.settled = False
    findings.repeat(run)
    findings.repeat(run)
    assert runs[4:] == [set(), {"on_after_backward"}, {"on_after_backward"}]


class WritesData(Plain):
    """Writes gradients and weights by `data`, of which no version tells, and replaces gradients by it."""

    def on_after_backward(self):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.data.add_(torch.cos(parameter.detach()), alpha=0.1)
                if self.global_step > 1 and parameter.grad.norm() > 0.05:
                    parameter.grad.data = parameter.grad.data * 0.5

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.data.mul_(0.97)


FROZEN = [FedSpa(), FedBABU(), PerFedMask(), FedDST(density=0.5)]


@pytest.mark.slow_after_first
@pytest.mark.parametrize("algorithm", FROZEN, ids=lambda algorithm: type(algorithm).__name__)
def test_masks_and_frozen_layers_hold_what_a_hook_writes_by_data(algorithm, tmp_path):
    stacks, said = check(WritesData, tmp_path, algorithm=algorithm)
    assert stacks
    assert not said_alone(said)


class WritesFrozenData(Plain):
    """Writes the first layer by `data`, also where it is frozen and all clients share it."""

    def on_before_optimizer_step(self, optimizer):
        self.net[0].weight.data.mul_(0.97)
        self.log("norm", self.net[0].weight.norm())


@pytest.mark.slow_after_first
@pytest.mark.parametrize("algorithm", FROZEN, ids=lambda algorithm: type(algorithm).__name__)
def test_frozen_layers_hold_what_a_hook_writes_once_for_all(algorithm, tmp_path):
    check(WritesFrozenData, tmp_path, algorithm=algorithm)


class ListsSlopes(Plain):
    """Reads a list of the step in a hook, and appends to another one there."""

    def __init__(self):
        super().__init__()
        self.losses, self.norms = [], []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss * (1 + 0.1 * sum(self.norms)) if self.norms else loss

    def on_before_optimizer_step(self, optimizer):
        self.losses[-1].mul_(0.5)
        self.log("losses", torch.stack(self.losses).mean())
        if self.global_step % 2:
            self.norms.append(self.net[0].weight.grad.norm())


def test_lists_of_steps_and_hooks_are_those_of_each_client(tmp_path):
    stacks, said = check(ListsSlopes, tmp_path)
    assert stacks == [4, 4]
    assert not said_alone(said)


class Noisy(LogsNorms):
    """Writes gradients under masks, and logs what has become of the weights."""

    def on_after_backward(self):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(0.01)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(0.01)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("zeros", sum((parameter == 0).sum() for parameter in self.parameters()).double())


ALGORITHMS = [
    FedSpa(), FedDIP(), FedLPS(ratio="fixed"), PerFedMask(), FedProx(), SCAFFOLD(), APFL(), PFedMe(lam=1.0),
    PerFedAvg(), CS(), HeteroFL(), SpaFL(), FLASC(adapters=("*",)), PruneTrain(),
]  # fmt: skip
SLOW = [pytest.param(algorithm, marks=pytest.mark.slow) for algorithm in ALGORITHMS[1:]]


@pytest.mark.parametrize("algorithm", [ALGORITHMS[0], *SLOW], ids=lambda algorithm: type(algorithm).__name__)
def test_hooks_see_the_gradients_that_callbacks_leave(algorithm, tmp_path):
    stacks, said = check(Noisy, tmp_path, algorithm=algorithm)
    assert stacks, said
    assert not said_alone(said)


class WritesWeights(Plain):
    def on_before_optimizer_step(self, optimizer):
        with torch.no_grad():
            self.net[0].weight.mul_(0.99)


class AveragesInABuffer(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def on_after_backward(self):
        self.mean.mul_(0.9).add_(self.net[0].weight.grad.norm(), alpha=0.1)


class SetsTheRate(Plain):
    def on_before_optimizer_step(self, optimizer):
        optimizer.param_groups[0]["lr"] = float(self.net[0].weight.grad.norm())


class ReadsTheState(Plain):
    def on_before_optimizer_step(self, optimizer):
        self.log("known", float(len(optimizer.state)))


class RemovesGradients(Plain):
    def on_after_backward(self):
        if self.net[0].weight.grad.norm() > 0:
            self.net[0].zero_grad()


class AddsNoise(Plain):
    def on_after_backward(self):
        self.net[0].weight.grad.add_(torch.randn_like(self.net[0].weight))


class Freezes(Plain):
    def on_after_backward(self):
        self.net[0].eval()


class KeepsNumbers(Plain):
    def __init__(self):
        super().__init__()
        self.last = 0.0

    def on_after_backward(self):
        self.last = float(self.net[0].weight.grad.norm())


class ReadsLogged(Plain):
    def on_before_optimizer_step(self, optimizer):
        self.log("before", self.trainer.callback_metrics.get("train_loss", 0.0))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (WritesWeights, "is followed by `on_before_optimizer_step`, which writes into `net.0.weight`"),
        (AveragesInABuffer, "is followed by `on_after_backward`, which writes into `mean`"),
        (SetsTheRate, "which sets options of the optimizer, which all clients share"),
        (ReadsTheState, "reads the optimizer's state, which is that of all clients"),
        (RemovesGradients, "is followed by `on_after_backward`, which removes a gradient"),
        (AddsNoise, "draws random numbers of torch"),
        (Freezes, "changes layers of the module, their modes or their hooks, which all clients share"),
        (KeepsNumbers, "keeps other values in attributes for other clients"),
        (ReadsLogged, "asks for `trainer.callback_metrics`"),
    ],
)
def test_what_a_hook_cannot_do_for_one_client_is_named(kind, words, tmp_path):
    check_alone(kind, words, tmp_path)


class ReplacesWeights(Plain):
    def on_before_optimizer_step(self, optimizer):
        if self.global_step > 2:
            self.net[0].weight.data = self.net[0].weight.data * 0.9


class RegistersAHook(Plain):
    def on_after_backward(self):
        if self.global_step == 1:
            self.net[0].weight.register_hook(lambda grad: grad * 0.5)


class DeletesAGradient(Plain):
    def on_after_backward(self):
        if self.global_step > 1:
            del self.net[0].weight.grad


class WritesFlatKernels(odd.Images):
    def on_after_backward(self):
        if self.global_step > 1:
            self.net[0].weight.grad.view(4, -1).mul_(0.5)


class WritesFlatGradients(odd.Images):
    def on_after_backward(self):
        if self.global_step > 1 and float(self.net[0].weight.grad.norm()) > 0:
            self.net[0].weight.grad.flatten(1).mul_(0.5)


class KeepsWhatEachAssigns(KeepsWhatItAssigns):
    def on_after_backward(self):
        if self.global_step > 1 and float(self.net[0].weight.grad.norm()) > 0:
            super().on_after_backward()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (DeletesAGradient, "removes a gradient"),
        (WritesFlatKernels, "writes into a reshaped kernel of a convolution or its gradient"),
        (WritesFlatGradients, "writes into a reshaped kernel of a convolution or its gradient"),
        (KeepsWhatEachAssigns, "assigns a gradient that an attribute has as well"),
    ],
)
def test_what_a_hook_does_to_gradients_later_is_found(kind, words, tmp_path):
    check_found(kind, words, tmp_path)


@pytest.mark.parametrize(
    ("kind", "words"),
    [(ReplacesWeights, "replaces the numbers of a weight"), (RegistersAHook, "registers a hook for the gradient")],
)
def test_what_a_hook_does_later_is_found(kind, words, tmp_path):
    check_found(kind, words, tmp_path)


class FailsLater(Plain):
    """Asks the client with the most samples for a gradient that it does not have."""

    def on_after_backward(self):
        if self.global_step == 3:
            self.net[2].zero_grad()


def test_a_stack_is_undone_where_a_later_step_differs(tmp_path):
    sizes, said = check(FailsLater, tmp_path)
    assert any("removes a gradient" in text for text in said), said
    assert len(sizes) < 4
