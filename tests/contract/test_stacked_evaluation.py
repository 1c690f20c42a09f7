"""Clients that are evaluated as a stack score as one after another, to 1e-12 in float64, on any number of ranks."""

from __future__ import annotations

import copy
from unittest import mock

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, MeanSquaredError, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.image import PeakSignalNoiseRatio

from helpers.device import DEVICE, on_several_ranks
from lightning_sparsefl import FedAvg, FederatedTrainer, Federation, FedPer, Local
from lightning_sparsefl.data import Dirichlet, FederatedDigits
from lightning_sparsefl.federated.evaluation.scorer import Scorer
from lightning_sparsefl.federated.local.stacked.fitting.fit import StackedFit
from lightning_sparsefl.federated.local.stacked.scoring import evaluator
from lightning_sparsefl.federated.local.stacked.scoring.evaluation import StackedEvaluation
from lightning_sparsefl.models import MLP
from lightning_sparsefl.testing.contents import rows


class Kept(Metric):
    """A metric that keeps all samples."""

    def __init__(self):
        super().__init__()
        self.add_state("samples", [], dist_reduce_fx="cat")

    def update(self, samples):
        self.samples.append(samples)

    def compute(self):
        return torch.cat(self.samples).amax()


class Best(Metric):
    """A metric that keeps a largest value in an attribute that is no state, at updates or at its value."""

    def __init__(self, when):
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.when, self.best = when, torch.tensor(0.0, dtype=torch.float64)

    def update(self, samples):
        self.total = self.total + samples.abs().mean()
        if self.when == "update":
            self.best = torch.maximum(self.best, samples.abs().mean())

    def compute(self):
        if self.when == "compute":
            self.best = torch.maximum(self.best, self.total)
        return self.best


class Decided(Metric):
    """A metric whose value is computed with numbers and branches, and fails where nothing was counted."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, samples):
        self.total = self.total + samples.abs().sum()
        self.count = self.count + samples.numel()

    def compute(self):
        mean = float(self.total) / int(self.count)
        return torch.tensor(mean if self.total > 1 else 0.0, dtype=torch.float64)


class Judged(L.LightningModule):
    """A network of all kinds of layers, whose evaluation ends as `judge` says."""

    def __init__(self, judge):
        super().__init__()
        self.judge = judge
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, groups=2),
            nn.GroupNorm(2, 8),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.LayerNorm(8),
            nn.Linear(8, 10),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")
        self.noise = PeakSignalNoiseRatio(data_range=(0.0, 1.0))
        self.mean = MeanMetric(nan_strategy="ignore").set_dtype(torch.float64)
        self.error = MeanSquaredError().set_dtype(torch.float64)
        accuracies = {"micro": MulticlassAccuracy(10, average="micro", validate_args=False)}
        accuracies["macro"] = MulticlassAccuracy(10, average="macro")
        accuracies["f1"] = MulticlassF1Score(10, average="macro")
        self.alone = MetricCollection(accuracies, compute_groups=False)
        self.grouped = MetricCollection(copy.deepcopy(accuracies))
        self.kept, self.at_update, self.at_compute = Kept(), Best("update"), Best("compute")
        self.decided = Decided()

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        return self.judge(self, self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Late(Judged):
    """Logs some keys in the fourth batch only, which not every client has."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if batch_idx == 3:
            self.log("late", self.accuracy)
            self.log("fourth", batch[0].mean())
            decides_at_compute(self, batch[0], batch[1])


class Ended(Judged):
    """Computes a metric when the evaluation ends, as modules often do, and adds to checkpoints."""

    def on_validation_start(self):
        self.log("first", self.net[0].bias.sum())

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("acc", self.accuracy)
        self.log("mean", self(batch[0]).mean(), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self):
        self.log("acc at the end", self.accuracy.compute())
        self.accuracy.reset()
        self.log("mean", self.mean(torch.ones(())))
        self.log("mse", self.error)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["note"] = 1


class Hooked(Judged):
    def on_validation_model_eval(self):
        self.eval()

    def on_validation_epoch_end(self):
        self.log("acc", self.accuracy.compute())


class Reading(Judged):
    def on_validation_epoch_end(self):
        self.log("double", 2 * self.trainer.callback_metrics.get("loss", torch.zeros(())))


