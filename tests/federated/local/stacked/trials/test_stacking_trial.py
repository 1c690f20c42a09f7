"""Modules and settings that cannot be stacked: the reason is found before the run, and clients train as ever."""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Timer
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics.classification import MulticlassAccuracy

from helpers.networks import Classifier
from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.callbacks import MetaStep
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import ClientFailed
from lightning_sparsefl.federated.local import choice
from lightning_sparsefl.federated.local.stacked import functorch, worker
from lightning_sparsefl.federated.local.stacked.recording.recorder import PassRecorder
from lightning_sparsefl.federated.local.stacked.worker import StackedWorker


class Net(Classifier):
    """Classifier whose training step ends as `finish` says."""

    def __init__(self, finish=None, optimize=None):
        super().__init__()
        self.finish, self.optimize = finish, optimize
        self.net[3].p = 0.0
        self.metric = MulticlassAccuracy(4)
        self.register_buffer("mean_loss", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.seen, self.losses = 0, []
        self.kept = (self.net[0].weight,)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.finish is None else self.finish(self, loss, batch)

    def configure_optimizers(self):
        return super().configure_optimizers() if self.optimize is None else self.optimize(self)


def keeps(net, loss, batch):
    net.last = loss
    return loss


def assigns(net, loss, batch):
    net.mean_loss = 0.9 * net.mean_loss + loss.detach()
    return loss


def writes(net, loss, batch):
    net.mean_loss.mul_(0.9).add_(loss.detach())
    return loss


def counts(net, loss, batch):
    net.seen += 1
    return loss / net.seen


def collects(net, loss, batch):
    net.losses.append(0)
    return loss / len(net.losses)


def counts_in_a_buffer(net, loss, batch):
    net.steps.add_(1)
    return loss / net.steps


def updates(net, loss, batch):
    net.metric.update(net(batch[0]), batch[1])
    return loss


def logs_metric(net, loss, batch):
    net.metric(net(batch[0]), batch[1])
    net.log("acc", net.metric)
    return loss


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


STEPS = {
    "reads a number": (lambda net, loss, batch: loss * loss.item(), "reads a number out of a tensor"),
    "compares": (lambda net, loss, batch: loss * (1 + torch.allclose(loss, 2 * loss)), "compares tensors"),
    "assigns": (assigns, "assigns the buffer `mean_loss` instead of writing into it"),
    "counts in a buffer": (counts_in_a_buffer, "writes into the buffer `self.steps`, which all clients share"),
    "own function": (lambda net, loss, batch: Square.apply(loss), "uses an `autograd.Function` without a batched form"),
    "numpy": (lambda net, loss, batch: loss * float(loss.detach().numpy()), "training_step"),
    "shape by value": (
        lambda net, loss, batch: loss + batch[0][batch[1] > 1].sum(),
        "makes tensors whose shape depends on values",
    ),
    "kept elsewhere": (
        lambda net, loss, batch: loss + net.kept[0].square().sum(),
        "computes with parameters that it keeps",
    ),
    "several losses": (lambda net, loss, batch: loss.expand(2), "training_step"),
}
STACKED = {
    "plain": None,
    "writes a buffer": writes,
    "updates a metric": updates,
    "logs a metric": logs_metric,
    "L2 term": lambda net, loss, batch: loss + 1e-3 * sum(p.square().sum() for p in net.parameters()),
    "keeps": keeps,
    "counts": counts,
    "collects": collects,
    "one-hot": lambda net, loss, batch: loss + F.mse_loss(net(batch[0]), F.one_hot(batch[1], 4).float()),
    "a mapping": lambda net, loss, batch: {"loss": loss, "size": len(batch[1])},
    "where": lambda net, loss, batch: torch.where(loss > 1, loss, 2 * loss),
    "noise": lambda net, loss, batch: loss + 0 * torch.randn_like(loss),
}


def fit(folder, module, **options):
    """Run one round; return the messages."""
    federation = Federation(
        **{"clients_per_round": 4, "local_engine": "stacked", "stack_size": 4, **options.pop("federation", {})}
    )
    choice._messages.clear()
    worker._messages.clear()
    data = FederatedBlobs(
        num_train=160,
        num_test=40,
        num_clients=4,
        num_classes=4,
        dim=8,
        batch_size=8,
        eval_split="test",
        drop_last=True,
        **options.pop("data", {}),
    )
    trainer = FederatedTrainer(
        algorithm=FedAvg(),
        federation=federation,
        accelerator="cpu",
        max_rounds=1,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=str(folder),
        seed=0,
        **options,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(module, data)
    return trainer


@pytest.fixture
def stacked(monkeypatch):
    """The sizes of the stacks, without those of the trial."""
    sizes, before = [], StackedWorker._fit_group
    monkeypatch.setattr(
        StackedWorker, "_fit_group", lambda self, group: (sizes.append(len(group)), before(self, group))
    )
    return sizes


@pytest.mark.parametrize("case", STEPS)
def test_a_step_that_cannot_be_stacked_is_named_and_trains(case, tmp_path, stacked):
    finish, words = STEPS[case]
    trains = contextlib.nullcontext() if case != "several losses" else pytest.raises(ClientFailed)
    with pytest.warns(UserWarning, match="Clients train one after another, since ") as said, trains:
        fit(tmp_path, Net(finish))
    assert words in next(str(each.message) for each in said if "one after another" in str(each.message))
    assert stacked == []


class Recurrent(Net):
    """Classifier with an LSTM, for which vmap has no rule."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(x.flatten(1)[:, None])[0][:, -1]


def test_an_lstm_trains_one_client_after_another(tmp_path, stacked):
    with pytest.warns(UserWarning, match=r"`Recurrent.training_step` uses `aten::lstm.input`, which has no batched"):
        fit(tmp_path, Recurrent())
    assert stacked == []


@pytest.mark.parametrize("case", STACKED)
def test_a_step_that_can_be_stacked_is(case, tmp_path, stacked):
    fit(tmp_path, Net(STACKED[case]))
    assert stacked == [4]


class Hooked(Net):
    def on_before_backward(self, loss):
        loss.data.mul_(2)


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()


class Averaging(Net):
    def __init__(self):
        super().__init__()
        self.net[1] = nn.BatchNorm1d(16, momentum=None)


class Sgd(SGD):
    """A user's optimizer."""


class Scripted(Net):
    def __init__(self):
        super().__init__()
        self.net[0] = torch.jit.script(self.net[0])


MODULES = {
    "scripted": (Scripted, "`net.0` is a traced or scripted module"),
    "hook": (Hooked, "`Hooked` overrides `on_before_backward`"),
    "manual": (Manual, "`Manual` optimizes manually"),
    "averages": (Averaging, "`net.1` averages over all batches"),
    "own optimizer": (lambda: Net(optimize=lambda net: Sgd(net.parameters(), lr=0.1)), "followed by the optimizer Sgd"),
    "plateau": (
        lambda: Net(
            optimize=lambda net: {
                "optimizer": (optimizer := SGD(net.parameters(), lr=0.1)),
                "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "train_loss"},
            }
        ),
        "followed by a ReduceLROnPlateau",
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:FLOPs are not counted")
@pytest.mark.parametrize("case", MODULES)
def test_a_module_that_cannot_be_stacked_is_named(case, tmp_path, stacked):
    make, words = MODULES[case]
    with pytest.warns(UserWarning, match=words):
        fit(tmp_path, make())
    assert stacked == []


SETTINGS = {
    "accumulate_grad_batches": (
        {"accumulate_grad_batches": 2, "client_callbacks": [MetaStep(0.1)]},
        "`trainer.client_callbacks` has a MetaStep, and `trainer.accumulate_grad_batches` is 2",
    ),
    "limit_train_batches": ({"limit_train_batches": 0}, "`trainer.limit_train_batches` is 0"),
    "timeout": ({"federation": {"client_timeout": 100.0}}, "each has a time limit of its own"),
    "precision": ({"precision": "bf16-mixed"}, "`trainer.precision` is 'bf16-mixed'"),
    "callbacks": ({"client_callbacks": [Timer()]}, "`trainer.client_callbacks` has a Timer"),
    "validate": ({"validate_locally": True, "data": {"val_fraction": 0.2}}, "`trainer.validate_locally` is set"),
    "workers": ({"data": {"num_workers": 1}}, "loader"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting_that_cannot_be_stacked_is_named(case, tmp_path, stacked):
    options, words = SETTINGS[case]
    with pytest.warns(UserWarning, match=words):
        fit(tmp_path, Net(), **options)
    assert stacked == []


def test_a_torch_without_a_private_name_trains_one_after_another(tmp_path, stacked, monkeypatch):
    monkeypatch.setattr(functorch, "_NAMES", (*functorch._NAMES, "_gone"))
    with pytest.warns(UserWarning, match=r"has no `torch._C._functorch._gone`"):
        fit(tmp_path, Net())
    assert stacked == []


def test_a_stack_that_is_out_of_memory_is_halved(tmp_path, stacked, monkeypatch):
    before, cleared = StackedWorker._fit_stack, mock.Mock()
    monkeypatch.setattr(PassRecorder, "clear", cleared)

    def small(self, requests):
        if len(requests) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return before(self, requests)

    monkeypatch.setattr(StackedWorker, "_fit_stack", small)
    with pytest.warns(UserWarning, match=r"A stack of 4 clients does not fit.*lower `federation.stack_size`"):
        fit(tmp_path, Net())
    assert stacked == [4, 2, 2]
    assert cleared.call_count == 2  # the recordings of fits, and those of evaluations


def test_a_client_that_fails_in_a_stack_fails_alone(tmp_path, stacked):
    def bad(net, loss, batch):
        if batch[0].shape[0] == 8 and not torch._C._functorch.is_batchedtensor(batch[0]) and net.trainer.current_epoch:
            raise ValueError("broken")
        if net.trainer.current_epoch:
            raise RuntimeError("somewhere in the stack")
        return loss

    with pytest.warns(UserWarning, match="4 clients train one after another"), pytest.raises(Exception, match="broken"):
        fit(tmp_path, Net(bad), max_epochs=2)


@pytest.mark.parametrize("size", [0, -1, 1.5, "many"])
def test_a_stack_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match=r"`federation.stack_size` is .*; expected 'auto' or a whole number >= 1"):
        Federation(stack_size=size)


@pytest.mark.parametrize(("kind", "sizes"), [("cpu", [3, 6, 25, 25]), ("cuda", [25, 25, 50, 50])])
def test_the_automatic_size_is_a_function_of_model_cohort_and_device(kind, sizes, tmp_path, monkeypatch):
    memory = SimpleNamespace(total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)

    class Probe(StackedWorker):
        sizes = []  # noqa: RUF012

        def stack_size(self, cohort):
            with mock.patch.object(self, "device", torch.device(kind)):
                self.sizes.extend(StackedWorker.stack_size(self, number) for number in (4, 12, 100, 1000))
            return 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_sparsefl.federated.local.choice.StackedWorker", Probe)
        fit(tmp_path, Net(), federation={"stack_size": "auto"})
    assert Probe.sizes == sizes
