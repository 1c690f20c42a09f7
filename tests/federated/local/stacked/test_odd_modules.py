"""Modules as users write them: as a stack they end where they end one after another, or they are not stacked.

Clients have unequal numbers of samples, so that stacks have steps of all, of some and of one client.
"""

from __future__ import annotations

import itertools
import random
import types
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import (
    ClasswiseWrapper,
    MaxMetric,
    MeanMetric,
    Metric,
    MetricCollection,
    MinMetric,
    SumMetric,
)
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy, MulticlassF1Score
from torchmetrics.image import PeakSignalNoiseRatio

from lightning_sparsefl import APFL, FedAvg, FederatedTrainer, Federation, PerFedAvg, PFedMe
from lightning_sparsefl.data import FederatedDataset
from lightning_sparsefl.errors import IncompatibleMasks
from lightning_sparsefl.federated.local.stacked import worker
from lightning_sparsefl.federated.local.stacked.scoring import evaluator
from lightning_sparsefl.federated.local.stacked.states.leaves import StackedModule
from lightning_sparsefl.federated.local.stacked.worker import StackedWorker
from lightning_sparsefl.testing.contents import rows

SIZES = [6, 9, 12, 16]
BATCH = 5
EXACT = 1e-10


class Data(FederatedDataset):
    """Data of clients with the sizes above, of vectors or of images."""

    def __init__(self, shape, transform=None):
        rng, self.own_transform = torch.Generator().manual_seed(3), transform

        def made(number):
            labels = torch.randint(0, 4, (number,), generator=rng)
            inputs = torch.randn(number, *shape, generator=rng)
            return TensorDataset(inputs + 0.5 * labels.view(-1, *[1] * len(shape)), labels)

        super().__init__(made(sum(SIZES)), made(20), num_clients=len(SIZES), batch_size=BATCH, eval_split="test")

    def assign(self, labels, seed):
        return list(torch.arange(sum(SIZES)).split(SIZES))

    def client_train_dataloader(self, client):
        loader = super().client_train_dataloader(client)
        loader.dataset.transform = self.own_transform
        return loader


class Plain(LightningModule):
    """Module that the cases change."""

    shape = (8,)

    def __init__(self):
        super().__init__()
        self.net = self.layers()

    def layers(self):
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, inputs):
        return self.net(inputs)

    def loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Images(Plain):
    """Module of images."""

    shape = (2, 6, 6)

    def layers(self):
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))

    def forward(self, inputs):
        return self.net(inputs).mean((2, 3))


def fit(module, engine, folder, **options):
    """Run two rounds; return the weights, the tables, the sizes of the stacks, and the messages."""
    worker._messages.clear()
    evaluator._messages.clear()
    sizes, before = [], StackedWorker._fit_stack
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        patch.setattr(StackedWorker, "_fit_stack", lambda *args: (before(*args), sizes.append(len(args[1]))))
        trainer = FederatedTrainer(
            algorithm=options.pop("algorithm", FedAvg()),
            federation=Federation(clients_per_round=4, local_engine=engine, stack_size=4),
            accelerator="cpu",
            devices=1,
            max_rounds=2,
            max_epochs=options.pop("max_epochs", 2),
            precision="64-true",
            logger=False,
            quiet=True,
            enable_progress_bar=False,
            default_root_dir=str(folder),
            seed=0,
            **options,
        )
        trainer.fit(module, Data(module.shape, getattr(module, "transform", None)))
    tables = [rows(trainer.run_folder / table) for table in ("metrics.csv", "clients.csv")]
    return module.state_dict(), tables, sizes, [str(each.message) for each in said]


def check(kind, folder, **options):
    """Train a module with both engines and compare; return the sizes of the stacks and the messages."""
    runs = []
    for engine in ("fast", "stacked"):
        torch.manual_seed(1)
        runs.append(fit(kind(), engine, folder / engine, **options))
    (alone, tables, _, _), (ours, own_tables, sizes, said) = runs
    for name, tensor in alone.items():
        assert (ours[name] - tensor).abs().max() <= EXACT, name
    for table, own in zip(tables, own_tables, strict=True):
        for row, own_row in zip(table, own, strict=True):
            assert row.keys() == own_row.keys()
            for key, value in row.items():
                if value != own_row[key]:
                    assert float(own_row[key]) == pytest.approx(float(value), rel=1e-8, abs=1e-8), key
    return sizes, said


def said_alone(said):
    """Return the messages that say that clients train or are evaluated one after another."""
    return [text for text in said if "one after another" in text]


def check_alone(kind, words, folder):
    """Train a module with both engines, and check that its clients train one after another, and why."""
    sizes, said = check(kind, folder)
    assert sizes == []
    assert any(words in text for text in said_alone(said)), said


STACKED, ALONE = {}, {}


def check_found(kind, words, folder):
    """Train a module with both engines, and check that a message says what was found, if only in a later step."""
    _, said = check(kind, folder)
    assert any(words in text for text in said), said


def stacked(kind):
    """Note a module that trains as stacks."""
    STACKED[kind.__name__] = kind
    return kind


def alone(words):
    """Note a module that trains one client after another, and what the message says."""

    def note(kind):
        ALONE[kind.__name__] = (kind, words)
        return kind

    return note


@stacked
class PenaltyOfTrained(Plain):
    def training_step(self, batch, batch_idx):
        trained = [weight for weight in self.parameters() if weight.requires_grad]
        return self.loss(batch) + 1e-4 * sum(weight.square().sum() for weight in trained)


@stacked
class ReadsData(Plain):
    """Reads numbers without their history by `data`, as older code does."""

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        hits = logits.data.max(1)[1] == batch[1].data
        self.log("hits", hits.double().mean(), on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch[1]) * (1 + self.net[0].weight.data.norm())