class Rounding(Judged):
    def on_validation_epoch_end(self):
        self.log("good", float(self.accuracy.compute() > 0.5))


def updates(module, logits, targets):
    module.accuracy.update(logits, targets)
    module.error.update(logits.softmax(1), F.one_hot(targets, 10).to(logits))


def by_tensors(module, logits, targets):
    losses = F.cross_entropy(logits, targets, reduction="none")
    module.log("loss", losses.mean())
    module.log("both", losses.mean(), on_step=True, on_epoch=True)
    module.log("step", losses.mean(), on_step=True, on_epoch=False)
    module.log_dict({"least": losses.min(), "size": float(len(targets))}, reduce_fx="min")
    module.log("sum", losses.sum(), reduce_fx="sum")
    module.log("right", (logits.argmax(1) == targets).double().mean(), batch_size=len(targets))


def by_objects(module, logits, targets):
    module.accuracy(logits, targets)
    module.log("acc", module.accuracy)
    module.error.update(logits.softmax(1), F.one_hot(targets, 10).to(logits))
    module.log("mse", module.error, on_step=True, on_epoch=True)


def by_calls(module, logits, targets):
    value = module.error(logits.softmax(1), F.one_hot(targets, 10).to(logits))  # resets the state, and adds in place
    module.log("mse", module.error)
    module.log("of batches", value)


def by_collections(module, logits, targets):
    module.alone.update(logits, targets)
    module.log_dict(module.alone)

    module.grouped.update(logits, targets)
    module.log_dict({f"grouped {name}": metric for name, metric in module.grouped.items()})


def by_averages(module, logits, targets):
    """A state that is the mean over the updates, of which clients have different numbers, and a mean of all values."""
    module.noise(logits.softmax(1), F.one_hot(targets, 10).to(logits))
    module.log("noise", module.noise)
    module.log("range", module.noise.data_range)
    module.mean.update(F.cross_entropy(logits, targets), len(targets))
    module.log("mean", module.mean)


def gives_nan(module, logits, targets):
    module.mean.update(torch.where(logits > 0, logits, torch.nan))
    module.log("mean", module.mean)


def reads(module, logits, targets):
    module.log("loss", F.cross_entropy(logits, targets).item())


def keeps(module, logits, targets):
    module.kept.update(logits)
    module.log("kept", module.kept)


def keeps_at_update(module, logits, targets):
    module.at_update.update(logits)
    module.log("best", module.at_update)


def keeps_at_compute(module, logits, targets):
    module.at_compute.update(logits)
    module.log("best", module.at_compute)


def decides_at_compute(module, logits, targets):
    module.decided.update(logits)
    module.log("share", module.decided)


def scores_of(folder, engine, model, algorithm=None, devices=1, precision="64-true", **options):
    """Run two rounds; return the personal scores of each evaluation, and the run folder."""
    found, before = [], Scorer.scores

    def scores(scorer, state):
        found.append(before(scorer, state))
        return found[-1]

    torch.manual_seed(0)
    trainer = FederatedTrainer(
        algorithm=algorithm or FedAvg(),
        federation=Federation(
            local_engine=engine, clients_per_round=4, stack_size=8, unseen_clients=1, **options.pop("federation", {})
        ),
        accelerator=DEVICE.type,
        devices=devices,
        strategy="client_parallel_fork" if devices > 1 else "auto",
        max_rounds=2,
        precision=precision,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=str(folder),
        seed=0,
        timeout=120,
        **options,
    )
    data = FederatedDigits(
        num_clients=10, batch_size=8, eval_batch_size=7, val_fraction=0.2, partition=Dirichlet(alpha=0.5)
    )
    evaluator._messages.clear()
    with mock.patch.object(Scorer, "scores", scores):
        trainer.fit(MODELS[model](), data)
    return found, trainer.run_folder


def agree(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        for group in ("personal", "unseen"):
            assert getattr(mine, group).keys() == getattr(other, group).keys()
            for client, metrics in getattr(other, group).items():
                found = getattr(mine, group)[client]
                assert found.keys() == metrics.keys()
                for name, value in metrics.items():
                    assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-12), (client, name)


@pytest.fixture
def sizes():
    """The sizes of all stacks that are evaluated; a trial has two clients."""
    found, before = [], StackedEvaluation.run

    def run(evaluation):
        before(evaluation)
        found.append(evaluation.size)

    with mock.patch.object(StackedEvaluation, "run", run):
        yield found


