"""What a metric keeps beside its states is not there for the next client, round or score."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import MetricCollection, MetricTracker, MinMaxMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassAveragePrecision

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.callbacks.trial import trial
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.federated.local import isolation, tensor_contents
from lightning_sparsefl.federated.local.isolation import ModuleState

CLIENTS = 4


class Own(SumMetric):
    """Sums the right answers, and keeps the largest sum, the samples and the batches in attributes of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.best, self.sizes, self.samples = 0.0, [], torch.zeros(())

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        super().update((logits.argmax(1) == labels).sum())
        self.sizes.append(len(labels))
        self.samples += len(labels)

    def compute(self) -> torch.Tensor:
        self.best = max(self.best, float(super().compute()))
        return torch.tensor(self.best + 1000 * len(self.sizes)) + 1e6 * self.samples


class Task(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(8, 4))
        self.metric: Any = self.made()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch[0])
        self.metric.update(logits, batch[1])
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metric.update(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Logged(Task):
    made = Own

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("own", self.metric)


class Bounds(Task):
    def made(self) -> MinMaxMetric:
        return MinMaxMetric(MulticlassAccuracy(4, average="micro"))

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.metric.compute())
        self.metric.reset()


class Tracked(Task):
    def made(self) -> MetricTracker:
        return MetricTracker(MulticlassAccuracy(4, average="micro"))

    def on_train_epoch_start(self) -> None:
        self.metric.increment()

    def on_validation_epoch_start(self) -> None:
        self.metric.increment()

    def on_validation_epoch_end(self) -> None:
        self.log_dict({"best": self.metric.best_metric(), "steps": float(self.metric.n_steps)})


def blobs() -> FederatedBlobs:
    sizes = {"num_train": 120, "num_test": 20, "num_clients": CLIENTS, "batch_size": 4, "eval_batch_size": 5}
    return FederatedBlobs(**sizes, dim=8, val_fraction=0.3)


def scores_of(folder: Any, model: type[Task], engine: str, devices: int) -> tuple[Task, dict[str, float]]:
    trainer = FederatedTrainer(
        algorithm=FedAvg(),
        federation=Federation(clients_per_round=3, local_engine=engine),
        accelerator="cpu",
        devices=devices,
        strategy="client_parallel_fork" if devices > 1 else "auto",
        max_rounds=2,
        default_root_dir=str(folder),
        logger=False,
        enable_progress_bar=False,
    )
    torch.manual_seed(0)
    module = model()
    found = trainer.fit(module, blobs())
    return module, {key: value for key, value in found.items() if key.count("/") == 1 and key.split("/")[0] in KINDS}


KINDS = ("global", "personal")


def scores_alone(trained: Task) -> dict[str, float]:
    """Evaluate a new module for each client with a Trainer of its own, and one for the samples of all clients."""
    data = blobs()
    data.setup("fit")
    loaders = [data.val_dataloader(), *map(data.client_val_dataloader, range(CLIENTS))]
    found = []
    for loader in loaders:
        fresh = type(trained)()
        fresh.net.load_state_dict(trained.net.state_dict())
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(accelerator="cpu", enable_checkpointing=False, **quiet)
        found += trainer.validate(fresh, loader, verbose=False)
    pooled, *each = found
    mean = {f"personal/{key}": sum(scores[key] for scores in each) / CLIENTS for key in pooled}
    return mean | {f"global/{key}": value for key, value in pooled.items()}


@pytest.mark.parametrize("model", [Logged, Bounds, Tracked])
@pytest.mark.parametrize(("engine", "devices"), [("fast", 1), ("trainer", 1), ("fast", 2)])
@pytest.mark.filterwarnings("ignore")  # a real Trainer has some of its own
def test_a_client_has_the_scores_of_a_new_module(model: Any, engine: str, devices: int, tmp_path: Any) -> None:
    module, found = scores_of(tmp_path, model, engine, devices)
    expected = scores_alone(module)
    assert expected
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-6)


class Curves(Task):
    """Has a collection whose metrics keep lists of all samples, which torchmetrics lets them share."""

    def made(self) -> MetricCollection:
        kinds = {"auroc": MulticlassAUROC(4), "precision": MulticlassAveragePrecision(4)}
        return MetricCollection({**kinds, "right": MulticlassAccuracy(4, average="micro")})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metric.update(self.net(batch[0]).softmax(1), batch[1])
        self.log_dict(self.metric)


