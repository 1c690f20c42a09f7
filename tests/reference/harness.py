"""A federation whose every round is noted, so that a slow twin can repeat it."""

from __future__ import annotations

import csv
from collections import UserDict, UserList, defaultdict
from typing import NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl import FederatedTrainer, Federation
from lightning_sparsefl.federated.exchange.plain_values import unpack_plain
from reference.numpy_network import loss

SEED, ROUNDS, EPOCHS, PER_ROUND = 11, 5, 2, 3
SIZES = (5, 9, 14, 7, 20, 11)
CLIENTS = range(len(SIZES))
FEATURES, CLASSES, HELD_OUT = 6, 3, 4
PLAIN = {"lr": 0.3}
HEAVY = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
CLIPPED = {**HEAVY, "clip": 0.2}
TOLERANCE = 1e-9


class ClientData(L.LightningDataModule):
    """One client's data; a training batch names its samples, a validation batch its client."""

    def __init__(self, client, batch_size):
        super().__init__()
        rng = np.random.default_rng(client)
        x = rng.normal(size=(SIZES[client] + HELD_OUT, FEATURES)) + 0.3 * client
        y = (x[:, :CLASSES] + 0.5 * rng.normal(size=(len(x), CLASSES))).argmax(1)
        self.x, self.y, self.client, self.batch_size = x, y, client, batch_size

    def _part(self, which, tag):
        return TensorDataset(torch.from_numpy(self.x[which]), torch.from_numpy(self.y[which]), torch.from_numpy(tag))

    def train_dataloader(self):
        size = SIZES[self.client]
        samples = self._part(slice(size), np.arange(size) + 100 * self.client)
        return DataLoader(samples, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self._part(slice(-HELD_OUT, None), np.full(HELD_OUT, self.client)), batch_size=64)


class Notes(UserList):
    """Shared with a narrow copy of the module, and no list, whose content would be restored after each client."""

    def __init__(self):
        super().__init__()
        self.also = [].append  # the notes of further passes, after which those above are restored

    def append(self, item):
        super().append(item)
        self.also(item)

    def __deepcopy__(self, memo):
        return self


class Net(L.LightningModule):
    """A user's module, which also notes what it was trained and scored on."""

    def __init__(self, lr, momentum=0.0, weight_decay=0.0, clip=None, norm=False):
        super().__init__()
        self.rates = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        between = [nn.BatchNorm1d(8)] if norm else []
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), *between, nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, CLASSES)
        )
        self.trained_on, self.scored_with = Notes(), UserDict()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y, samples = batch
        self.trained_on.append((self.training, samples.numpy().copy()))
        logits = self(x)
        accuracy = (logits.argmax(1) == y).double().mean()
        self.log("train_acc", accuracy, on_step=False, on_epoch=True, batch_size=len(y))
        return nn.functional.cross_entropy(logits, y)

    def validation_step(self, batch):
        x, y, client = batch
        owners = set(client.tolist())
        self.scored_with[owners.pop() if len(owners) == 1 else "global"] = arrays(self.state_dict())
        logits = self(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(1) == y).double().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), **self.rates)


def arrays(tree):
    return {name: tensor.detach().numpy().copy() for name, tensor in tree.items()}


class Round(NamedTuple):
    cohort: list
    """Clients, in their order."""
    weights: dict
    """The server's, from the checkpoint."""
    scored_with: dict
    """By client number, and "global": what the module held when it was scored."""
    losses: dict
    """What the round logged."""
    masks: dict
    """By client number: the mask that it uploaded last."""
    trained_on: list
    """(training mode, samples) of every call of the training step, but for those of further passes."""
    passed_on: list
    """The same of further passes too."""
    server_masks: dict
    """The server's, from the checkpoint."""
    memory: dict
    """By client number: what it keeps for itself."""
    buffers: dict
    """By client number: the buffers that it keeps."""
    rows: dict
    """By client number: what the round's table says of it."""


class Recording(Callback):
    """At the round level: copies what a round leaves behind."""

    def __init__(self, folder):
        self.folder, self.rounds, self.cohort = folder, [], []

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.trained_on.also.__self__.clear()  # of the trial of stacks

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.cohort.append(batch)

    def on_train_epoch_end(self, trainer, pl_module):
        path = self.folder / "round.ckpt"
        trainer.save_checkpoint(path)
        content = torch.load(path, weights_only=True)
        own, cpu = content["sparsefl"], torch.device("cpu")
        server, nodes = (
            {k: versions[max(versions)] for k, versions in unpack_plain(own[key]["records"], cpu).items()}
            for key in ("server records", "node records")
        )
        self.rounds.append(
            Round(
                cohort=self.cohort,
                weights=arrays(content["state_dict"]),
                scored_with=dict(pl_module.scored_with),
                losses={name: float(value) for name, value in trainer.callback_metrics.items()},
                masks={k: arrays(r["shared"]["masks"]) for k, r in server.items() if "masks" in r["shared"]},
                trained_on=list(pl_module.trained_on),
                passed_on=list(pl_module.trained_on.also.__self__),
                server_masks=arrays(unpack_plain(own["state"]["masks"], cpu)),
                memory={k: r["memory"] for k, r in nodes.items()},
                buffers={k: arrays(r["buffers"]) for k, r in nodes.items()},
                rows=table_of(self.folder, len(self.rounds)),
            )
        )
        self.cohort = []
        pl_module.trained_on.clear()
        pl_module.scored_with.clear()