@alone("replaces the numbers of a weight")
class ReplacesWeightsOfOneClient(Plain):
    """Replaces them where one client is left, outside of `torch.vmap`, which refuses it."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 3:
            self.net[0].weight.data = 0.5 * self.net[0].weight.data
        return self.loss(batch)


@alone("writes into a reshaped kernel of a convolution")
class ScalesFlatKernels(Images):
    def training_step(self, batch, batch_idx):
        self.net[0].weight.data.view(4, -1).mul_(0.9)
        return self.loss(batch)


@alone("writes in place into a tensor that all clients share")
class WritesItsWeightsByData(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.net[2].weight.data.mul_(0.9)
        return loss


@stacked
class PenaltyOfParameters(Plain):
    def training_step(self, batch, batch_idx):
        found = [weight for weight in self.net[0]._parameters.values() if isinstance(weight, nn.Parameter)]
        return self.loss(batch) + 1e-4 * sum(weight.square().sum() for weight in found)


@stacked
class LogsNumberOfTrained(Plain):
    def training_step(self, batch, batch_idx):
        self.log("trained", float(sum(weight.numel() for weight in self.parameters() if weight.requires_grad)))
        return self.loss(batch)


@stacked
class ClipsItsWeights(Plain):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.2, 0.2)
        return self.loss(batch)


@stacked
class LogsWithASizeByPosition(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, False, True, False, True, "mean", False, False, None, True, 1)
        return loss


@stacked
class AsksForTheNumberOfBatches(Plain):
    def training_step(self, batch, batch_idx):
        factor = (self.global_step + 1) / self.trainer.num_training_batches + self.trainer.fit_loop.total_batch_idx
        return self.loss(batch) * (2 * factor if self.trainer.is_last_batch else factor)


@stacked
class SchedulesByTheNumberOfSteps(Plain):
    """The steps of clients with equally many batches are counted before the rates change, as by Lightning."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 / (1 + self.global_step))
        return [optimizer], [{"scheduler": rates, "interval": "step"}]


@stacked
class SchedulesEpochsByTheNumberOfSteps(Plain):
    """The trial finds that the rates depend on it, so that only clients with equally many batches are a stack."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + self.global_step))
        return [optimizer], [rates]


@stacked
class NormBeforeWritingActivation(Images):
    pass


@stacked
class FlattensByView(Images):
    def layers(self):
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))

    def forward(self, inputs):
        images = self.net(inputs)
        return images.view(images.size(0), -1)[:, :4] + images.reshape(-1, 16)[:, 4:8]


@stacked
class FlattensByShape(FlattensByView):
    def forward(self, inputs):
        return self.net(inputs).reshape(shape=(len(inputs), -1))


@stacked
class WeightNormOfAConvolution(Images):
    def layers(self):
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 4, 3)), nn.Tanh())


@stacked
class LogsInfinity(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("perplexity", (1e4 * loss).exp(), on_step=False, on_epoch=True)
        return loss


class ScalesItsOutput(Plain):
    """Has a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        return self.scale * self.net(inputs)


@stacked
class AdagradOfANumber(ScalesItsOutput):
    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


@stacked
class OneImageAlone(Images):
    def forward(self, inputs):
        images = super().forward(inputs)
        return images + self.net[0](inputs[0])[:, 0, 0]


@stacked
class FreezesWhatIsFrozen(Plain):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        for weight in self.net[0].parameters():
            weight.requires_grad = False
        return self.loss(batch)


@stacked
class KeepsItsOptimizer(Plain):
    def configure_optimizers(self):
        self.optimizer = super().configure_optimizers()
        return self.optimizer


@stacked
class CountsInADict(Plain):
    def __init__(self):
        super().__init__()
        self.counts = {"steps": 0}

    def training_step(self, batch, batch_idx):
        self.counts["steps"] += 1
        return self.loss(batch) / self.counts["steps"] ** 0.5


@alone("changes `self.average`")
class SumsInAnObject(Plain):
    def __init__(self):
        super().__init__()
        self.average = types.SimpleNamespace(loss=0.0)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.average.loss = 0.5 * self.average.loss + 0.5 * loss.detach()
        return loss


@stacked
class KeepsATuple(Plain):
    first = None

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.global_step == 0:
            self.first = (loss.detach(),)
        return loss / self.first[0]


@alone("changes `self.rng`")
class DrawsFromNumPy(Plain):
    generator = np.random.default_rng

    def __init__(self):
        super().__init__()
        self.rng = type(self).generator(3)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (2.0 if self.rng.random() < 0.05 else 1.0)


@alone("changes `self.rng`")
class DrawsFromPython(DrawsFromNumPy):
    generator = random.Random


@alone("draws random numbers from `random`, which all clients share")
class AugmentsByChance(Plain):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (2.0 if random.random() < 0.01 else 1.0)


@alone("draws random numbers from `numpy.random`, which all clients share")
class AugmentsLater(Plain):
    """Also where a step may have been recorded before."""

    def training_step(self, batch, batch_idx):
        factor = 1 + np.random.rand() if batch_idx > 1 or self.current_epoch else 1.0
        return self.loss(batch) * factor


@alone("draws random numbers from `random`, which all clients share")
class TransformsByChance(Plain):
    def transform(self, inputs):
        return inputs.flip(1) if random.random() < 0.01 else inputs


class Flip:
    """Transform with a state of its own."""

    def __init__(self):
        self.rng, self.seen = torch.Generator().manual_seed(0), 0

    def __call__(self, inputs):
        self.seen += 1
        return inputs.flip(1) if torch.rand((), generator=self.rng) < 0.1 else inputs / self.seen


@alone("changes `transform`, which all clients share")
class TransformsWithAState(Plain):
    @property
    def transform(self):
        return Flip()


@alone("`configure_optimizers`, which returns the optimizer of a client before")
class SharesItsOptimizer(Plain):
    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self):
        return self.optimizer


@alone("`configure_optimizers`, which keeps a client's own value in `self.anchor`")
class StaysNear(Plain):
    """A proximal term towards the received weights, of which one client's are not another's in all methods."""

    def __init__(self):
        super().__init__()
        self.anchor = [weight.detach().clone() for weight in self.parameters()]

    def configure_optimizers(self):
        self.anchor = [weight.detach().clone() for weight in self.parameters()]
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        pairs = zip(self.parameters(), self.anchor, strict=True)
        return self.loss(batch) + 0.5 * sum((weight - first).square().sum() for weight, first in pairs)


