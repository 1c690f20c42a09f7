"""A score that is made of parts has the bits of one pass, and a pass that is more than a sum is found out."""

import random

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lightning_sparsefl.data.examples import Examples
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.fast.batch_scores import join_scores
from lightning_sparsefl.federated.local.fast.divisible import Indivisible, check_divisible
from lightning_sparsefl.federated.local.lightning_trainer import LightningEngine
from lightning_sparsefl.federated.local.local_options import LocalOptions
from lightning_sparsefl.models import MLP

SAMPLES, CLASSES = 103, 4


def engine(**options):
    fabric = Fabric(accelerator="cpu", devices=1)
    return FastEngine(fabric, LocalOptions(**options))


def loader(batch_size=8, **options):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 1, 1, 8, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return Examples(inputs, labels).loader(batch_size, **options)


class Task(L.LightningModule):
    """A linear classifier that logs in every way that adds up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8, CLASSES))
        self.acc, self.auroc = MulticlassAccuracy(CLASSES), MulticlassAUROC(CLASSES)
        self.mean, self.scores = MeanMetric(), CatMetric()

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        logits = self.net(inputs)
        losses = F.cross_entropy(logits, labels, reduction="none")
        self.log("loss", losses.mean())
        self.log("total", losses.sum(), reduce_fx="sum")
        self.log("worst", losses.max(), reduce_fx="max")
        self.log("best", losses.min(), reduce_fx=torch.min)
        self.log("weighted", losses.double().mean(), batch_size=batch_idx + 1)
        self.log("batch_acc", self.acc(logits, labels))
        self.log("acc", self.acc)
        self.auroc.update(logits.softmax(1), labels)
        self.log("auroc", self.auroc)
        self.mean.update(losses)
        self.log("mean", self.mean)
        if batch_idx == 3:
            self.log("fourth", losses[0])


def parts_of(engine, module, batches, count, stage="validate"):
    return [engine.evaluate_part(module, batches, stage=stage, part=(number, count)) for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("options", [{}, {"limit_val_batches": 0.5}, {"limit_val_batches": 3}])
def test_any_number_of_parts_has_the_bits_of_one_pass(count, options):
    module, fast = Task(), engine(**options)
    whole = fast.evaluate(module, loader(), stage="validate")
    parts = parts_of(fast, module, loader(), count)
    assert join_scores(module, parts) == whole
    assert list(join_scores(module, parts)) == list(whole)
    sizes = [len(part.batches) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert fast.evaluate(module, loader(), stage="validate") == whole  # nothing is left in the metrics


def test_a_sum_in_another_order_would_differ():
    """The test above can fail."""
    module, fast = Task(), engine()
    whole = fast.evaluate(module, loader(1), stage="validate")
    parts = parts_of(fast, module, loader(1), 7)
    assert join_scores(module, parts) == whole
    assert join_scores(module, parts[::-1]) != whole


def test_other_loaders_of_batches():
    module, fast = Task(), engine()
    data = loader().dataset
    for batches in (
        DataLoader(TensorDataset(data.inputs, data.labels), 8),
        DataLoader(TensorDataset(data.inputs, data.labels), 8, drop_last=True),
        loader(drop_last=True),
    ):
        whole = fast.evaluate(module, batches, stage="validate")
        assert join_scores(module, parts_of(fast, module, batches, 3)) == whole


def test_a_model_of_the_package_in_the_test_stage():
    module, fast = MLP(num_classes=CLASSES, sample_shape=(1, 1, 8)), engine()
    whole = fast.evaluate(module, loader(), stage="test")
    assert join_scores(module, parts_of(fast, module, loader(), 3, "test")) == whole
    assert set(whole) == {"test_loss", "test_acc"}


def test_no_batches_log_nothing():
    module, fast = Task(), engine(limit_val_batches=0)
    assert join_scores(module, parts_of(fast, module, loader(), 2)) == {}


class Collected(Task):
    """Iterates over a collection, by which torchmetrics sets a flag of its own."""

    def __init__(self):
        super().__init__()
        self.several = MetricCollection({"sum": SumMetric(), "mean": MeanMetric()}, compute_groups=False)

    def validation_step(self, batch, batch_idx):
        self.several.update(self.net(batch[0]))
        self.log_dict(self.several)


def test_a_collection_without_groups_is_divided():
    module, fast = Collected(), engine()
    whole = fast.evaluate(module, loader(), stage="validate")
    assert join_scores(module, parts_of(fast, module, loader(), 3)) == whole
    assert set(whole) == {"sum", "mean"}


class Hooked(Task):
    def on_validation_epoch_end(self):
        self.log("end", torch.tensor(1.0))


class Drawing(Task):
    def validation_step(self, batch, batch_idx):
        self.log("drawn", torch.rand(()))


class DrawingElsewhere(Task):
    def validation_step(self, batch, batch_idx):
        self.log("drawn", random.random())


class Counting(Task):
    count = 0

    def validation_step(self, batch, batch_idx):
        self.count += 1
        self.log("count", float(self.count))


class CountingInSecret(Task):
    _count = 0

    def validation_step(self, batch, batch_idx):
        self._count += 1
        self.log("count", float(self._count))


class Buffered(Task):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def validation_step(self, batch, batch_idx):
        self.seen += 1
        self.log("seen", self.seen.clone())


class Collecting(Task):
    def __init__(self):
        super().__init__()
        self.outputs = []

    def validation_step(self, batch, batch_idx):
        self.outputs.append(batch_idx)
        self.log("outputs", float(len(self.outputs)))


class CountingInADict(Task):
    def __init__(self):
        super().__init__()
        self.counts = {"batches": 0}

    def validation_step(self, batch, batch_idx):
        self.counts["batches"] += 1
        self.log("batches", float(self.counts["batches"]))


class CountingInAnArray(Task):
    def __init__(self):
        super().__init__()
        self.counts = np.zeros(1)

    def validation_step(self, batch, batch_idx):
        self.counts += 1
        self.log("batches", float(self.counts[0]))


class LoggingTwice(Task):
    def validation_step(self, batch, batch_idx):
        for factor in (1.0, 3.0):
            self.log("loss", factor * batch[0].mean())


class UpdatingTwice(Task):
    def validation_step(self, batch, batch_idx):
        for factor in (1.0, 3.0):
            self.mean.update(factor * batch[0])
        self.log("mean", self.mean)


class OnTheTrainer(Task):
    def validation_step(self, batch, batch_idx):
        self.trainer.seen = getattr(self.trainer, "seen", 0) + 1
        self.log("seen", float(self.trainer.seen))


class Running(Task):
    def validation_step(self, batch, batch_idx):
        self.mean.update(batch[0])
        self.log("so_far", self.mean.compute())


class PerStep(Task):
    def validation_step(self, batch, batch_idx):
        self.log("loss", batch[0].mean(), on_step=True)


class OwnMetric(Metric):
    """A metric whose states have no rule for several processes."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("last", torch.zeros(()), dist_reduce_fx=None)

    def update(self, value):
        self.last = value

    def compute(self):
        return self.last