@pytest.mark.parametrize("engine", ["fast", "stacked", "trainer"])
@pytest.mark.filterwarnings("ignore")  # a real Trainer has some of its own
def test_metrics_that_share_their_lists_count_each_batch_once(engine: str, tmp_path: Any) -> None:
    """Also in the second evaluation, before which their groups are forgotten and the lists emptied in place."""
    module, found = scores_of(tmp_path, Curves, engine, 1)
    expected = scores_alone(module)
    assert {"global/auroc", "personal/precision"} < expected.keys()
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5)


def facts(metric: Own) -> tuple[Any, ...]:
    return metric.best, list(metric.sizes), float(metric.samples), sorted(vars(metric))


def test_attributes_of_every_kind_come_back_and_new_ones_go() -> None:
    module = Logged()
    module.metric.sizes.append(3)
    before, sizes = facts(module.metric), module.metric.sizes
    state = ModuleState(module)
    module.metric(torch.eye(4), torch.arange(4))
    module.metric.late = 1
    assert facts(module.metric) != before
    state.restore()
    assert facts(module.metric) == before
    assert module.metric.sizes is sizes


def test_modules_that_a_list_or_a_dict_has_lost_or_gained_do_not_stay() -> None:
    module = L.LightningModule()
    module.listed, module.named = nn.ModuleList([nn.ReLU()]), nn.ModuleDict({"a": nn.ReLU(), "b": nn.Tanh()})
    before = list(module.named_modules())
    state = ModuleState(module)
    module.listed.append(nn.Tanh())
    module.named["a"] = nn.Tanh()
    module.named.pop("b")
    state.restore()
    assert list(module.named_modules()) == before


def test_a_trial_step_leaves_no_attribute_behind() -> None:
    module = Logged()
    with trial(module):
        module.metric.update(torch.eye(4), torch.arange(4))
        module.metric.compute()
        module.metric.late = 1
    assert module.metric.best == 0
    assert not hasattr(module.metric, "late")
    assert module.metric.update_count == 0


class WeightNorm(SumMetric):
    """Keeps the network's parameters and a buffer in containers, and one of them as an attribute."""

    def __init__(self, net: nn.Module, buffer: torch.Tensor) -> None:
        super().__init__()
        self.parameters_of, self.named, self.buffer = list(net.parameters()), dict(net.named_parameters()), [buffer]
        self.kept = {net[1].weight}

    def update(self) -> None:
        super().update(sum(parameter.detach().norm() for parameter in self.parameters_of))


class Regularized(Logged):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))
        self.norm = self.norms()

    def norms(self) -> Any:
        return WeightNorm(self.net, self.steps)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        if self.norm is not None:
            self.norm.update()
        return super().training_step(batch, batch_idx)


class Plain(Regularized):
    def norms(self) -> None:
        return None


@pytest.mark.parametrize("engine", ["fast", "stacked", "trainer"])
@pytest.mark.filterwarnings("ignore")  # a real Trainer has some of its own
def test_parameters_that_a_metric_holds_are_trained(engine: str, tmp_path: Any) -> None:
    """They are what a client learns, unlike other tensors of a metric."""
    trained, plain = (scores_of(tmp_path / kind.__name__, kind, engine, 1)[0] for kind in (Regularized, Plain))
    assert plain.steps > 0
    for name, tensor in plain.state_dict().items():
        assert torch.allclose(trained.state_dict()[name], tensor, atol=1e-6), name
    torch.manual_seed(0)
    assert not torch.equal(Plain().net[1].weight, trained.net[1].weight)


def test_a_large_tensor_of_a_metric_that_is_written_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolation, "_messages", type(isolation._messages)())
    monkeypatch.setattr(tensor_contents, "_LARGE", 1)
    module = Logged()
    state = ModuleState(module)
    module.metric.samples.add_(1)
    with caplog.at_level(logging.INFO):
        state.restore()
    (said,) = [record.message for record in caplog.records]
    assert "has changed `Own.samples` in place" in said