@stacked
class CountsItsOptimizers(Plain):
    def __init__(self):
        super().__init__()
        self.made = []

    def configure_optimizers(self):
        self.made.append(1)
        return torch.optim.SGD(self.parameters(), lr=0.1 / len(self.made))


@alone("overrides `log`")
class LogsElsewhere(Plain):
    def __init__(self):
        super().__init__()
        self.log = lambda name, value, **options: LightningModule.log(self, name, value, **options)


@alone("changes `self.seen`")
class CountsInAnArray(Plain):
    def __init__(self):
        super().__init__()
        self.seen = np.zeros(1)

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return self.loss(batch) / self.seen[0]


@alone("self.metrics")
class MetricsInADict(Plain):
    def __init__(self):
        super().__init__()
        self.metrics = {"train": MulticlassAccuracy(4, validate_args=False)}

    def training_step(self, batch, batch_idx):
        self.metrics["train"].update(self(batch[0]), batch[1])
        return self.loss(batch)


@stacked
class CountsLate(Plain):
    def __init__(self):
        super().__init__()
        self.late = 0

    def training_step(self, batch, batch_idx):
        self.late += batch_idx % 2
        return self.loss(batch) * 0.9**self.late


@alone("assigns the buffer `centre`")
class AssignsABufferLate(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        if self.current_epoch:
            self.centre = 0.9 * self.centre + 0.1 * logits.detach().mean(0)
        return F.cross_entropy(logits - self.centre, batch[1])


@alone("writes into the buffer `self.scale`")
class WritesABufferThatIsNotSavedLate(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def training_step(self, batch, batch_idx):
        if batch_idx:
            self.scale.mul_(0.9)
        return self.loss(batch) * self.scale


@alone("which freezes, unfreezes or sets weights")
class FreezesWhenItConfigures(Plain):
    def configure_optimizers(self):
        self.net[0].requires_grad_(False)
        return super().configure_optimizers()


@alone("which freezes, unfreezes or sets weights")
class SetsWeightsWhenItConfigures(Plain):
    def configure_optimizers(self):
        nn.init.zeros_(self.net[2].weight)
        return super().configure_optimizers()


@alone("sets options by the values of weights")
class LearnsAsFastAsWeightsAreLarge(Plain):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=float(self.net[0].weight.detach().norm()) / 100)


@alone("sets `requires_grad` of a tensor")
class FreezesLater(Plain):
    trained = False

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(not self.trained)

    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1:
            for weight in self.net[0].parameters():
                weight.requires_grad = self.trained
        return self.loss(batch)


@alone("sets `requires_grad` of a tensor")
class UnfreezesLater(FreezesLater):
    trained = True


class Halving(nn.Module):
    """Acts in training mode only, like dropout, but without random numbers."""

    def forward(self, inputs):
        return 0.5 * inputs if self.training else inputs


@alone("changes layers of the module, their modes or their hooks")
class EndsAModeLater(Plain):
    """Clients take their third batches one after another."""

    def layers(self):
        return nn.Sequential(nn.Linear(8, 6), Halving(), nn.Linear(6, 4))

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.net[1].eval()
        return self.loss(batch)


@alone("changes layers of the module, their modes or their hooks")
class RegistersAHookLater(Plain):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.net[1].register_forward_hook(lambda layer, inputs, outputs: 0.5 * outputs)
        return self.loss(batch)


@alone("reads the optimizer's parameters")
class PenaltyOfTheOptimizersParameters(Plain):
    def training_step(self, batch, batch_idx):
        if not self.current_epoch:
            return self.loss(batch)
        weights = [weight for group in self.optimizers().param_groups for weight in group["params"]]
        return self.loss(batch) + 1e-3 * sum(weight.square().sum() for weight in weights)


@alone("reads the optimizer's state")
class WeighsByTheMomentum(Plain):
    def training_step(self, batch, batch_idx):
        state = self.optimizers().state
        norms = [entries["momentum_buffer"].norm() for entries in state.values() if "momentum_buffer" in entries]
        return self.loss(batch) * (1 + torch.tanh(sum(norms)) if norms else 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@alone("reads the optimizer's state")
class AsksWhetherTheOptimizerHasStepped(Plain):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1.0 if self.optimizers().state else 2.0)


class ByTheMomentum(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        buffers = [entries.get("momentum_buffer") for entries in self.optimizer.state.values()]
        norm = sum(float(buffer.norm()) for buffer in buffers if buffer is not None)
        return [rate / (1 + norm) for rate in self.base_lrs]


@alone("is followed by a scheduler that reads the optimizer's state")
class SchedulesByTheMomentum(Plain):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": ByTheMomentum(optimizer), "interval": "step"}]


@alone("changes `self.trainer.seen`")
class CountsInTheTrainer(Plain):
    def training_step(self, batch, batch_idx):
        self.trainer.seen = getattr(self.trainer, "seen", 0) + 1
        return self.loss(batch) / self.trainer.seen


@alone("changes `self.trainer.log_every_n_steps`")
class ChangesAnOptionOfTheTrainer(Plain):
    def training_step(self, batch, batch_idx):
        self.trainer.log_every_n_steps += 1
        return self.loss(batch) / self.trainer.log_every_n_steps


@alone("changes `self.trainer.strategy.seen`")
class CountsInTheStrategy(Plain):
    def training_step(self, batch, batch_idx):
        strategy = self.trainer.strategy
        strategy.seen = getattr(strategy, "seen", 0) + 1
        return self.loss(batch) / strategy.seen


@alone("changes `self.optimizers().seen`")
class CountsInTheOptimizer(Plain):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers().optimizer
        optimizer.seen = getattr(optimizer, "seen", 0) + 1
        return self.loss(batch) / optimizer.seen


class CountingNorm(nn.BatchNorm1d):
    """Weakens its first outputs, as batch renormalization does."""

    persistent = True

    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("steps", torch.zeros(()), persistent=self.persistent)

    def forward(self, inputs):
        if not self.training or len(inputs) == 1:
            return inputs / (1 + self.steps)
        self.steps += 1
        return super().forward(inputs) / (1 + self.steps)


class HiddenCountingNorm(CountingNorm):
    persistent = False


@stacked
class CountsInANorm(Plain):
    norm = CountingNorm

    def layers(self):
        return nn.Sequential(nn.Linear(8, 6), self.norm(6), nn.Linear(6, 4))


@alone("writes into the buffer `self.net.1.steps`")
class CountsUnsavedInANorm(CountsInANorm):
    norm = HiddenCountingNorm


@stacked
class UpdatesAMetricLate(Plain):
    """Divides by what it has counted, in an object that is not logged and thus not reset."""

    def __init__(self):
        super().__init__()
        self.late = SumMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx == 0:
            return loss
        self.late.update(1.0)
        return loss / (1 + self.late.sum_value.to(loss.dtype))


class Measured(Plain):
    """Module with metric objects, which its cases use."""

    def __init__(self):
        super().__init__()
        self.accuracy, self.mean = MulticlassAccuracy(4), MeanMetric().set_dtype(torch.float64)
        self.extremes = nn.ModuleList([MaxMetric(), MinMetric(), SumMetric()]).double()
        counted = {"macro": MulticlassAccuracy(4), "micro": MulticlassF1Score(4, average="micro")}
        self.grouped = MetricCollection(counted, prefix="train_")
        self.noise = PeakSignalNoiseRatio(data_range=(0.0, 1.0))
        self.binary = BinaryAccuracy(ignore_index=-1)

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.measure(logits, batch[1], loss, batch_idx)
        return loss

    def measure(self, logits, labels, loss, batch_idx):
        raise NotImplementedError


@stacked
class LogsMetrics(Measured):
    def measure(self, logits, labels, loss, batch_idx):
        self.accuracy(logits, labels)
        self.log("acc", self.accuracy, on_step=True, on_epoch=True)
        self.mean.update(loss, weight=len(labels))
        self.log("mean", self.mean, on_step=False, on_epoch=True, prog_bar=True)
        self.binary((logits[:, 0] > 0).long(), (labels == 0).long() - (labels == 1).long())
        self.log("binary", self.binary)


@stacked
class LogsValuesOfMetrics(Measured):
    """The objects are not logged, and count over all epochs."""

    def measure(self, logits, labels, loss, batch_idx):
        self.log_dict(self.grouped(logits, labels), on_step=False, on_epoch=True)
        self.log("acc", self.accuracy(logits, labels), on_epoch=True)
        self.log("so far", self.accuracy.compute())
        for name, metric in zip(("most", "least", "sum"), self.extremes, strict=True):
            self.log(name, metric(loss), on_step=True, on_epoch=True)


@stacked
class LogsACollection(Measured):
    def measure(self, logits, labels, loss, batch_idx):
        self.grouped.update(logits, labels)
        self.log_dict(self.grouped, on_step=False, on_epoch=True)


@stacked
class LogsMetricsSeldom(Measured):
    def measure(self, logits, labels, loss, batch_idx):
        self.mean(loss)
        if batch_idx == 2 or self.current_epoch:
            self.log("mean", self.mean, on_step=True, on_epoch=True)
        if batch_idx % 2 == 1 and not self.current_epoch:
            self.accuracy(logits, labels)
            self.log("acc", self.accuracy, on_step=True, on_epoch=True)


@stacked
class AveragesAStateOverUpdates(Measured):
    """The object averages a state over its updates, of which clients have different numbers in the second epoch."""

    def measure(self, logits, labels, loss, batch_idx):
        self.noise(logits.softmax(1), F.one_hot(labels, 4).to(logits))
        if not self.current_epoch:
            self.log("noise", self.noise.data_range + self.noise.compute())


class Own(Metric):
    """A metric whose value or states are made in an unusual way."""

    full_state_update = False

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        whole = torch.tensor(0) if kind == "type" else torch.zeros((), dtype=torch.float64)
        self.add_state("now", whole, dist_reduce_fx="sum")
        self.add_state("before", whole.clone(), dist_reduce_fx="sum")

    def update(self, value):
        if self.kind == "swap":
            self.before, self.now = self.now, value.detach()
        else:
            self.now = self.now + (value.detach().round() if self.kind == "type" else value.detach())

    def compute(self):
        return self.now / self._update_count + 2 * self.before


class MeasuredOwn(Measured):
    kind = "count"

    def __init__(self):
        super().__init__()
        self.own, self.wrapped = Own(self.kind), ClasswiseWrapper(MulticlassAccuracy(4, average=None))

    def measure(self, logits, labels, loss, batch_idx):
        self.own.update(loss)
        self.log("own", self.own, on_step=False, on_epoch=True)


@stacked
class DividesByItsUpdates(MeasuredOwn):
    """Of which clients have made different numbers when an epoch ends."""


@stacked
class SwapsStates(MeasuredOwn):
    kind = "swap"


@alone("changes the shape or the type of a metric object's state")
class ChangesTheTypeOfAState(MeasuredOwn):
    kind = "type"


@stacked
class ReadsItsUpdates(Measured):
    """Begins anew after some updates; the object is not logged, and clients have made different numbers of updates."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        if self.mean.update_count >= 3:
            self.mean.reset()
            return 2 * loss
        return loss / self.mean.update_count


class SchedulesByAMetric(Measured):
    def __init__(self):
        super().__init__()
        self.late = SumMetric()

    def training_step(self, batch, batch_idx):
        self.late.update(1.0)
        return self.loss(batch)

    def factor(self, epoch):
        raise NotImplementedError

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: self.factor(epoch))]


@alone("uses of the metric object `self.late`, of which each client has its own")
class SchedulesByAState(SchedulesByAMetric):
    def factor(self, epoch):
        return 1 / (1 + float(self.late.sum_value)) if epoch else 1.0


@alone("uses of the metric object `self.late`, of which each client has its own")
class SchedulesByUpdates(SchedulesByAMetric):
    def factor(self, epoch):
        return 0.5 if epoch and self.late.update_called else 1.0


@stacked
class ResetsAMetric(Measured):
    def measure(self, logits, labels, loss, batch_idx):
        self.mean.reset()
        self.mean.update(loss)
        self.log("mean", self.mean.compute(), on_epoch=True)


@stacked
class LearnsFromAMetric(Measured):
    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.extremes[2].update(logits.abs().mean().detach())
        return F.cross_entropy(logits, batch[1]) + 1e-3 * self.extremes[2].compute() * logits.square().mean()


@stacked
class ActsBetweenEpochs(Measured):
    """Begins and ends epochs as modules often do."""

    def on_train_start(self):
        self.log("first", self.net[0].bias.detach().sum())

    def on_train_epoch_start(self):
        self.mean.reset()
        self.log("epoch", float(self.current_epoch))

    def measure(self, logits, labels, loss, batch_idx):
        self.mean.update(loss, weight=len(labels))
        self.accuracy(logits, labels)
        self.log("acc", self.accuracy, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=False, on_epoch=True)

    def on_train_epoch_end(self):
        self.log("loss", self.mean.compute())  # also a key of the step
        self.log_dict({"best": self.extremes[0](self.mean.compute()), "steps": 2.0}, prog_bar=True)
        with torch.no_grad():
            self.net[2].weight.clamp_(-0.3, 0.3)

    def on_train_end(self):
        with torch.no_grad():
            self.net[2].bias.mul_(0.9)


@stacked
class BranchesTogether(Measured):
    """Asks questions about values that have the same answer for all clients."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        assert not torch.isnan(loss)
        if torch.isinf(loss).any().item() or not (batch[1] >= 0).all() or loss.is_nonzero() is False:
            return None
        self.mean.update(loss)
        return loss

    def on_train_epoch_end(self):
        if self.mean.compute() > 0:
            self.log("fine", 1.0)


@alone("branches on the value of a tensor, which differs between clients")
class BranchesOnItsOwn(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss if batch[1][0] > 1 else 2 * loss


@alone("is followed by `on_train_epoch_end`, which branches on the value of a tensor, which differs between clients")
class BranchesAfterAnEpoch(Measured):
    def measure(self, logits, labels, loss, batch_idx):
        self.mean.update((labels > 1).double())

    def on_train_epoch_end(self):
        if self.mean.compute() > 0.5:
            self.log("high", 1.0)


@alone("is followed by `on_train_epoch_end`, which asks for `trainer.callback_metrics`")
class ReadsAfterAnEpoch(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log("double", 2 * self.trainer.callback_metrics.get("loss", torch.zeros(())))


@stacked
class LogsItsRate(Plain):
    def on_train_epoch_end(self):
        self.log("rate", self.lr_schedulers().get_last_lr()[0])

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@alone("cannot be tried with another optimizer than its own (AttributeError")
class KeepsItsScheduler(LogsItsRate):
    def on_train_epoch_end(self):
        self.log("rate", self.scheduler.get_last_lr()[0])

    def configure_optimizers(self):
        optimizers, (self.scheduler,) = super().configure_optimizers()
        return optimizers, [self.scheduler]


@stacked
class CountsEpochs(Plain):
    def __init__(self):
        super().__init__()
        self.epochs = 0

    def on_train_epoch_end(self):
        self.epochs += 1

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / (1 + self.epochs)


@alone("is followed by `on_train_epoch_end`, which asks for the number of steps")
class CountsStepsAfterAnEpoch(Plain):
    """The trial has one step of each client; later they have taken different numbers."""

    def on_train_epoch_end(self):
        self.log("steps", float(self.global_step))


@alone("gives the metric object `self.mean` NaN, or labels that are out of range")
class LogsNaN(Measured):
    def measure(self, logits, labels, loss, batch_idx):
        self.mean.update(torch.where(logits > 0, logits, torch.nan))
        self.log("mean", self.mean, on_step=False, on_epoch=True)


@stacked
class LogsLabelsThatDoNotCount(Measured):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(4, average="macro", ignore_index=0)

    def measure(self, logits, labels, loss, batch_idx):
        self.log("acc", self.accuracy(logits, labels))


@stacked
class KeepsItsLastBatch(Plain):
    def training_step(self, batch, batch_idx):
        shift = 0 if self.example_input_array is None else self.example_input_array.mean()
        self.example_input_array = batch[0][:1].detach()
        return self.loss(batch) * (1 + 0.1 * shift)


@stacked
class TogglesAnOption(Plain):
    def training_step(self, batch, batch_idx):
        self.prepare_data_per_node = not self.prepare_data_per_node
        return self.loss(batch) * (2 if self.prepare_data_per_node else 1)


class Replay(Dataset):
    """Data set that a step may fill."""

    seen = 0

    def __len__(self):
        return self.seen


@alone("changes `self.replay`")
class FillsADataSet(Plain):
    def __init__(self):
        super().__init__()
        self.replay = Replay()

    def training_step(self, batch, batch_idx):
        self.replay.seen = batch_idx + 1
        return self.loss(batch) / len(self.replay)


@alone("asks for `trainer.callback_metrics`")
class SchedulesByALoggedValue(Plain):
    training_step = LogsInfinity.training_step

    def rate(self, epoch):
        return 1 / (1 + epoch + len(self.trainer.callback_metrics)) if epoch else 1.0

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)]


@alone("a scheduler that reads weights")
class SchedulesByAWeight(SchedulesByALoggedValue):
    def rate(self, epoch):
        return 1 / (1 + float(self.net[0].weight.detach().norm())) if epoch else 1.0


@alone("keeps an iterator in `self.factors`")
class RepeatsFactors(Plain):
    def __init__(self):
        super().__init__()
        self.factors = itertools.cycle([1.0, 1.0, 1.0, 2.0])

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * next(self.factors)


@alone("counts of batches")
class WarmsANormUp(Plain):
    def layers(self):
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))

    def forward(self, inputs):
        trained = self.training and len(inputs) > 1
        outputs = self.net(inputs) if trained else self.net[2](self.net[0](inputs))
        return outputs / (1 + self.net[1].num_batches_tracked)


