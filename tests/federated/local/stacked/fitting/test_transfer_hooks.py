"""Hooks of a module around the transfer of batches to the device, which see the batch of each client of a stack."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl import FedDST, FedSpa
from tests.federated.local.stacked import test_odd_modules as odd
from tests.federated.local.stacked.test_odd_modules import Images, Plain, check, check_alone, check_found, said_alone


class Standardizes(Plain):
    """Standardizes batches, in training by their own moments, and in evaluation by a mean of those."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        inputs, labels = batch
        if self.trainer.training:
            self.mean.mul_(0.9).add_(0.1 * inputs.mean(0))
            return (inputs - inputs.mean(0)) / (1 + inputs.abs().mean(0)), labels
        return inputs - self.mean, labels


class Renames(Plain):
    """Makes a dictionary of the batch, before and after the transfer."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"inputs": batch[0] * 2, "labels": batch[1]}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "weights": torch.linspace(0, 1, len(batch["labels"]))}

    def loss(self, batch):
        losses = F.cross_entropy(self(batch["inputs"]), batch["labels"], reduction="none")
        self.log("weighted", (batch["weights"] * losses).mean())
        return losses.mean()


class Moves(Plain):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return batch[0].flatten(1), batch[1]


class Counts(Plain):
    """Weighs samples by how many batches there were, in an attribute."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.seen += 1
        return batch[0] / (1 + self.seen), batch[1]


class Learned(Plain):
    """Scales inputs by a weight that is trained."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * self.scale, batch[1]


class CountsSteps(Plain):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        factor = 1 + 0.1 * self.global_step if self.trainer.training else 1
        return batch[0] * factor, batch[1]


class Pictures(Images):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return F.avg_pool2d(batch[0].flip(-1), 3, stride=1, padding=1), batch[1]


@pytest.mark.parametrize("sizes", [list(odd.SIZES), [20] * 4], ids=["ragged", "even"])
@pytest.mark.parametrize("kind", [Standardizes, Renames, Moves, Counts, CountsSteps, Learned, Pictures])
def test_a_hook_sees_the_batch_of_each_client(kind, sizes, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", sizes)
    stacks, said = check(kind, tmp_path)
    assert stacks == [4, 4], said
    assert not said_alone(said)


@pytest.mark.parametrize("algorithm", [FedSpa(), FedDST(density=0.5)], ids=lambda algorithm: type(algorithm).__name__)
def test_gradients_are_those_of_transferred_batches(algorithm, tmp_path):
    stacks, said = check(Standardizes, tmp_path, algorithm=algorithm)
    assert stacks
    assert not said_alone(said)


class Augments(Plain):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + torch.randn_like(batch[0]), batch[1]


class ReadsNumbers(Plain):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0] / float(batch[0].max()), batch[1]


class FollowsTheLoss(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if not self.training:
            return batch
        return batch[0] * (1 + 0.1 * self.trainer.callback_metrics.get("train_loss", 0.0)), batch[1]


class WarmsUp(Plain):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        if self.training:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] *= 0.9
        return batch


class Freezes(Plain):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.training and self.current_epoch and len(batch[0]) < 5:
            self.net[0].eval()
        return batch


class ReadsWeights(Plain):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        if not self.training or self.global_step < 2:
            return batch
        return batch[0] * (1 + self.optimizers().param_groups[0]["params"][0].abs().mean()), batch[1]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (WarmsUp, "sets options of the optimizer, which all clients share"),
        (Freezes, "changes layers of the module, their modes or their hooks, which all clients share"),
        (ReadsWeights, "reads the optimizer's parameters, which are those of all clients"),
    ],
)
def test_what_a_hook_does_to_some_clients_is_found(kind, words, tmp_path):
    check_found(kind, words, tmp_path)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (FollowsTheLoss, "is preceded by a hook of the batch transfer, which asks for `trainer.callback_metrics`"),
        (Augments, "draws random numbers of torch, which are others than those of a client alone"),
        (ReadsNumbers, "is preceded by a hook of the batch transfer, which reads a number out of a tensor"),
    ],
)
def test_what_a_hook_cannot_do_for_all_is_named(kind, words, tmp_path):
    check_alone(kind, words, tmp_path)
