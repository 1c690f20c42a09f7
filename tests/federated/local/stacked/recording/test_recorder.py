"""Stacks whose steps are recorded end with the bytes of those that call the training step for each batch."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

from helpers.algorithms import every_variant
from helpers.device import DEVICE
from helpers.networks import module_for
from lightning_sparsefl import FedAvg, FederatedTrainer, Federation, FedProx, FedRep
from lightning_sparsefl.data import IID, Dirichlet, FederatedDigits
from lightning_sparsefl.federated.local.stacked.fitting.fit import StackedFit
from lightning_sparsefl.federated.local.stacked.recording import recorder
from lightning_sparsefl.federated.local.stacked.recording.captured import CapturedOperations
from lightning_sparsefl.federated.local.stacked.recording.effects import Effects
from lightning_sparsefl.federated.local.stacked.recording.operations import Operations
from lightning_sparsefl.federated.local.stacked.recording.recorded_step import RecordedStep, TrainingPass
from lightning_sparsefl.federated.local.stacked.recording.tracing import NotRecordable, Unreadable
from lightning_sparsefl.models import SmallCNN


class Net(LightningModule):
    """Module that the cases change."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = self.layers()

    def layers(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.log("train_acc", (logits.argmax(1) == batch[1]).float().mean(), on_step=False, on_epoch=True)
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


@pytest.fixture
def repeated(captures):
    """The kind of the operations of each recorded step that was repeated, one entry for each batch."""
    kinds, before = [], RecordedStep.run

    def run(step, one):
        kinds.append(type(step.operations))
        before(step, one)

    with mock.patch.object(RecordedStep, "run", run):
        yield kinds
    assert captures or CapturedOperations not in kinds


def digits(folder, module, algorithm=None, *, partition=None, epochs=2, rounds=2, **more):
    trainer = FederatedTrainer(
        algorithm=algorithm or FedAvg(),
        federation=Federation(local_engine="stacked", clients_per_round=6, stack_size=3, **more.pop("federation", {})),
        accelerator=DEVICE.type,
        max_rounds=rounds,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=str(folder),
        seed=0,
        **more,
    )
    data = FederatedDigits(
        num_clients=6, batch_size=16, eval_split="test", partition=partition or IID(), test_per_client=10
    )
    trainer.fit(module, data)
    clients = (trainer.run_folder / "clients.csv").read_text()
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}, clients


def compare(folder, make, repeated, *args, **options):
    """Run with and without recordings; return how many steps were repeated."""
    federation = options.pop("federation", {})
    called, before = digits(
        folder / "called", make(), *args, federation={**federation, "record_steps": False}, **options
    )
    assert not repeated
    found, after = digits(folder / "recorded", make(), *args, federation=federation, **options)
    assert all(torch.equal(found[name], tensor) for name, tensor in called.items())
    assert after == before
    return len(repeated)


class WithNorm(Net):
    def layers(self):
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)
        )


class WithDropout(Net):
    def layers(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 10))


class WithPenalty(Net):
    def training_step(self, batch, batch_idx):
        weights = torch.tensor([1.0, 2.0] * 5, device=self.device)
        terms = [parameter.square().sum() for parameter in self.parameters() if parameter.requires_grad]
        return F.cross_entropy(self.net(batch[0]), batch[1], weight=weights) + 1e-3 * sum(terms)


