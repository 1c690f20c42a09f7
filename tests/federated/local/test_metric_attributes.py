"""What a metric keeps beside its states is not there for the next client, round or score."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import MetricTracker, MinMaxMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.callbacks.trial import trial
from lightning_sparsefl.data import FederatedBlobs
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
    return FederatedBlobs(num_train=120, num_test=20, num_clients=CLIENTS, dim=8, val_fraction=0.3, batch_size=4)


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