MODELS = {
    "late": lambda: Late(by_objects),
    "tensors": lambda: Judged(by_tensors),
    "objects": lambda: Judged(by_objects),
    "calls": lambda: Judged(by_calls),
    "MLP": lambda: MLP(num_classes=10, sample_shape=(1, 8, 8)),
    "collections": lambda: Judged(by_collections),
    "averages": lambda: Judged(by_averages),
    "gives NaN": lambda: Judged(gives_nan),
    "reads a number": lambda: Judged(reads),
    "keeps all samples": lambda: Judged(keeps),
    "keeps at an update": lambda: Judged(keeps_at_update),
    "keeps at a value": lambda: Judged(keeps_at_compute),
    "decides at a value": lambda: Judged(decides_at_compute),
    "ended": lambda: Ended(updates),
    "hooked": lambda: Hooked(updates),
    "reads at the end": lambda: Reading(by_tensors),
    "rounds at the end": lambda: Rounding(updates),
}


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    "model",
    [
        "objects",
        "tensors",
        "calls",
        "collections",
        "averages",
        "ended",
        "decides at a value",
        "keeps all samples",
        "MLP",
    ],
)
@pytest.mark.parametrize("algorithm", [FedAvg(), FedPer(), Local()], ids=lambda algorithm: type(algorithm).__name__)
def test_scores_of_clients_with_different_numbers_of_samples(model, algorithm, tmp_path, sizes):
    """Of weights that are the same for all clients, for some of them different, and all different."""
    theirs, _ = scores_of(tmp_path / "fast", "fast", model, algorithm)
    assert sizes == []
    ours, _ = scores_of(tmp_path / "stacked", "stacked", model, algorithm)
    agree(ours, theirs)
    assert sizes == [2, 5, 5, 5, 5]


def test_keys_that_some_clients_do_not_log(tmp_path, sizes):
    theirs, _ = scores_of(tmp_path / "fast", "fast", "late")
    ours, _ = scores_of(tmp_path / "stacked", "stacked", "late")
    agree(ours, theirs)
    assert len({"late" in metrics for metrics in ours[0].personal.values()}) == 2
    assert max(sizes) == 5


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("reads a number", r"`Judged.validation_step` reads a number out of a tensor"),
        ("keeps at an update", r"keeps a tensor in `self.at_update.best`, which all clients share"),
        ("keeps at a value", r"keeps a tensor in `self.at_compute.best`, which all clients share"),
        ("gives NaN", r"gives the metric object `self.mean` NaN, or labels that are out of range"),
        ("hooked", r"`Hooked` overrides `on_validation_model_eval`, which is written for one client"),
        ("reads at the end", r"`on_validation_epoch_end`, which asks for `trainer.callback_metrics`, of which each"),
        ("rounds at the end", r"is followed by `on_validation_epoch_end`, which reads a number out of a tensor"),
    ],
)
def test_a_step_that_cannot_be_stacked_is_named_once(model, words, tmp_path, sizes):
    theirs, _ = scores_of(tmp_path / "fast", "fast", model)
    with (
        mock.patch.object(StackedFit, "run", autospec=True, side_effect=StackedFit.run) as trained,
        pytest.warns(UserWarning, match=f"Clients are evaluated one after another, since .*{words}") as said,
    ):
        ours, _ = scores_of(tmp_path / "stacked", "stacked", model)
    assert trained.call_count >= 2  # in each round
    assert len([each for each in said if "evaluated" in str(each.message)]) == 1
    agree(ours, theirs)
    assert sizes == []


@on_several_ranks
@pytest.mark.slow_after_first
@pytest.mark.parametrize("devices", [2, 3])
def test_ranks_have_the_bytes_of_one(devices, tmp_path, sizes):
    options = {"precision": "32-true", "federation": {"eval_after_training": True, "finetune_epochs": 1}}
    found, one = scores_of(tmp_path / "one", "stacked", "objects", **options)
    assert max(sizes) == 5
    _, several = scores_of(tmp_path / "several", "stacked", "objects", devices=devices, **options)
    for table in ("metrics.csv", "finetuned.csv"):
        assert without_times(several / table) == without_times(one / table)
    assert len(found) == 3


def without_times(table):
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows(table)]
