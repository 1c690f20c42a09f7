"""A trainer that evaluates one client after another: it is kept, unless a step has left something there."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

from helpers.networks import Classifier
from lightning_sparsefl.federated.local.engines import FastEngine, LocalOptions


class Seen(Classifier):
    """Classifier that counts its test batches in the trainer."""

    def test_step(self, batch, batch_idx):
        self.trainer.seen = getattr(self.trainer, "seen", 0) + 1
        self.log("seen", float(self.trainer.seen), reduce_fx="max")


@pytest.mark.parametrize("kind", [Seen, Classifier])
def test_a_step_that_writes_into_the_trainer_gets_a_new_one(kind):
    engine, module = FastEngine(Fabric(accelerator="cpu", devices=1), LocalOptions()), kind()
    loader = DataLoader(TensorDataset(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)), batch_size=2)
    first, second = (engine.evaluate(module, loader, stage="test") for _ in range(2))
    assert first == second
    assert (engine._evaluator is None) is (kind is Seen)
