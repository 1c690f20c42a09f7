"""Modules with metrics that depend on values or keep samples: each client of a stack gets what it gets alone."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import CatMetric, ClasswiseWrapper, MeanMetric, Metric, MetricCollection, SpearmanCorrCoef
from torchmetrics import classification as objects
from torchmetrics import functional as functions
from torchmetrics.utilities.compute import normalize_logits_if_needed

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.errors import ClientFailed
from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.metrics.functional import functions_for_clients
from lightning_sparsefl.federated.local.stacked.metrics.states import MetricStates
from lightning_sparsefl.federated.local.stacked.rules import LayerRules
from lightning_sparsefl.federated.local.stacked.states.leaves import unwrapped
from tests.federated.local.stacked.test_odd_modules import Data, Plain, check, said_alone

pytestmark = pytest.mark.filterwarnings(
    "ignore:No (positive|negative) samples in targets:UserWarning", "ignore:Metric `Spearman:UserWarning"
)


class Middle(Metric):
    """A metric whose update reads a number, and whose value is a tuple."""

    def __init__(self):
        super().__init__()
        self.add_state("middle", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("kept", [], dist_reduce_fx="cat")

    def update(self, preds, target):
        self.middle = torch.tensor(max(float(preds.median()), float(self.middle)), dtype=torch.float64)
        self.kept.append(target.double().mean())

    def compute(self):
        return self.middle + torch.stack(self.kept).sum()


def several(logits, labels):
    return logits, labels


def binary(logits, labels):
    return logits[:, 0], (labels > 1).long()


def marked(logits, labels):
    return logits, F.one_hot(labels, 4)


KINDS = {
    "accuracy of logits": (objects.BinaryAccuracy, binary),
    "F1 score of logits": (objects.BinaryF1Score, binary),
    "accuracy of several marks": (lambda: objects.MultilabelAccuracy(4), marked),
    "binned AUROC": (lambda: objects.BinaryAUROC(thresholds=5), binary),
    "binned AUROC of classes": (lambda: objects.MulticlassAUROC(4, thresholds=5), several),
    "exact AUROC": (lambda: objects.MulticlassAUROC(4), several),
    "average precision": (objects.BinaryAveragePrecision, binary),
    "calibration": (lambda: objects.MulticlassCalibrationError(4), several),
    "ignoring a class": (lambda: objects.MulticlassAccuracy(4, ignore_index=0), several),
    "ignoring a class, micro": (lambda: objects.MulticlassAccuracy(4, ignore_index=0, average="micro"), several),
    "confusion, ignoring a class": (lambda: objects.MulticlassJaccardIndex(4, ignore_index=0), several),
    "correlation": (SpearmanCorrCoef, lambda logits, labels: (logits[:, 0], labels.to(logits))),
    "a number": (Middle, several),
    "samples": (CatMetric, lambda logits, labels: (logits.amax(),)),
}


class Measured(Plain):
    """Calls an object, logs what it gives for the batch, and the object; all of it in evaluations, too."""

    kind = next(iter(KINDS))

    def __init__(self):
        super().__init__()
        make, self.given = KINDS[self.kind]
        self.measure, self.test_measure = make(), make()

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.log("batch", torch.nan_to_num(self.measure(*self.given(logits.detach(), batch[1]))).double().mean())
        if self.kind != "samples":  # whose value has no fixed length
            self.log("measure", self.measure, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch[1])

    def test_step(self, batch, batch_idx):
        self.test_measure.update(*self.given(self(batch[0]), batch[1]))
        if self.kind != "samples":
            self.log("test_measure", self.test_measure)


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_object_has_the_values_of_each_client(kind, tmp_path):
    sizes, said = check(type("Measured", (Measured,), {"kind": kind}), tmp_path)
    assert sizes == [4, 4]
    assert not said_alone(said)


class Several(Plain):
    """A wrapper and a collection of metrics that depend on values, updated in some batches only."""

    def __init__(self):
        super().__init__()
        self.by_class = ClasswiseWrapper(objects.MulticlassAccuracy(4, average=None, ignore_index=0))
        self.both = MetricCollection([objects.MulticlassAUROC(4), objects.MulticlassAccuracy(4, ignore_index=1)])
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        if batch_idx != 1:
            self.log_dict(self.by_class(logits, batch[1]))
            self.both.update(logits, batch[1])
            self.log_dict(self.both, on_step=False, on_epoch=True)
        self.mean(logits.square().mean().detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, batch[1])


def test_wrappers_and_collections_use_such_objects(tmp_path):
    sizes, said = check(Several, tmp_path)
    assert sizes == [4, 4]
    assert not said_alone(said)


FUNCTIONS = {
    "classes": lambda z, y: functions.accuracy(z.argmax(1), y, task="multiclass", num_classes=4),
    "F1 score": lambda z, y: functions.f1_score(z, y, task="multiclass", num_classes=4, average="macro"),
    "logits": lambda z, y: functions.accuracy(z[:, 0], (y > 1).long(), task="binary"),
    "marks": lambda z, y: functions.accuracy(z, F.one_hot(y, 4), task="multilabel", num_labels=4),
    "confusion": lambda z, y: functions.confusion_matrix(z, y, task="multiclass", num_classes=4).diagonal().sum(),
}


@pytest.mark.parametrize("measure", FUNCTIONS.values(), ids=list(FUNCTIONS))
def test_a_function_has_the_value_of_each_client(measure, tmp_path):
    class Measured(Plain):
        def training_step(self, batch, batch_idx):
            logits = self(batch[0])
            self.log("measure", measure(logits, batch[1]).double())
            return F.cross_entropy(logits, batch[1])

        def test_step(self, batch, batch_idx):
            self.log("test_measure", measure(self(batch[0]), batch[1]).double())

    sizes, said = check(Measured, tmp_path)
    assert sizes == [4, 4]
    assert not said_alone(said)


class LabelsBeyond(Plain):
    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.log("accuracy", functions.accuracy(logits[:, 0], batch[1], task="binary"))  # of 4 classes
        return F.cross_entropy(logits, batch[1])


@pytest.mark.parametrize("engine", ["fast", "auto"])
def test_labels_that_a_function_refuses_are_the_clients_error(engine, tmp_path):
    trainer = FederatedTrainer(
        algorithm=FedAvg(), federation=Federation(clients_per_round=4, local_engine=engine), max_rounds=1, logger=False,
        accelerator="cpu", devices=1, enable_progress_bar=False, quiet=True, default_root_dir=str(tmp_path),
    )  # fmt: skip
    with pytest.raises(ClientFailed, match=r"RuntimeError: Detected the following values in `target`: tensor\(\[0"):
        trainer.fit(LabelsBeyond(), Data((8,)))


SCORES = sys.modules["torchmetrics.functional.classification.stat_scores"]
ROWS = torch.tensor([[0.2, 0.9], [0.2, 1.5], [0.4, torch.nan], [-0.1, 0.3]], dtype=torch.float64)


@pytest.mark.parametrize("normalization", ["sigmoid", "softmax", None])
@pytest.mark.parametrize("given", [ROWS, ROWS.repeat(2, 3).view(2, 4, 6).transpose(0, 1)], ids=["vectors", "tables"])
def test_logits_are_found_for_each_client(normalization, given):
    if normalization != "sigmoid" and given.dim() == 2:
        given = given.unsqueeze(1)  # since the classes are in dimension 1 of a client's numbers
    expected = torch.stack([normalize_logits_if_needed(row, normalization) for row in given])
    with functions_for_clients(), functorch.vmap_level(4) as level, LayerRules(4, level):
        ours = SCORES.normalize_logits_if_needed(functorch.wrap(given, 0, level), normalization)
        ours = unwrapped(ours, level, 4)
    torch.testing.assert_close(ours, expected, atol=1e-15, rtol=0.0, equal_nan=True)  # kernels differ in the last bit
    assert SCORES.normalize_logits_if_needed is normalize_logits_if_needed


def test_samples_are_kept_for_each_client_and_forgotten_by_those_that_reset():
    module = nn.Module()
    module.samples = CatMetric()
    states = MetricStates(module, 3)

    def add(low, high, values):
        with functorch.vmap_level(high - low) as level, states.part(low, high).shown(level):
            module.samples.update(functorch.wrap(torch.tensor(values), 0, level))

    add(0, 3, [1.0, 2.0, 3.0])
    add(1, 3, [5.0, 7.0])
    with states.part(0, 3).kept():
        add(0, 3, [9.0, 9.0, 9.0])
    with states.part(2, 3).shown(0):
        module.samples.update(8.0)
    assert [[float(each) for each in row] for row in states.lists[0]] == [[1.0], [2.0, 5.0], [3.0, 7.0, 8.0]]
    assert states.counts[0] == [1, 2, 3]
    states.reset(module.samples, [True, False, True])
    assert [len(row) for row in states.lists[0]] == [0, 2, 0]
    assert states.counts[0] == [0, 2, 0]
    assert module.samples.value == []


class Wrapping(Metric):
    """A metric that keeps samples, and has another one."""

    def __init__(self):
        super().__init__()
        self.add_state("kept", [], dist_reduce_fx="cat")
        self.inner = MeanMetric()

    def update(self, value):
        self.kept.append(value)
        self.inner.update(value)

    def compute(self):
        return torch.stack(self.kept).sum() + self.inner.compute()


class WrapsAndKeeps(Plain):
    def __init__(self):
        super().__init__()
        self.measure = Wrapping()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.measure.update(loss.detach())
        self.log("measure", self.measure, on_step=False, on_epoch=True)
        return loss


class ReadsAList(Plain):
    def __init__(self):
        super().__init__()
        self.measure = CatMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.measure.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("measure", sum(self.measure.value))
        self.measure.reset()


class Refusing(Metric):
    """A metric that raises at small values."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, value):
        if float(value) < 1.3:
            raise ValueError("too small")
        self.total = self.total + value

    def compute(self):
        return self.total