class WithMetric(Task):
    def __init__(self, metric):
        super().__init__()
        self.own = metric

    def validation_step(self, batch, batch_idx):
        self.own.update(batch[0].mean())
        self.log("own", self.own)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Hooked, "overrides `on_validation_epoch_end`"),
        (Drawing, "random generator"),
        (DrawingElsewhere, "random generator"),
        (Counting, "attributes"),
        (CountingInSecret, "attributes"),
        (Buffered, "`seen`"),
        (Collecting, "`outputs`"),
        (CountingInADict, "`counts`"),
        (CountingInAnArray, "`counts`"),
        (LoggingTwice, "logs `loss` several times"),
        (UpdatingTwice, "updates the metric `mean` several times"),
        (OnTheTrainer, "trainer"),
        (Running, "reads the value of the metric `mean`"),
        (PerStep, "logged for each step"),
        (lambda: WithMetric(OwnMetric()), r"metric `WithMetric\.own`"),
        (lambda: WithMetric(MinMaxMetric(MeanMetric())), r"metric `WithMetric\.own`"),
        (lambda: WithMetric(MetricCollection({"a": MaxMetric()})), "compute groups"),
    ],
)
def test_a_pass_that_is_more_than_a_sum_is_left_to_one_process(module, reason):
    made = module()
    parts = parts_of(engine(), made, loader(), 2)
    assert any(part.indivisible for part in parts)
    with pytest.raises(Indivisible, match=reason):
        join_scores(made, parts)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_sampler": BatchSampler(range(40, 60), 8, False)},
        {"batch_sampler": BatchSampler(SubsetRandomSampler(range(40, 60)), 8, False)},
        {"batch_sampler": BatchSampler(list(range(59, 20, -1)), 8, True)},
        {"sampler": SequentialSampler(range(13)), "batch_size": 8},
    ],
    ids=["part", "random part", "backwards", "beginning"],
)
def test_parts_of_the_samples_are_left_to_one_process(options):
    part = DataLoader(loader().dataset, collate_fn=loader().collate_fn, **options)
    with pytest.raises(Indivisible, match="is not a plain `DataLoader` of all samples in sequential order"):
        check_divisible(Task(), part)
    whole = DataLoader(loader().dataset, batch_sampler=BatchSampler(SequentialSampler(range(SAMPLES)), 8, True))
    check_divisible(Task(), whole)


class Endless(IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(1)])

    def __len__(self):
        return 1


@pytest.mark.parametrize(
    "batches",
    [lambda: loader(shuffle=True), lambda: loader(num_workers=1), lambda: DataLoader(Endless()), lambda: [loader()]],
)
def test_loaders_that_are_not_cut_into_parts(batches):
    (part,) = parts_of(engine(), Task(), batches(), 1)
    assert "its loader" in part.indivisible


def test_a_trainer_passes_over_the_whole_loader():
    slow = LightningEngine(Fabric(accelerator="cpu", devices=1), LocalOptions())
    assert "Lightning Trainer" in slow.evaluate_part(Task(), loader(), stage="validate", part=(0, 2)).indivisible