@alone("counts of batches")
class SkipsEverySecondNorm(WarmsANormUp):
    def forward(self, inputs):
        count = self.net[1].num_batches_tracked
        return super().forward(inputs) * (1 + count) / (1 + count % 2)


@alone("with hooks or with another `step`")
class OptimizerWithAHook(Plain):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()

        @torch.no_grad()
        def bound(optimizer, args, kwargs):
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    weight.clamp_(-0.2, 0.2)

        optimizer.register_step_post_hook(bound)
        return optimizer


@alone("with hooks or with another `step`")
class OptimizerWithAnotherStep(Plain):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        before = optimizer.step

        def step(closure=None):
            loss = before(closure)
            with torch.no_grad():
                self.net[0].weight.mul_(0.9)
            return loss

        optimizer.step = step
        return optimizer


@alone("has a hook for its gradient")
class GradientHooks(Plain):
    def __init__(self):
        super().__init__()
        for weight in self.parameters():
            weight.register_hook(lambda slope: slope.clamp(-0.5, 0.5))

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + 4 * self.global_step)


@alone("computes with parameters that it keeps")
class PenaltyOfKeptParameters(Plain):
    def __init__(self):
        super().__init__()
        self.decayed = [weight for weight in self.parameters() if weight.dim() > 1]

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + 1e-4 * sum(weight.square().sum() for weight in self.decayed)