def table_of(folder, number):
    """The rows of the run's newest table that belong to a round, by client number."""
    newest = max(folder.rglob("clients.csv"), key=lambda path: path.stat().st_mtime)
    with newest.open() as file:
        return {int(row["client"]): row for row in csv.DictReader(file) if int(row["round"]) == number}


class Fit:
    """Runs federations in a folder; a call returns the initial weights and the rounds."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(
        self,
        algorithm,
        sgd,
        batch_size=64,
        rounds=ROUNDS,
        *,
        dtype=torch.float64,
        round_lr=None,
        norm=False,
        **federation,
    ):
        torch.manual_seed(0)
        module, recording = Net(**sgd, norm=norm).to(dtype), Recording(self.folder)
        module.example_input_array = torch.zeros(1, FEATURES, dtype=dtype)
        initial = {name: value.astype(np.float64) for name, value in arrays(module.state_dict()).items()}
        trainer = FederatedTrainer(
            algorithm=algorithm,
            federation=Federation(clients_per_round=PER_ROUND, **federation),
            max_rounds=rounds,
            max_epochs=EPOCHS,
            seed=SEED,
            round_lr=round_lr,
            gradient_clip_val=sgd.get("clip"),
            callbacks=recording,
            precision="64-true",
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            default_root_dir=str(self.folder),
        )
        trainer.fit(module, [ClientData(client, batch_size) for client in CLIENTS])
        assert len(recording.rounds) == rounds
        self.left = module  # what was done with it when the rounds were over
        return initial, recording.rounds


def samples(numbers):
    """Inputs and labels of samples, by the numbers that a training batch carries."""
    own = ClientData(int(numbers[0]) // 100, 1)
    return own.x[numbers % 100], own.y[numbers % 100]


def full_batches(cohort):
    """All samples of a client, once an epoch."""
    whole = {k: samples(np.arange(SIZES[k]) + 100 * k) for k in cohort}
    return {k: [whole[k]] * EPOCHS for k in cohort}, whole


def seen_batches(done):
    """The batches that each client trained on, in order, and the one of its search gradient, if it took any."""
    steps, searches = defaultdict(list), {}
    for training, numbers in done.trained_on:
        client = int(numbers[0]) // 100
        if training:
            steps[client].append(numbers)
        else:
            assert client not in searches
            searches[client] = numbers
    for client, batches in steps.items():
        drawn = np.concatenate(batches).reshape(EPOCHS, -1) - 100 * client
        assert all(sorted(epoch) == list(range(SIZES[client])) for epoch in drawn)
    return {k: [samples(numbers) for numbers in steps[k]] for k in steps}, {
        k: samples(numbers) for k, numbers in searches.items()
    }


def close(ours, twin):
    assert list(ours) == list(twin)
    for name, value in ours.items():
        assert value.dtype == np.float64
        assert np.abs(value - twin[name]).max() < TOLERANCE, name


def agree(done, twin, common=True):
    """The server's weights, everybody's personal weights, and the scores they got; `common`: a global model has one."""
    close(done.weights, twin.weights)
    if common:
        close(done.scored_with["global"], twin.weights)
    assert set(done.scored_with) == {*CLIENTS, *(["global"] if common else [])}
    losses = []
    for k in CLIENTS:
        close(done.scored_with[k], twin.personal(k))
        own = ClientData(k, 1)
        losses.append(loss(twin.personal(k), own.x[-HELD_OUT:], own.y[-HELD_OUT:]))
    assert done.losses["personal/val_loss"] == pytest.approx(np.mean(losses), abs=1e-6)  # logged in float32


def moved(rounds, initial):
    """A comparison means something only where training went somewhere."""
    return max(np.abs(rounds[-1].weights[name] - initial[name]).max() for name in initial) > 0.01


def check_cohorts(rounds):
    for done in rounds:
        assert len(set(done.cohort)) == PER_ROUND
        assert done.cohort == sorted(done.cohort)
        assert set(done.cohort) <= set(CLIENTS)
        assert {int(numbers[0]) // 100 for _, numbers in done.trained_on} == set(done.cohort)
    assert len({tuple(done.cohort) for done in rounds}) > 1


def compare(record, twin, batch_size, common=True):
    """Every round of a run against its twin, which trains on the batches that the run drew."""
    for done in record:
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen_batches(done)[0])
        agree(done, twin, common)


def pool_of(initial, mask_pool):
    return {name: value.shape for name, value in initial.items() if mask_pool == "all" or value.ndim >= 2}


def tensors(groups):
    return [f"{group}.{kind}" for group in groups for kind in ("weight", "bias")]