class WithAdam(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class WithBuffers(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.register_buffer("order", torch.arange(10).flip(0))
        self.limits = torch.tensor([-4.0, 4.0])

    def training_step(self, batch, batch_idx):
        logits = (self.net(batch[0]) * self.scale)[:, self.order]
        limits = self.limits.to(self.device)
        return F.cross_entropy(logits.clamp(limits[0], limits[1]), batch[1])


class WritesIntoItsBatch(Net):
    def training_step(self, batch, batch_idx):
        batch[0].mul_(0.5)
        return super().training_step(batch, batch_idx)


class DecaysAWeight(Net):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[3].bias.mul_(0.99)
        return super().training_step(batch, batch_idx)


class WithMetrics(Net):
    def __init__(self):
        super().__init__()
        self.accuracy, self.mean = MulticlassAccuracy(10), MeanMetric()
        self.several = MetricCollection([MulticlassF1Score(10), MulticlassPrecision(10)])

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("acc", self.accuracy, on_step=True, on_epoch=True)
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log_dict(self.several(logits, batch[1]), on_step=False, on_epoch=True)
        return loss


MODULES = [
    *(Net, WithNorm, WithDropout, WithPenalty, WithAdam, WithBuffers),
    *(WithMetrics, WritesIntoItsBatch, DecaysAWeight),
]


@pytest.mark.slow_after_first("captures", "partition")
@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("partition", [Dirichlet(alpha=0.5), IID()], ids=["uneven", "even"])
def test_recordings_change_no_byte(kind, partition, tmp_path, repeated, captures):
    assert compare(tmp_path, kind, repeated, partition=partition) > 20
    copies_from_the_cpu = kind is WithBuffers and DEVICE.type == "cuda"  # which no graph does
    assert (captures and not copies_from_the_cpu) == (CapturedOperations in repeated)


@pytest.mark.slow_after_first("captures")
@pytest.mark.parametrize("algorithm", [FedProx(mu=0.1), FedRep(own=("net.3",))], ids=["FedProx", "FedRep"])
def test_recordings_change_no_byte_beside_callbacks_and_frozen_layers(algorithm, tmp_path, repeated):
    options = {"gradient_clip_val": 0.5, "partition": Dirichlet(alpha=0.5)}
    assert compare(tmp_path, Net, repeated, algorithm, **options) > 20


@pytest.mark.slow_after_first("captures")
@every_variant
def test_recordings_change_no_byte_of_any_method(algorithm, federation, repeated):
    found = []
    for records in (False, True):
        torch.manual_seed(1)
        module = module_for(algorithm)()
        options = {"local_engine": "stacked", "stack_size": 4, "capacities": [0.5, 1.0], "record_steps": records}
        federation(algorithm, folder=str(records), module=module, federation=options)
        found.append(module.state_dict())
        assert records or not repeated
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())


def test_images_of_a_network_of_the_package(tmp_path, repeated):
    def make():
        torch.manual_seed(1)
        return SmallCNN(num_classes=10, sample_shape=(1, 8, 8), depth=2, width=4, lr=0.05, momentum=0.9)

    assert compare(tmp_path, make, repeated, epochs=1) > 10


class ByNumber(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1.0 if batch_idx % 3 else 0.5)


class ByEpoch(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / (1 + self.current_epoch)


class ByStep(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / (1 + self.trainer.global_step)


class ByRate(Net):
    def configure_optimizers(self):
        vars(self)["own"] = super().configure_optimizers()
        return [self.own], [torch.optim.lr_scheduler.ExponentialLR(self.own, 0.5)]

    def training_step(self, batch, batch_idx):
        own = vars(self).get("own")  # the trial has an optimizer of its own
        return super().training_step(batch, batch_idx) * (own.param_groups[0]["lr"] if own else 0.1)


class ByScheduler(Net):
    """Reaches the rate past the trainer."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        vars(self)["own"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [self.own]

    def training_step(self, batch, batch_idx):
        own = vars(self).get("own")  # the trial has none
        return super().training_step(batch, batch_idx) * (own.get_last_lr()[0] if own else 0.1)


class ByKeptTrainer(Net):
    def configure_optimizers(self):
        vars(self)["own"] = self.trainer
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        own = vars(self).get("own")  # the trial has none
        return super().training_step(batch, batch_idx) / (1 + own.global_step if own else 1)


class ByMethod(ByScheduler):
    """Has a method of the scheduler only, and not the scheduler."""

    def configure_optimizers(self):
        optimizers, schedulers = super().configure_optimizers()
        vars(self)["own"] = SimpleNamespace(get_last_lr=schedulers[0].get_last_lr)
        return optimizers, schedulers


class ByConfiguration(Net):
    """Keeps the dict of the scheduler that it has returned."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        vars(self)["own"] = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}
        return {"optimizer": optimizer, "lr_scheduler": self.own}

    def training_step(self, batch, batch_idx):
        own = vars(self).get("own")  # the trial has none
        return super().training_step(batch, batch_idx) * (own["scheduler"].get_last_lr()[0] if own else 0.1)


class ByTrainerInAList(ByKeptTrainer):
    def configure_optimizers(self):
        vars(self)["own"] = SimpleNamespace(trainer=self.trainer)
        return Net.configure_optimizers(self)

    def training_step(self, batch, batch_idx):
        own = vars(self).get("own")  # the trial has none
        return Net.training_step(self, batch, batch_idx) / (1 + own.trainer.global_step if own else 1)


class ByLoop(ByKeptTrainer):
    def configure_optimizers(self):
        vars(self)["own"] = [self.trainer.fit_loop]
        return Net.configure_optimizers(self)

    def training_step(self, batch, batch_idx):
        own = vars(self).get("own")  # the trial has none
        return Net.training_step(self, batch, batch_idx) / (1 + own[0].epochs_processed if own else 1)


class Swallowing(Net):
    def training_step(self, batch, batch_idx):
        try:
            odd = bool(batch_idx % 2)
        except Exception:
            odd = False
        return super().training_step(batch, batch_idx) * (1.0 + odd)


UNSUITABLE = [
    *(ByNumber, ByEpoch, ByStep, ByRate, Swallowing),
    *(ByScheduler, ByMethod, ByConfiguration, ByKeptTrainer, ByTrainerInAList, ByLoop),
]


@pytest.mark.slow_after_first("captures")
@pytest.mark.parametrize("kind", UNSUITABLE, ids=lambda kind: kind.__name__)
def test_a_step_that_depends_on_more_than_batch_and_weights_is_called(kind, tmp_path, repeated):
    assert compare(tmp_path, kind, repeated) == 0


def test_a_recording_that_differs_from_the_next_call_is_dropped(tmp_path, repeated):
    """Here the number of calls is kept where nobody looks for it."""
    calls = []

    class Counting(Net):
        def training_step(self, batch, batch_idx):
            calls.append(1)
            return super().training_step(batch, batch_idx) * (1.0 if len(calls) < 8 else 1.0 / len(calls))

    def make():
        calls.clear()
        return Counting()

    with mock.patch.object(recorder, "_results_of", wraps=recorder._results_of) as compared:
        digits(tmp_path, make())
    steps = [call for call in compared.call_args_list if isinstance(call.args[0], RecordedStep)]
    assert steps
    assert len(repeated) == len(steps)  # no step besides those that were compared


def test_quotients_of_integers_have_the_type_of_the_run(tmp_path, repeated):
    class Ratio(Net):
        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            right = (logits.argmax(1) == batch[1]).sum() / (batch[1] >= 0).sum()
            self.log("right", right, on_step=False, on_epoch=True)
            return F.cross_entropy(logits, batch[1]) * (1 + right)

    assert compare(tmp_path, Ratio, repeated, precision="64-true") > 20


def test_a_number_of_updates_is_no_constant(tmp_path, repeated):
    class Counts(WithMetrics):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.mean.update(loss.detach())
            if self.mean.update_count == 7:
                self.mean.reset()
                return 2 * loss
            return loss

    compare(tmp_path, Counts, repeated, epochs=3)


def test_a_recording_that_fails_is_dropped(tmp_path, repeated):
    class Failing(RecordedStep):
        def run(self, one):
            for leaf in one.leaves.values():
                leaf.grad = torch.ones_like(leaf)
            raise RuntimeError

    failing = Failing(Operations(lambda: (), [], []), [], Effects([], [], []))
    with mock.patch.object(TrainingPass, "record", return_value=failing):
        assert compare(tmp_path, Net, repeated) == 0


def test_another_attribute_begins_new_recordings(tmp_path, repeated):
    """As if somebody had changed the module between two fits."""
    fits, before = [], StackedFit.run

    class Scaled(Net):
        factor = 1.0

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * self.factor

    def make():
        fits.clear()
        return Scaled()

    def run(fit):
        fits.append(len(repeated))
        vars(fit.module)["factor"] = 1.0 if len(fits) < 6 else 0.5  # two of the fits are the trial's
        before(fit)

    with mock.patch.object(StackedFit, "run", run):
        compare(tmp_path, make, repeated, rounds=4)
    assert 0 < fits[5] < len(repeated)  # before the change, and in all


def test_recordings_of_ever_new_shapes_end(tmp_path, repeated):
    with mock.patch.object(recorder, "_MOST", 1):
        some = compare(tmp_path / "some", Net, repeated, partition=Dirichlet(alpha=0.5))
    repeated.clear()
    assert 0 < some < compare(tmp_path / "all", Net, repeated, partition=Dirichlet(alpha=0.5))


def test_whatever_is_done_with_a_stand_in_is_remembered():
    uses = [bool, int, float, str, repr, len, iter, hash, list, "{}".format, lambda x: x + 1, lambda x: 1 - x]
    uses += [
        lambda x: x == 1,
        lambda x: x < 1,
        lambda x: x % 2,
        lambda x: x.current_epoch,
        lambda x: x[0],
        lambda x: [0][x],
    ]
    for use in uses:
        stand_in = Unreadable()
        with pytest.raises(NotRecordable):
            use(stand_in)
        assert stand_in.is_read
    assert not Unreadable().is_read