@alone("reads the gradient")
class ReadsTheLastGradient(Plain):
    def training_step(self, batch, batch_idx):
        slopes = [weight.grad.norm() for weight in self.parameters() if weight.grad is not None]
        if slopes:
            self.log("norm", torch.stack(slopes).norm(), on_step=False, on_epoch=True)
        return self.loss(batch)


@alone("asks for `trainer.callback_metrics`")
class AsksForTheLastEpoch(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss * (1 + self.trainer.callback_metrics.get("train_loss", torch.tensor(0.0)))


@alone("asks for `trainer.progress_bar_metrics`")
class AsksForTheProgressBar(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("part", loss, prog_bar=True)
        return loss * (1 + len(self.trainer.progress_bar_metrics))


@alone("asks for `trainer.logged_metrics`")
class AsksForTheLogged(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("part", loss)
        return loss * (1 + len(self.trainer.logged_metrics))


@alone("sets `trainer.should_stop`")
class StopsTheTrainer(Plain):
    def training_step(self, batch, batch_idx):
        if self.global_step >= 2:
            self.trainer.should_stop = True
        return self.loss(batch)


@alone("sets options of the optimizer")
class LowersTheRate(Plain):
    later = 1
    """Batch of the second epoch in which the rate is lowered; in batch 1 clients have different numbers of samples."""

    def training_step(self, batch, batch_idx):
        if batch_idx == self.later and self.current_epoch == 1:
            self.optimizers().param_groups[0]["lr"] *= 0.1
        return self.loss(batch)


@stacked
class LowersTheRateOfAll(LowersTheRate):
    later = 0


@alone("asks for the number of batches")
class AsksForTheNumberOfBatchesLater(Plain):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (self.trainer.num_training_batches if self.current_epoch else 1)


@alone("calls a convolution within a `torch.vmap`")
class OwnVmap(Images):
    def layers(self):
        return nn.Conv2d(2, 4, 3)

    def forward(self, inputs):
        return torch.vmap(self.net)(inputs).mean((2, 3))


@alone("computes with parameters that it keeps elsewhere")
class KeepsParametersForLater(Plain):
    def __init__(self):
        super().__init__()
        self.kept = [self.net[0].weight, self.net[2].weight]

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.current_epoch:
            with torch.no_grad():
                norms = torch.stack([weight.norm() for weight in self.kept])
            loss = loss * norms.sum()
        return loss


@stacked
class AsksForTheStepOfItsLogs(Plain):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + 0.1 * self.trainer.fit_loop.epoch_loop._batches_that_stepped * (batch_idx < 2))


@stacked
class LargestOfEqualOnes(Plain):
    """The gradients of equal ones are divided evenly."""

    def training_step(self, batch, batch_idx):
        hidden = self(batch[0]).clamp(-0.2, 0.2)
        return self.loss(batch) + hidden.max() - torch.min(hidden)


class Tokens(Plain):
    """Module of tokens 1 to 8, which become negative with 0."""

    def layers(self):
        return nn.ModuleList([nn.Embedding(9, 6, **self.options), nn.Linear(6, 4)])

    def forward(self, inputs):
        tokens = inputs[:, :3].abs().mul(3).long().clamp(0, 8)
        return self.net[1](self.net[0](tokens).mean(1))


@alone("uses an embedding with `max_norm`, `scale_grad_by_freq` or `sparse`")
class PaddedByFrequency(Tokens):
    options = types.MappingProxyType({"padding_idx": 0, "scale_grad_by_freq": True})


@alone("uses an embedding with `max_norm`, `scale_grad_by_freq` or `sparse`")
class PaddedWithinANorm(Tokens):
    options = types.MappingProxyType({"padding_idx": 0, "max_norm": 0.5})


@alone("uses `index_fill` with positions that differ between clients")
class FillsPositions(Plain):
    def forward(self, inputs):
        positions = (inputs[:, 0] > 2.5).long()[:1] - 1  # the last, or the first
        return self.net(inputs).index_fill(1, positions, 0.0)


@stacked
class MarksClasses(Plain):
    def loss(self, batch):
        return (self(batch[0]) - F.one_hot(batch[1], 4)).square().mean()


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda net, labels: F.embedding(labels, net[2].weight), IndexError, "index out of range"),
        (lambda net, labels: F.one_hot(labels - 4, 4), RuntimeError, "index -"),
    ],
    ids=["a token beyond the table", "a negative class"],
)
def test_numbers_of_another_client_are_not_read(function, error, words):
    """The row after the last one of a client's table is the first one of the next client's."""
    net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    whole = StackedModule(net, 2)
    whole.load([dict(net.named_parameters())] * 2)
    labels = torch.tensor([[0, 3], [1, 2]])  # of a table of 3
    with pytest.raises(error, match=words):
        whole.call(lambda batch, level: function(net, batch), labels)


