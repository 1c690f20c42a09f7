"""Stacks whose evaluations are recorded score as those that call the module's step for each batch, bit by bit."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanSquaredError, Metric
from torchmetrics.classification import MulticlassAccuracy

from helpers.device import DEVICE
from lightning_sparsefl import FedAvg, FederatedTrainer, Federation, FedPer, Local
from lightning_sparsefl.data import Dirichlet, FederatedDigits
from lightning_sparsefl.federated.evaluation.scorer import Scorer
from lightning_sparsefl.federated.local.stacked.recording.recorded_evaluation import EvaluationPass


class Total(Metric):
    """A sum times a factor."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.factor = 1.0

    def update(self, values):
        self.total += self.factor * values.sum()

    def compute(self):
        return self.total


class Net(LightningModule):
    """Module that logs values and metric objects; the cases change its test step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro", validate_args=False)
        self.error, self.total = MeanSquaredError(), Total()

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.log("loss", F.cross_entropy(logits, batch[1]))
        self.log_dict({"least": logits.min(), "most": logits.max()}, reduce_fx="min")
        self.accuracy(logits, batch[1])
        self.log("acc", self.accuracy, on_step=True, on_epoch=True)
        self.error.update(logits.softmax(1), F.one_hot(batch[1], 10).float())
        self.log("mse", self.error)
        self.total.update(torch.ones_like(batch[1]))
        self.log("total", self.total)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def repeated(captures):
    """The sizes of the recorded evaluations that were repeated; the first of each kind is compared with a call."""
    sizes, before = [], EvaluationPass.repeat

    def repeat(one, recorded):
        sizes.append(one.part.size)
        before(one, recorded)

    with mock.patch.object(EvaluationPass, "repeat", repeat):
        yield sizes


def scores_of(folder, module, records, algorithm=None, rounds=6):
    """Return the personal scores of each round."""
    found, before = [], Scorer.scores

    def scores(scorer, state):
        found.append(before(scorer, state).personal)
        return before(scorer, state)

    trainer = FederatedTrainer(
        algorithm=algorithm or FedAvg(),
        federation=Federation(local_engine="stacked", clients_per_round=3, record_steps=records),
        accelerator=DEVICE.type,
        max_rounds=rounds,
        limit_train_batches=2,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=str(folder),
        seed=0,
    )
    data = FederatedDigits(
        num_clients=9, batch_size=16, eval_batch_size=8, eval_split="test", partition=Dirichlet(2.0), test_per_client=10
    )
    with mock.patch.object(Scorer, "scores", scores):
        trainer.fit(module, data)
    return found


def compare(folder, make, repeated, **options):
    """Return the scores with and without recordings, which must be equal."""
    called = scores_of(folder / "called", make(), False, **options)
    assert not repeated
    with warnings.catch_warnings(record=True) as seen:
        recorded = scores_of(folder / "recorded", make(), True, **options)
    assert recorded == called
    assert not any("`update`" in str(each.message) for each in seen)  # as if a metric had not been updated
    assert len(called[0]) == 9
    return called


@pytest.mark.slow_after_first("captures")
@pytest.mark.parametrize("algorithm", [FedAvg(), FedPer(own=("net.3",)), Local()], ids=["shared", "heads", "own"])
def test_recordings_change_no_score(algorithm, tmp_path, repeated):
    scores = compare(tmp_path, Net, repeated, algorithm=algorithm)
    assert len(repeated) > 20
    assert {"loss", "least", "most", "acc", "acc_epoch", "mse"} <= scores[0][0].keys()


class WithNorm(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


class Double(Net):
    """Logs with numbers of samples and types of its own."""

    def test_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.log("weighted", logits.double().mean(), batch_size=3 * len(batch[1]))
        self.log("right", (logits.argmax(1) == batch[1]).half().mean())


class WritesIntoItsBatch(Net):
    def test_step(self, batch, batch_idx):
        batch[0].mul_(0.5)
        super().test_step(batch, batch_idx)


@pytest.mark.slow_after_first("captures")
@pytest.mark.parametrize("kind", [WithNorm, Double, WritesIntoItsBatch], ids=lambda kind: kind.__name__)
def test_recordings_of_other_modules_change_no_score(kind, tmp_path, repeated):
    compare(tmp_path, kind, repeated, algorithm=Local())
    assert repeated


class ByNumber(Net):
    def test_step(self, batch, batch_idx):
        if batch_idx % 2 == 0:
            super().test_step(batch, batch_idx)
        self.log("always", batch[0].mean())


class ByRound(Net):
    def test_step(self, batch, batch_idx):
        self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]) * (1 + self.trainer.limit_train_batches))


class ByBuffer(Net):
    """Reads numbers out of a buffer that all clients share."""

    def __init__(self):
        super().__init__()
        self.register_buffer("prior", torch.ones(2))

    def test_step(self, batch, batch_idx):
        self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]) * self.prior.tolist()[0])


@pytest.mark.slow_after_first("captures")
@pytest.mark.parametrize("kind", [ByNumber, ByRound, ByBuffer], ids=lambda kind: kind.__name__)
def test_a_step_that_depends_on_more_than_batch_and_weights_is_called(kind, tmp_path, repeated):
    compare(tmp_path, kind, repeated)
    assert not repeated


@pytest.mark.slow_after_first("captures")
def test_another_option_of_a_metric_begins_new_recordings(tmp_path, repeated):
    """As if somebody had changed the metric object between two evaluations."""
    evaluations, before = [], Scorer._evaluate

    def run(scorer, *args, **options):
        evaluations.append(len(repeated))
        scorer.worker.module.total.factor = 1.0 if len(evaluations) < 12 else 0.5
        return before(scorer, *args, **options)

    def make():
        evaluations.clear()
        return Net()

    with mock.patch.object(Scorer, "_evaluate", run):
        scores = compare(tmp_path, make, repeated, rounds=12)
    assert 0 < evaluations[11] < len(repeated)
    assert scores[-1][0]["total"] == scores[0][0]["total"] / 2