class CatchesAnError(Plain):
    def __init__(self):
        super().__init__()
        self.measure = Refusing()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        try:
            self.measure.update(loss.detach())
        except Exception:
            return 2 * loss
        return loss

    def on_train_epoch_end(self):
        self.log("measure", self.measure.compute())


class CatchesALabel(Plain):
    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        try:
            accuracy = functions.accuracy(logits[:, 0], batch[1], task="binary", ignore_index=3)
        except Exception:
            accuracy = torch.tensor(-1.0)
        self.log("accuracy", accuracy.double())
        return F.cross_entropy(logits, batch[1])


class CatchesANumber(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        try:
            return loss * loss.item()
        except Exception:
            return 3 * loss


class CatchesARefusal(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        try:
            if batch[1][0] > 1:
                loss = 2 * loss
        except Exception:
            return 3 * loss
        return loss


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (WrapsAndKeeps, "uses the metric object `Wrapping`, which keeps samples and wraps other metric objects"),
        (ReadsAList, "uses the metric object `CatMetric`, which keeps samples and is read without its methods"),
        (CatchesAnError, "calls `Refusing.update`, which fails for a client (ValueError: too small)"),
        (
            CatchesALabel,
            "calls `_binary_stat_scores_tensor_validation`, which fails for a client (RuntimeError: Detected",
        ),
        (CatchesANumber, "reads a number out of a tensor"),
        (CatchesARefusal, "branches on the value of a tensor, which differs between clients"),
    ],
)
def test_an_error_of_one_client_is_not_one_of_all(kind, words, tmp_path):
    sizes, said = check(kind, tmp_path)
    assert not sizes
    assert any(words in text for text in said_alone(said)), said