def some_quick(names):
    """Return names of modules, of which two thirds are marked slow: there are a hundred, and each takes a second."""
    return [name if place % 3 == 0 else pytest.param(name, marks=pytest.mark.slow) for place, name in enumerate(names)]


@pytest.mark.parametrize("name", some_quick(STACKED))
def test_a_stack_ends_where_its_clients_end_alone(name, tmp_path):
    sizes, said = check(STACKED[name], tmp_path)
    assert sizes
    assert not [text for text in said if "one after another" in text]


@pytest.mark.parametrize("name", some_quick(ALONE))
def test_what_clients_cannot_share_is_named_and_they_train_alone(name, tmp_path):
    kind, words = ALONE[name]
    sizes, said = check(kind, tmp_path)
    assert not sizes
    assert any("clients train one after another" in text.lower() and words in text for text in said), said


class SometimesDeeper(Plain):
    """Uses a layer in some batches only, and penalizes its weights in all others by what they are."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        if batch_idx % 3 != 1:
            return F.cross_entropy(logits + self.last(logits), batch[1])
        self.log("size", self.last.weight.detach().norm(), on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch[1]) * (1 + self.last.weight.detach().norm())


class DeeperLater(SometimesDeeper):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx + 1)


@pytest.mark.parametrize("kind", [SometimesDeeper, DeeperLater])
@pytest.mark.parametrize("order", ["first", "hessian"])
def test_a_weight_without_gradient_in_a_batch_stays_in_a_tuple_of_batches(kind, order, tmp_path):
    sizes, _ = check(kind, tmp_path, algorithm=PerFedAvg(alpha=0.05, order=order))
    assert sizes


@pytest.mark.parametrize(
    "options", [{"gradient_clip_val": 0.1}, {"algorithm": APFL(adaptive=True)}], ids=["clipped", "mixed"]
)
def test_a_parameter_without_dimensions_is_stacked(options, tmp_path):
    sizes, said = check(ScalesItsOutput, tmp_path, **options)
    assert sizes
    assert not [text for text in said if "one after another" in text]


class TrainsItsHead(Plain):
    """Has weights with gradients that the optimizer leaves alone."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[2].parameters(), lr=0.1)


