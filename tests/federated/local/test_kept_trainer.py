"""A trainer that evaluates one client after another: it is kept, unless a step has left something there."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

from helpers.networks import Classifier
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.local_options import LocalOptions


class Seen(Classifier):
    """Classifier that counts its test batches in the trainer."""

    def test_step(self, batch, batch_idx):
        self.trainer.seen = getattr(self.trainer, "seen", 0) + 1
        self.log("seen", float(self.trainer.seen), reduce_fx="max")


class SeenInTheStrategy(Classifier):
    """Classifier that counts its test batches in a part of the trainer."""

    def test_step(self, batch, batch_idx):
        part = self.trainer.strategy
        part.seen = getattr(part, "seen", 0) + 1
        self.log("seen", float(part.seen), reduce_fx="max")


class ChangesAnOption(Classifier):
    """Classifier that counts its test batches in an option of the trainer."""

    def test_step(self, batch, batch_idx):
        self.trainer.log_every_n_steps += 1
        self.log("seen", float(self.trainer.log_every_n_steps), reduce_fx="max")


class LogsByTheBatch(Classifier):
    """Classifier that logs a batch of two with another option than one of one."""

    def test_step(self, batch, batch_idx):
        self.log("size", float(len(batch[1])), prog_bar=len(batch[1]) == 2)


def test_options_of_one_client_do_not_bind_the_next():
    engine, module = FastEngine(Fabric(accelerator="cpu", devices=1), LocalOptions()), LogsByTheBatch()
    for size in (2, 1):
        data = TensorDataset(torch.ones(size, 8), torch.zeros(size, dtype=torch.int64))
        assert engine.evaluate(module, DataLoader(data, batch_size=2), stage="test") == {"size": size}


@pytest.mark.parametrize("kind", [Seen, SeenInTheStrategy, ChangesAnOption, Classifier])
def test_a_step_that_writes_into_the_trainer_gets_a_new_one(kind):
    engine, module = FastEngine(Fabric(accelerator="cpu", devices=1), LocalOptions()), kind()
    loader = DataLoader(TensorDataset(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)), batch_size=2)
    first, second = (engine.evaluate(module, loader, stage="test") for _ in range(2))
    assert first == second
    assert (engine._evaluator is None) is (kind is not Classifier)
