"""The trial of a step tells rounding from errors, by double precision, and leaves the module as it was."""

from __future__ import annotations

import contextlib

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_sparsefl.data import FederatedBlobs, FederatedDataset
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.local_options import LocalOptions
from lightning_sparsefl.federated.local.stacked.rules import LayerRules
from lightning_sparsefl.federated.local.stacked.states.findings import Findings
from lightning_sparsefl.federated.local.stacked.trials import stacking_trial as trial_module
from lightning_sparsefl.federated.local.stacked.trials.stacking_trial import StackingTrial
from lightning_sparsefl.federated.local.stacked.trials.step_trial import ALONE, StepTrial, in_double
from lightning_sparsefl.federated.local.worker import ClientWorker, LocalWork


class Plain(LightningModule):
    """Module whose loss the cases change."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Penalized(Plain):
    """Module with a penalty on its weights that is twice as large in a stack."""

    def __init__(self, strength=1e-5):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
        self.strength = strength

    def training_step(self, batch, batch_idx):
        scale = 2 if torch._C._functorch.is_batchedtensor(batch[0]) else 1
        penalty = sum(weight.square().sum() for weight in self.parameters())
        return super().training_step(batch, batch_idx) + scale * self.strength * penalty


class Single(Plain):
    """Module that computes in single precision, whatever that of the run."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0].float()), batch[1])


def worker_of(module, data=None):
    data = data or FederatedBlobs(num_train=64, num_test=16, num_clients=2, num_classes=4, dim=8, batch_size=16)
    data.setup()
    engine = FastEngine(Fabric(accelerator="cpu", devices=1), LocalOptions())
    return ClientWorker(module, data, engine, LocalWork(), torch.device("cpu"))


def with_linear(monkeypatch, change):
    """Let a function change what linear layers of a stack return in single precision."""
    before = LayerRules.__torch_function__

    def other(self, func, types, args=(), kwargs=None):
        output = before(self, func, types, args, kwargs)
        return change(output) if func is F.linear and args[1].dtype is torch.float32 else output

    monkeypatch.setattr(LayerRules, "__torch_function__", other)


class NeverDouble(Plain):
    """Module that cannot be moved to double precision, as on devices without it."""

    def double(self):
        raise TypeError("this device has no float64")


@pytest.mark.parametrize("kind", [Plain, Single, NeverDouble])
def test_a_step_can_be_stacked(kind):
    assert StackingTrial(worker_of(kind())).reason is None


def test_a_step_that_rounds_otherwise_in_single_precision_can_be_stacked(monkeypatch):
    with_linear(monkeypatch, lambda output: output + 0.01 * output.detach().sin())  # as rounding in a deep network
    worker = worker_of(Penalized(strength=0.0))
    step = StepTrial(worker, Findings())
    alone, stacked = step.alone(), step.stacked()
    assert "otherwise for several clients" in step.clause(stacked, alone, ALONE)
    assert StackingTrial(worker).reason is None


def test_an_error_below_the_tolerance_of_single_precision_is_found():
    worker = worker_of(Penalized())
    step = StepTrial(worker, Findings())
    alone, stacked = step.alone(), step.stacked()
    assert step.clause(stacked, alone, ALONE) is None
    assert "otherwise for several clients at once than for one" in StackingTrial(worker).reason


def test_a_step_that_has_no_double_precision_keeps_the_tolerance_of_single_precision():
    class Wrong(Single):
        def training_step(self, batch, batch_idx):
            scale = 1.1 if torch._C._functorch.is_batchedtensor(batch[0]) else 1.0
            return scale * super().training_step(batch, batch_idx)

    assert "otherwise for several clients at once than for one" in StackingTrial(worker_of(Wrong())).reason


def test_a_wrong_kernel_of_single_precision_is_found(monkeypatch):
    with_linear(monkeypatch, lambda output: 2 * output)
    assert "otherwise for several clients at once than for one" in StackingTrial(worker_of(Plain())).reason


class WrongForLarge(Plain):
    """Module whose loss is another one in a stack for inputs that are large."""

    def training_step(self, batch, batch_idx):
        wrong = F.relu(batch[0].mean() - 50) if torch._C._functorch.is_batchedtensor(batch[0]) else 0.0
        return super().training_step(batch, batch_idx) * (1 + wrong)


class TwoClients(FederatedDataset):
    """Data of two clients, of whom the second has 16 samples with large inputs."""

    def __init__(self, first):
        inputs = torch.cat([torch.randn(first, 8), 100 + torch.randn(16, 8)])
        self.first = first
        samples = TensorDataset(inputs, torch.arange(len(inputs)) % 4)
        super().__init__(samples, samples, num_clients=2, batch_size=8)

    def assign(self, labels, seed):
        return list(torch.arange(self.first + 16).split([self.first, 16]))


@pytest.mark.parametrize(("first", "found"), [(8, True), (7, False)])
def test_the_second_client_has_data_of_its_own_if_its_first_batch_is_as_large(first, found):
    """The data of client 0 show nothing."""
    assert (StackingTrial(worker_of(WrongForLarge(), TwoClients(first))).reason is not None) == found


def test_the_module_is_left_as_it_was():
    module = Plain()
    worker = worker_of(module)
    before = {name: (tensor, tensor.data_ptr(), tensor.clone()) for name, tensor in module.state_dict().items()}
    assert StackingTrial(worker).reason is None
    after = module.state_dict()
    for name, (tensor, place, value) in before.items():
        assert after[name].dtype == tensor.dtype
        assert after[name].data_ptr() == place
        assert torch.equal(after[name], value)
    assert module.dtype is torch.float32
    assert all(parameter.grad is None for parameter in module.parameters())


def test_double_precision_ends_with_an_error():
    module = Plain()
    weight, buffers = module.net[1].weight, dict(module.net[2]._buffers)
    with contextlib.suppress(KeyError), in_double(module):
        assert module.net[1].weight.dtype is module.net[2].running_mean.dtype is torch.float64
        raise KeyError
    assert module.net[1].weight is weight
    assert weight.dtype is torch.float32
    assert all(module.net[2]._buffers[name] is buffer for name, buffer in buffers.items())


def test_double_precision_is_not_tried_in_a_run_of_it(monkeypatch):
    monkeypatch.setattr(trial_module, "in_double", None)
    data = worker_of(Plain()).data
    engine = FastEngine(Fabric(accelerator="cpu", devices=1, precision="64-true"), LocalOptions())
    worker = ClientWorker(Penalized().double(), data, engine, LocalWork(), torch.device("cpu"))
    assert "otherwise for several clients at once than for one" in StackingTrial(worker).reason