@pytest.mark.parametrize(
    "algorithm",
    [PFedMe(lam=2.0, steps=2, personal_lr=0.1), PerFedAvg(alpha=0.5), PerFedAvg(alpha=0.5, order="hessian")],
    ids=["envelope", "first", "hessian"],
)
def test_gradients_of_weights_that_are_not_stepped_do_not_add_up(algorithm, tmp_path):
    sizes, _ = check(TrainsItsHead, tmp_path, algorithm=algorithm)
    assert sizes


@pytest.mark.parametrize("engine", ["fast", "stacked"])
@pytest.mark.filterwarnings("ignore:.*logs 'part' with other options than before")
def test_other_options_of_a_logged_key_are_refused(engine, tmp_path):
    class LogsOtherwiseLater(Plain):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("part", loss, on_step=False, on_epoch=True, reduce_fx="sum" if batch_idx else "mean")
            return loss

    with pytest.raises(Exception, match="twice in `training_step` with different arguments"):
        fit(LogsOtherwiseLater(), engine, tmp_path)


class Casting(FedAvg):
    """Evaluates in half precision before it trains."""

    def train(self, message, client):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            client.evaluate(message.weights, "test")
        return super().train(message, client)


class Inferring(FedAvg):
    """Evaluates in inference mode before it trains."""

    def train(self, message, client):
        with torch.inference_mode():
            client.evaluate(message.weights, "test")
        return super().train(message, client)


@pytest.mark.parametrize("method", [Casting, Inferring])
def test_modes_of_a_thread_do_not_reach_other_clients(method, tmp_path):
    sizes, _ = check(Plain, tmp_path, algorithm=method())
    assert sizes
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_inference_mode_enabled()


def test_gradients_of_weights_that_are_not_stepped_are_not_clipped(tmp_path):
    class HeadOnly(Plain):
        def configure_optimizers(self):
            return torch.optim.SGD(self.net[2].parameters(), lr=0.1)

    sizes, _ = check(HeadOnly, tmp_path, gradient_clip_val=0.05)
    assert sizes


def test_an_evaluation_that_changes_an_object_is_done_alone(tmp_path):
    class Sums(Plain):
        def __init__(self):
            super().__init__()
            self.meter = types.SimpleNamespace(loss=0.0)

        def test_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.meter.loss = self.meter.loss + loss.detach()
            self.log("test_loss", loss)

    sizes, said = check(Sums, tmp_path)
    assert sizes
    assert any("`Sums.test_step` changes `self.meter" in text for text in said), said


def test_an_evaluation_that_adds_to_the_trainer_is_done_alone(tmp_path):
    class Counts(Plain):
        def test_step(self, batch, batch_idx):
            self.trainer.seen = getattr(self.trainer, "seen", 0) + len(batch[0])
            self.log("test_loss", self.loss(batch) / self.trainer.seen)

    sizes, said = check(Counts, tmp_path)
    assert sizes
    assert any("`Counts.test_step` changes `self.trainer.seen`" in text for text in said), said


def test_an_evaluation_sees_which_weights_are_trained(tmp_path):
    class Penalty(Plain):
        def test_step(self, batch, batch_idx):
            trained = [
                weight for weight in self.parameters() if weight.requires_grad and isinstance(weight, nn.Parameter)
            ]
            self.log("test_loss", self.loss(batch) + 1e-4 * sum(weight.square().sum() for weight in trained))

    sizes, said = check(Penalty, tmp_path)
    assert sizes
    assert not [text for text in said if "one after another" in text]


