"""The worker that trains one client after another."""

from __future__ import annotations

import logging
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.federated.local import worker
from lightning_sparsefl.federated.local.worker import ClientWorker


def test_warnings_are_shown_once_and_in_the_order_of_their_appearance():
    worker = object.__new__(ClientWorker)
    worker._warned = set()
    texts = [f"warning {number}" for number in range(40)]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for _ in range(2):
            with worker._warning_once():
                for text in texts:
                    warnings.warn(text, UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == texts


class Annealed(L.LightningModule):
    """Counts its steps in a buffer, by which it weighs its loss."""

    def __init__(self, dtype):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(8, 4), nn.BatchNorm1d(4))
        self.register_buffer("steps", torch.zeros((), dtype=dtype))
        self.register_buffer("cache", torch.zeros(2, dtype=torch.long), persistent=False)

    def forward(self, samples):
        return self.net(samples)

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.cache += 1
        return F.cross_entropy(self(batch[0]), batch[1]) / self.steps

    def test_step(self, batch, batch_idx):
        self.log("steps", self.steps.float())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("dtype", "steps"), [(torch.long, 0), (torch.float32, 4)])
def test_an_integer_buffer_that_a_client_changes_is_named_once(dtype, steps, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(worker, "_messages", WarningCache())
    trainer = FederatedTrainer(
        algorithm=FedAvg(),
        federation=Federation(clients_per_round=4),
        max_rounds=2,
        accelerator="cpu",
        default_root_dir=str(tmp_path),
        logger=False,
        enable_progress_bar=False,
        seed=0,
    )
    data = FederatedBlobs(
        num_clients=4, num_train=80, num_test=8, num_classes=4, dim=8, eval_split="test", batch_size=10
    )
    with caplog.at_level(logging.INFO):
        scores = trainer.fit(Annealed(dtype), data)
    assert scores["global/steps"] == steps
    said = [record.message for record in caplog.records if "is set back for" in record.message]
    assert [text.partition("`steps`")[1] for text in said] == ["`steps`"] * (dtype == torch.long)
