"""Batch norm's running statistics, averaged, kept or fixed, against a loop in plain torch."""

from __future__ import annotations

import copy
from typing import NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation, FedSpa
from lightning_sparsefl.federated.storage.records import unpack_plain
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.density import erk, kept_counts
from lightning_sparsefl.sparse.prune import random_masks

SIZES, ROUNDS, EPOCHS, PER_ROUND, SEED, RATE = (4, 9, 15, 6), 4, 2, 3, 3, 0.2


class ClientData(L.LightningDataModule):
    """One client's data, in one batch; every batch names its client."""

    def __init__(self, client):
        super().__init__()
        rng = torch.Generator().manual_seed(client)
        x = client + (client + 1) * torch.randn(SIZES[client], 5, generator=rng, dtype=torch.float64)
        self.data = TensorDataset(x, torch.randint(3, (len(x),), generator=rng), torch.full((len(x),), client))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=64)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=64)


class Net(L.LightningModule):
    """A user's module with batch norm, which notes the state that every client was scored with."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
        self.example_input_array = torch.zeros(1, 5, dtype=torch.float64)
        self.scored_with = {}

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch):
        owners = set(batch[2].tolist())
        self.scored_with[owners.pop() if len(owners) == 1 else "global"] = copy.deepcopy(self.state_dict())
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE)


class Round(NamedTuple):
    cohort: list
    state: dict
    """The server's, from the checkpoint."""
    scored_with: dict
    """By client number, and "global"."""
    masks: dict
    """By client number, as uploaded."""
    kept: dict
    """By client number: the buffers that it keeps."""


class Recording(Callback):
    """At the round level: copies what a round leaves behind."""

    def __init__(self, path):
        self.path, self.rounds, self.cohort = path, [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.cohort.append(batch)

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)
        content = torch.load(self.path, weights_only=True)
        records = unpack_plain(content["sparsefl"]["clients"]["records"], torch.device("cpu"))
        masks = {k: record["shared"].get("masks", {}) for k, record in records.items()}
        kept = {k: record["buffers"] for k, record in records.items()}
        self.rounds.append(Round(self.cohort, content["state_dict"], dict(pl_module.scored_with), masks, kept))
        self.cohort = []


def trained(state, client, masks):
    """A client's state after its epochs of full-batch SGD, its masks held."""
    net = Net()
    net.load_state_dict(state)
    x, y, _ = ClientData(client).data.tensors
    parameters = dict(net.named_parameters())
    for _ in range(EPOCHS):
        with torch.no_grad():
            for name, mask in masks.items():
                parameters[name] *= mask
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter -= RATE * parameter.grad * masks.get(name, 1.0)
    return net.state_dict()


def statistics(state):
    return {name: value for name, value in state.items() if "running" in name}


def close(ours, expected):
    for name, value in expected.items():
        assert (ours[name] - value).abs().max() < 1e-9, name


def first_mask(method, server):
    """The one that all clients of a FedSpa start from, drawn as the package draws it."""
    if not isinstance(method, FedSpa):
        return {}
    everything = {n: v.shape for n, v in server.items() if "running" not in n and "tracked" not in n}
    shapes = {n: s for n, s in everything.items() if method.mask_pool == "all" or len(s) >= 2}
    counts = kept_counts(shapes, erk(shapes, method.density))
    return random_masks(shapes, counts, generator(SEED, "FedSpa mask"))


@pytest.fixture
def fit(tmp_path):
    """Runs a federation; returns the initial state and the rounds."""

    def run(method, buffers):
        torch.manual_seed(0)
        module, recording = Net(), Recording(tmp_path / "round.ckpt")
        initial = copy.deepcopy(module.state_dict())
        FederatedTrainer(
            algorithm=method,
            federation=Federation(clients_per_round=PER_ROUND, buffers=buffers),
            max_rounds=ROUNDS,
            max_epochs=EPOCHS,
            seed=SEED,
            callbacks=recording,
            precision="64-true",
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            default_root_dir=str(tmp_path),
        ).fit(module, [ClientData(client) for client in range(len(SIZES))])
        return initial, recording.rounds

    return run


def expected_rounds(method, buffers, initial, rounds):
    """The statistics that each round should leave at the server, and at every client where they are `local`.

    Weights and masks are taken from the run; the NumPy twins compare those.
    """
    server, own = initial, {}
    masks = dict.fromkeys(range(len(SIZES)), first_mask(method, server))
    for done in rounds:
        cohort = done.cohort
        results = {k: statistics(trained({**server, **own.get(k, {})}, k, masks[k])) for k in cohort}
        expected = statistics(server)
        if buffers == "local":
            own = {**own, **results}
        if buffers == "average":
            total = sum(SIZES[k] for k in cohort)
            expected = {name: sum(SIZES[k] * results[k][name] for k in cohort) / total for name in expected}
        yield expected, own
        server, masks = done.state, {**masks, **{k: mask for k, mask in done.masks.items() if mask}}


METHODS = {"fedavg": FedAvg(), "fedspa": FedSpa(), "fedspa count all": FedSpa(merge="count", mask_pool="all")}


@pytest.mark.slow_after_first("method")
@pytest.mark.parametrize("buffers", ["average", "local", "server"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_servers_statistics(fit, method, buffers):
    initial, rounds = fit(method, buffers)
    for done, (expected, _) in zip(rounds, expected_rounds(method, buffers, initial, rounds), strict=True):
        close(done.state, expected)
        close(done.scored_with["global"], expected)
        assert done.state["net.1.num_batches_tracked"] == 0  # a counter stays the server's
        if buffers != "local":
            for client in range(len(SIZES)):
                close(done.scored_with[client], expected)
    same = all(torch.equal(rounds[-1].state[name], value) for name, value in statistics(initial).items())
    assert same == (buffers != "average")


@pytest.mark.slow_after_first
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_client_goes_on_from_its_own_statistics(fit, method):
    initial, rounds = fit(method, "local")
    kept = [own for _, own in expected_rounds(method, "local", initial, rounds)]
    drawn = [client for done in rounds for client in done.cohort]
    assert len(set(drawn)) < len(drawn)  # somebody came back
    for done, own in zip(rounds, kept, strict=True):
        assert set(done.kept) == set(own)
        for client, expected in own.items():
            close(done.kept[client], expected)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_client_is_scored_with_its_own_statistics(fit, method):
    initial, rounds = fit(method, "local")
    for done, (expected, own) in zip(rounds, expected_rounds(method, "local", initial, rounds), strict=True):
        for client in range(len(SIZES)):
            close(done.scored_with[client], own.get(client, expected))