def method_with(hook, act):
    """Return FedAvg with a callback of the user, which may be stacked, and whose hook is a function."""
    callback = type("Acting", (Callback,), {"stackable": True, hook: lambda self, *args: act(*args)})

    class Method(FedAvg):
        def callbacks(self, message, client):
            return [callback()]

    return Method()


@torch.no_grad()
def decays(trainer, module, outputs, batch, batch_idx):
    counts = batch_idx + trainer.global_step + module.global_step + trainer.current_epoch + module.current_epoch
    for group in module.optimizers().param_groups:
        for weight in group["params"]:
            weight.mul_(1 - 0.01 / (1 + counts) - 0.001 * outputs["loss"])


def test_a_callback_sees_the_numbers_of_its_clients_batch(tmp_path):
    sizes, said = check(Plain, tmp_path, algorithm=method_with("on_train_batch_end", decays))
    assert sizes
    assert not [text for text in said if "one after another" in text]


def lowers(trainer, module, batch, batch_idx):
    trainer.optimizers[0].param_groups[0]["lr"] *= 0.9


def halves(trainer, module):
    for weight in module.parameters():
        weight.grad = 0.5 * weight.grad


def shrinks(trainer, module):
    module.net[0].weight.data = 0.5 * module.net[0].weight.data


def freezes(trainer, module):
    module.net[0].requires_grad_(False)


def hooks(trainer, module):
    module.net[1].register_forward_hook(lambda layer, inputs, outputs: 0.5 * outputs)


def evaluates(trainer, module):
    module.net.eval()


def moves_by_a_logged_value(trainer, module):
    with torch.no_grad():
        module.net[0].bias.add_(trainer.callback_metrics.get("perplexity", 1.0))


def schedules(trainer, module):
    for config in trainer.lr_scheduler_configs:
        config.scheduler.step()


def logs(trainer, module, outputs, batch, batch_idx):
    module.log("twice", 2 * outputs["loss"], on_step=False, on_epoch=True)


def stops(trainer, module):
    trainer.should_stop = True


def measures(trainer, module, *args):
    module.counted.update(1.0)


def reads_a_state(trainer, module, *args):
    with torch.no_grad():
        module.net[0].bias.add_(0.01 * module.counted.sum_value)


def reads_a_metric(trainer, module, *args):
    with torch.no_grad():
        module.net[0].bias.add_(0.01 * module.counted.compute())


REFUSED = [
    ("on_train_batch_start", lowers, "changes options of the optimizer"),
    ("on_after_backward", halves, "replaces a gradient"),
    ("on_train_epoch_end", shrinks, "replaces a tensor"),
    ("on_fit_start", freezes, "changes attributes of the module"),
    ("on_train_epoch_start", hooks, "changes attributes of the module"),
    ("on_train_start", evaluates, "changes attributes of the module"),
    ("on_train_epoch_end", moves_by_a_logged_value, "asks for `trainer.callback_metrics`"),
    ("on_train_epoch_end", schedules, "asks for `trainer.lr_scheduler_configs`"),
    ("on_train_batch_end", logs, "logs values"),
    ("on_train_batch_end", measures, "uses the metric object `self.counted`"),
    ("on_train_epoch_end", reads_a_state, "uses the metric object `self.counted`"),
    ("on_train_batch_start", reads_a_metric, "uses the metric object `self.counted`"),
    ("on_train_epoch_end", stops, "sets `trainer.should_stop`"),
    ("on_before_zero_grad", lambda trainer, module, optimizer: shrinks(trainer, module), "the callback Acting cannot"),
    ("on_before_backward", lambda trainer, module, loss: shrinks(trainer, module), "the callback Acting cannot"),
]


@pytest.mark.parametrize(("hook", "act", "words"), REFUSED, ids=[f"{hook}-{act.__name__}" for hook, act, _ in REFUSED])
def test_what_a_callback_would_do_to_a_view_only_is_named(hook, act, words, tmp_path):
    class Scheduled(Plain):
        training_step = LogsInfinity.training_step

        def __init__(self):
            super().__init__()
            self.counted = SumMetric()

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

        def loss(self, batch):
            return 1e-4 * super().loss(batch)  # of which `LogsInfinity` logs a finite perplexity

    sizes, said = check(Scheduled, tmp_path, algorithm=method_with(hook, act))
    assert not sizes
    assert any("clients train one after another" in text.lower() and words in text for text in said), said


def misspelt(weights):
    return {"net.2.bais" if name == "net.2.bias" else name: weight for name, weight in weights.items()}


def shortened(weights):
    return {**weights, "net.2.bias": weights["net.2.bias"][:1]}


def frozen_misspelt(client, weights):
    client.fit(weights, {}, {"net.2.bais": torch.zeros(4, dtype=torch.bool)})


@pytest.mark.parametrize("engine", ["fast", "stacked"])
@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda client, weights: client.fit(misspelt(weights)), id="fit, misspelt"),
        pytest.param(lambda client, weights: client.fit(shortened(weights)), id="fit, shortened"),
        pytest.param(lambda client, weights: client.gradient(misspelt(weights)), id="gradient, misspelt"),
        pytest.param(lambda client, weights: client.evaluate(shortened(weights), "test"), id="evaluate, shortened"),
        pytest.param(frozen_misspelt, id="frozen, misspelt"),
        pytest.param(lambda client, weights: client.fit(weights, {"net.2.weight": torch.ones(4, 6)}), id="floats"),
    ],
)
def test_trees_that_do_not_fit_the_model_are_refused(ask, engine, tmp_path):
    class Asks(FedAvg):
        def train(self, message, client):
            ask(client, message.weights)
            return super().train(message, client)

    with pytest.raises(IncompatibleMasks, match=r"net\.2\."):
        fit(Plain(), engine, tmp_path, algorithm=Asks())
