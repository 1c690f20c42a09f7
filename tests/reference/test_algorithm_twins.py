"""The federated methods against their NumPy twins: weights, masks, personal models and cohorts after every round."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl import (
    FedAvg,
    FedBABU,
    FedDIP,
    FederatedTrainer,
    Federation,
    FedLPS,
    FedProx,
    FedSpa,
    HeteroFL,
    Local,
    PerFedMask,
    SplitMix,
)
from lightning_sparsefl.data import ClientDataModules
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.federated.local.round_lr import ExponentialRoundLR
from lightning_sparsefl.federated.storage.records import unpack_plain
from lightning_sparsefl.seeds import derive_seed, generator, seed_all
from lightning_sparsefl.sparse.prune import random_masks
from lightning_sparsefl.sparse.scores import random as random_scores
from lightning_sparsefl.types import ClientView


def beside(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


slow, slow_lps, slow_bandit = (beside(name) for name in ("numpy_federation", "numpy_fedlps", "numpy_pucbv"))

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


class Notes(list):
    """Shared with a narrow copy of the module."""

    def __deepcopy__(self, memo):
        return self


class Net(L.LightningModule):
    """A user's module, which also notes what it was trained and scored on."""

    def __init__(self, lr, momentum=0.0, weight_decay=0.0, clip=None):
        super().__init__()
        self.rates = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, CLASSES))
        self.trained_on, self.scored_with = Notes(), {}

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
    """(training mode, samples) of every call of the training step."""
    server_masks: dict
    """The server's, from the checkpoint."""
    memory: dict
    """By client number: what it keeps for itself."""
    rows: dict
    """By client number: what the round's table says of it."""


class Recording(Callback):
    """At the round level: copies what a round leaves behind."""

    def __init__(self, folder):
        self.folder, self.rounds, self.cohort = folder, [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.cohort.append(batch)

    def on_train_epoch_end(self, trainer, pl_module):
        path = self.folder / "round.ckpt"
        trainer.save_checkpoint(path)
        content = torch.load(path, weights_only=True)
        records = unpack_plain(content["sparsefl"]["clients"]["records"], torch.device("cpu"))
        self.rounds.append(
            Round(
                cohort=self.cohort,
                weights=arrays(content["state_dict"]),
                scored_with=dict(pl_module.scored_with),
                losses={name: float(value) for name, value in trainer.callback_metrics.items()},
                masks={k: arrays(r["shared"]["masks"]) for k, r in records.items() if "masks" in r["shared"]},
                trained_on=list(pl_module.trained_on),
                server_masks=arrays(unpack_plain(content["sparsefl"]["masks"], torch.device("cpu"))),
                memory={k: r["memory"] for k, r in records.items()},
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


@pytest.fixture
def fit(tmp_path):
    """Runs a federation; returns the initial weights and the rounds."""

    def run(algorithm, sgd, batch_size=64, rounds=ROUNDS, *, dtype=torch.float64, round_lr=None, **federation):
        torch.manual_seed(0)
        module, recording = Net(**sgd).to(dtype), Recording(tmp_path)
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
            default_root_dir=str(tmp_path),
        )
        trainer.fit(module, [ClientData(client, batch_size) for client in CLIENTS])
        assert len(recording.rounds) == rounds
        run.left = module  # what was done with it when the rounds were over
        return initial, recording.rounds

    return run


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


def agree(done, twin):
    """The server's weights, everybody's personal weights, and the scores they got."""
    close(done.weights, twin.weights)
    close(done.scored_with["global"], twin.weights)
    assert set(done.scored_with) == {"global", *CLIENTS}
    losses = []
    for k in CLIENTS:
        close(done.scored_with[k], twin.personal(k))
        own = ClientData(k, 1)
        losses.append(slow.loss(twin.personal(k), own.x[-HELD_OUT:], own.y[-HELD_OUT:]))
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


AVERAGES = [
    (PLAIN, 0.0, 64),
    (HEAVY, 0.0, 64),
    (CLIPPED, 0.0, 64),
    (HEAVY, 0.0, 4),
    (PLAIN, 0.5, 64),
    (CLIPPED, 0.5, 64),
    (HEAVY, 0.5, 4),
]


@pytest.mark.parametrize(("sgd", "mu", "batch_size"), AVERAGES)
def test_fedavg_and_fedprox(fit, sgd, mu, batch_size):
    initial, rounds = fit(FedProx(mu=mu) if mu else FedAvg(), sgd, batch_size)
    twin = slow.FedAvg(initial, SIZES, sgd, mu)
    check_cohorts(rounds)
    for done in rounds:
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen_batches(done)[0])
        agree(done, twin)
    assert moved(rounds, initial)


def test_rates_that_fall_with_the_round(fit):
    initial, rounds = fit(FedAvg(), HEAVY, round_lr=ExponentialRoundLR(gamma=0.8))
    twin = slow.FedAvg(initial, SIZES, dict(HEAVY))
    for t, done in enumerate(rounds):
        twin.sgd["lr"] = HEAVY["lr"] * 0.8**t
        twin.round(full_batches(done.cohort)[0])
        agree(done, twin)


def test_precision_64_true_turns_a_float32_module_into_float64(fit):
    initial, rounds = fit(FedAvg(), PLAIN, rounds=2, dtype=torch.float32)
    twin = slow.FedAvg(initial, SIZES, PLAIN)
    for done in rounds:
        twin.round(full_batches(done.cohort)[0])
        agree(done, twin)


@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (CLIPPED, 4)])
def test_local(fit, sgd, batch_size):
    initial, rounds = fit(Local(), sgd, batch_size)
    twin = slow.Local(initial, sgd)
    check_cohorts(rounds)
    for done in rounds:
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen_batches(done)[0])
        agree(done, twin)
    assert len(twin.own) > PER_ROUND
    assert not moved(rounds, initial)  # the server's weights stay


def pool_of(initial, mask_pool):
    return {name: value.shape for name, value in initial.items() if mask_pool == "all" or value.ndim >= 2}


def first_masks(initial, method):
    """The package's seeded draws, of as many positions as the twin's own rule says."""
    shapes = pool_of(initial, method.mask_pool)
    counts = slow.kept_counts(shapes, method.density, method.layer_density)
    keys = [(SEED, k, "FedSpa mask") if method.mask_init == "different" else (SEED, "FedSpa mask") for k in CLIENTS]
    return {k: arrays(random_masks(shapes, counts, generator(*key))) for k, key in zip(CLIENTS, keys, strict=True)}


def growth_scores(initial, method, t, cohort):
    shapes = pool_of(initial, method.mask_pool)
    return {k: arrays(random_scores(shapes, generator(SEED, t, k, "growth", 0))) for k in cohort}


def compare_fedspa(fit, method, sgd, batch_size, rounds=ROUNDS, **federation):
    """Every round of a FedSpa run against its twin; returns the twin and the rounds."""
    initial, record = fit(method, sgd, batch_size, rounds, **federation)
    twin = slow.FedSpa(
        initial,
        first_masks(initial, method),
        sgd,
        search=method.search,
        merge=method.merge,
        rounds=rounds,
        exchange=method.exchange,
    )
    seen = set()
    for t, done in enumerate(record):
        seen |= set(done.cohort)
        batches, search = full_batches(done.cohort) if batch_size == 64 else seen_batches(done)
        by_gradient = method.growth == "gradient"
        twin.round(batches, search, None if by_gradient else growth_scores(initial, method, t, done.cohort))
        agree(done, twin)
        dst = method.search == "dst"
        assert set(done.masks) == (seen if dst else set())
        for k, masks in done.masks.items():
            assert list(masks) == list(twin.masks[k])
            assert all(np.array_equal(mask, twin.masks[k][name]) for name, mask in masks.items())
        gradients = [numbers for training, numbers in done.trained_on if not training]
        searching = dst and by_gradient and method.exchange > 0 and t < rounds - 1
        assert len(gradients) == (PER_ROUND if searching else 0)
    assert moved(record, initial)
    return twin, record


OPTIONS = {
    "search": ("dst", "static"),
    "growth": ("gradient", "random"),
    "mask_init": ("same", "different"),
    "layer_density": ("erk", "uniform"),
    "merge": ("mean", "count"),
    "mask_pool": ("weights", "all"),
}
COMBINATIONS = [
    dict(zip(OPTIONS, values, strict=True))
    for values in itertools.product(*OPTIONS.values())
    if values[:2] != ("static", "random")  # without a search there is nothing to grow
    and sum(value != choices[0] for value, choices in zip(values, OPTIONS.values(), strict=True)) % 2 == 0
]
"""Half of all: every triple of choices stands in one of them."""
SETTINGS = [(PLAIN, 0.5, 64), (HEAVY, 0.7, 4), (CLIPPED, 0.3, 64), (CLIPPED, 0.7, 4)]
"""Training, density (at .7 ERK makes the last layer dense), batch size; they take turns over the combinations."""


@pytest.mark.parametrize("number", range(len(COMBINATIONS)))
def test_fedspa(fit, number):
    sgd, density, batch_size = SETTINGS[(number + number // 4) % 4]
    method = FedSpa(density=density, **COMBINATIONS[number])
    twin, record = compare_fedspa(fit, method, sgd, batch_size)
    check_cohorts(record)
    first = first_masks(record[0].weights, method)
    changed = any(not np.array_equal(first[k][name], twin.masks[k][name]) for k in CLIENTS for name in first[k])
    assert changed == (method.search == "dst")


@pytest.mark.parametrize("exchange", [0.0, 1.0])
def test_fedspa_exchanges_nothing_or_everything(fit, exchange):
    compare_fedspa(fit, FedSpa(exchange=exchange), PLAIN, 64)


def test_fedspa_of_one_round_searches_nothing(fit):
    compare_fedspa(fit, FedSpa(), PLAIN, 64, rounds=1)


@pytest.mark.parametrize("option", [{"local_engine": "trainer"}, {"wire": "encode"}], ids=["trainer", "encode"])
def test_fedspa_whichever_way_the_engine_goes(fit, option):
    compare_fedspa(fit, FedSpa(density=0.4), HEAVY, 4, rounds=3, **option)


def compare_feddip(fit, method, sgd, batch_size, rounds=ROUNDS, **federation):
    """Every round of a FedDIP run against its twin; returns the masks after each round, the first ones in front."""
    initial, record = fit(method, sgd, batch_size, rounds, **federation)
    shapes = pool_of(initial, "weights")
    counts = slow.kept_counts(shapes, method.initial_density, "erk")
    first = arrays(random_masks(shapes, counts, generator(SEED, "FedDIP mask")))
    twin = slow.FedDIP(
        initial,
        first,
        SIZES,
        sgd,
        rounds=rounds,
        first=method.initial_density,
        last=method.density,
        every=method.reconfigure_every,
        peak=method.penalty,
        stairs=method.stairs,
        mu=method.mu,
        recover=method.recover,
        fixed=["net.2.weight"] if method.fixed_layers == ("*.2.*",) else [],
    )
    masks = [first]
    for done in record:
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen_batches(done)[0])
        agree(done, twin)
        assert list(done.server_masks) == list(twin.masks)
        assert all(np.array_equal(mask, twin.masks[name]) for name, mask in done.server_masks.items())
        assert not any(done.weights[name][~mask].any() for name, mask in done.server_masks.items())
        masks.append(done.server_masks)
    assert moved(record, initial)
    return masks


FEDDIP = {
    "FedDIP": {},
    "FedDP": {"penalty": 0.0},
    "DPF": {"penalty": 0.0, "initial_density": 1.0},
    "FedDIP+Prox": {"mu": 0.5},
    "never back": {"recover": False},
    "seldom": {"reconfigure_every": 2, "stairs": 3},
    "one layer stays": {"fixed_layers": ("*.2.*",)},
}
FAST = {"lr": 0.6}


@pytest.mark.parametrize(("sgd", "batch_size"), [(FAST, 4), (HEAVY, 64), (CLIPPED, 4)])
@pytest.mark.parametrize("options", FEDDIP.values(), ids=FEDDIP)
def test_feddip(fit, options, sgd, batch_size):
    method = FedDIP(**{"density": 0.4, "initial_density": 0.6, "reconfigure_every": 1, "penalty": 0.05, **options})
    masks = compare_feddip(fit, method, sgd, batch_size)
    kept = [sum(int(mask.sum()) for mask in tree.values()) for tree in masks]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < kept[0]
    came_back = any((new[name] & ~old[name]).any() for old, new in itertools.pairwise(masks) for name in old)
    if sgd is FAST or not method.recover:  # small steps leave a pruned weight too small to return
        assert came_back == method.recover


def test_feddip_over_the_wire_and_in_a_real_trainer(fit):
    method = FedDIP(density=0.3, reconfigure_every=1, penalty=0.05, mu=0.1)
    compare_feddip(fit, method, CLIPPED, 4, rounds=3, wire="encode", local_engine="trainer")


BODY = {"net.0": 6 * 8 + 8, "net.2": 8 * 7 + 7}
HEAD = {"net.4": 7 * 3 + 3}
CAPACITIES = [0.5, 0.55, 1.0]
"""Of two clients each; with the head frozen the first can train net.0, the second one of both, the third all."""


def tensors(groups):
    return [f"{group}.{kind}" for group in groups for kind in ("weight", "bias")]


def plan_of(method, initial):
    """For each client the groups that it trains, as the method decided."""
    sizes = BODY if method.freeze_head else BODY | HEAD
    capacities = Federation(capacities=CAPACITIES).fleet_capacities(len(SIZES), SEED)
    views = [
        ClientView(id=k, num_examples=SIZES[k], capacity=capacities[k], round=0, max_rounds=ROUNDS, seed=SEED)
        for k in CLIENTS
    ]
    weights = {name: torch.from_numpy(value) for name, value in initial.items()}
    server = method.init(weights, Fleet(views, frozenset(), torch.device("cpu")))
    frozen = [set(method.download(server, view).trainable) for view in views]
    plan = [{j for j, group in enumerate(sizes) if f"{group}.weight" not in names} for names in frozen]
    budgets = [int(capacity * sum(sizes.values())) for capacity in capacities]
    return list(sizes), list(sizes.values()), budgets, plan


def check_plan(method, sizes, budgets, plan):
    """The plan is the twin's; among several optima it may be any."""
    if method.masking == "optimized":
        missing, least = slow.best_plan(sizes, budgets)
        assert missing == 0
        assert all(sum(sizes[j] for j in own) <= budget for own, budget in zip(plan, budgets, strict=True))
        assert slow.mask_problem(plan, sizes, budgets) == pytest.approx(least, rel=1e-12)
        return
    orders = [range(len(sizes))] * len(budgets)
    if method.masking == "random":
        rng = generator(SEED, "PerFedMask plan")
        orders = [torch.randperm(len(sizes), generator=rng).tolist() for _ in budgets]
    assert plan == [slow.first_fit(sizes, budget, order) for budget, order in zip(budgets, orders, strict=True)]


def compare_freezing(fit, method, trains, sgd, batch_size, **federation):
    initial, record = fit(method, sgd, batch_size, **federation)
    twin = slow.PerFedMask(initial, trains(initial), SIZES, sgd)
    for done in record:
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen_batches(done)[0])
        agree(done, twin)
    assert moved(record, initial)
    after = fit.left.scored_with
    batches, _ = seen_batches(record[-1]._replace(trained_on=fit.left.trained_on))
    for k in CLIENTS:
        close(after[k], twin.finetuned(batches[k]))
    return initial, record


@pytest.mark.parametrize(("sgd", "batch_size"), [(HEAVY, 64), (CLIPPED, 4)])
@pytest.mark.parametrize("freeze_head", [True, False], ids=["head", "no head"])
@pytest.mark.parametrize("masking", ["optimized", "random", "sequential"])
def test_perfedmask(fit, masking, freeze_head, sgd, batch_size):
    method = PerFedMask(masking=masking, freeze_head=freeze_head, finetune_epochs=EPOCHS)

    def trains(initial):
        groups, sizes, budgets, plan = plan_of(method, initial)
        check_plan(method, sizes, budgets, plan)
        assert len({tuple(sorted(own)) for own in plan}) > 1
        return [tensors(groups[j] for j in own) for own in plan]

    initial, record = compare_freezing(fit, method, trains, sgd, batch_size, capacities=CAPACITIES)
    heads = [all(np.array_equal(done.weights[name], initial[name]) for name in tensors(HEAD)) for done in record]
    assert all(heads) == freeze_head


@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (HEAVY, 4), (CLIPPED, 4)])
def test_fedbabu(fit, sgd, batch_size):
    method = FedBABU(finetune_epochs=EPOCHS)
    initial, record = compare_freezing(fit, method, lambda _: [tensors(BODY)] * len(SIZES), sgd, batch_size)
    assert all(np.array_equal(record[-1].weights[name], initial[name]) for name in tensors(HEAD))
    _, other = fit(PerFedMask(finetune_epochs=EPOCHS), sgd, batch_size)  # with capacities of 1 all is the same
    for one, same in zip(record, other, strict=True):
        assert all(np.array_equal(one.weights[name], same.weights[name]) for name in initial)


@pytest.mark.parametrize("option", [{"local_engine": "trainer"}, {"wire": "encode"}], ids=["trainer", "encode"])
def test_perfedmask_whichever_way_the_engine_goes(fit, option):
    method = PerFedMask(masking="sequential", finetune_epochs=EPOCHS)
    _, first = fit(method, CLIPPED, 4, capacities=CAPACITIES)
    _, second = fit(method, CLIPPED, 4, capacities=CAPACITIES, **option)
    for one, other in zip(first, second, strict=True):
        assert all(np.array_equal(one.weights[name], other.weights[name]) for name in one.weights)


HIDDEN = {"net.0": 8, "net.2": 7}
LEVELS = [1.0, 0.5, 0.25]
"""Capacities, each of a block of two clients."""


def drawn_units(k, t):
    """What ranks the units of a client in a round where they are drawn."""
    seed = derive_seed(SEED, k)
    return [torch.rand(size, generator=generator(seed, t, "units", name)).numpy() for name, size in HIDDEN.items()]


class Bandits:
    """The densities of every client, from the bandit's twin and what the run's table says of rewards."""

    def __init__(self, method):
        self.method = method
        own = (method.arms_from, method.explore, method.compare_with)
        make = slow_bandit.Bandit
        self.of = {k: make(method.arms, method.rho, ROUNDS / PER_ROUND, method.drop, *own) for k in CLIENTS}

    def choose(self, k, t):
        """The client resets what exceeds its capacity."""
        rng = generator(SEED, t, k, "density")
        drawn = self.of[k].choose(
            lambda count: int(torch.randint(count, (1,), generator=rng)),
            lambda: 1 - float(torch.rand((), dtype=torch.float64, generator=rng)),
        )
        return min(drawn, self.capacity(k))

    def capacity(self, k):
        return LEVELS[k // 2]

    def learn(self, k, density, row):
        before = self.of[k].accuracy
        first = row["local/train_acc_first"] if before is None else before
        seconds = float(row["flops_train"]) / (self.capacity(k) * self.method.flops_per_second)
        seconds += self.method.alpha * float(row["uplink_bytes"]) / self.method.bytes_per_second
        self.of[k].learn(density, float(row["local/train_acc"]), float(first), seconds / self.method.time_unit)
        return seconds


def density_of(method, bandits, k, t):
    if method.ratio == "fixed":
        return method.density
    return bandits.capacity(k) if method.ratio == "capacity" else bandits.choose(k, t)


def check_price(method, row, initial, kept, k, before):
    """Three forward passes of the part for every sample, and of the whole for the probe's batch; the first accuracy."""
    whole = slow_lps.forward_flops(initial, [np.ones(size, dtype=bool) for size in HIDDEN.values()])
    flops = 3 * EPOCHS * SIZES[k] * slow_lps.forward_flops(initial, kept)
    flops += 3 * SIZES[k] * whole * (method.probe and method.pattern == "learned")
    flops += SIZES[k] * whole * (method.ratio == "bandit" and before is None)
    assert float(row["flops_train"]) == pytest.approx(flops, rel=1e-12)


def check_memory(memory, twin, k, personal):
    """The client's scores, and the units of its last model if that is its personal model."""
    if personal:
        for kept, expected in zip(memory["kept"].values(), twin.kept[k], strict=True):
            assert np.array_equal(kept.numpy(), expected)
    for score, expected in zip(memory["scores"].values(), twin.scores[k] or [], strict=True):
        assert np.abs(score.numpy() - expected).max() < TOLERANCE


def compare_fedlps(fit, method, sgd, batch_size, **federation):
    initial, record = fit(method, sgd, batch_size, capacities=LEVELS, **federation)
    bandits = Bandits(method)
    scored_at = {k: method.density if method.ratio == "fixed" else bandits.capacity(k) for k in CLIENTS}
    twin = slow_lps.FedLPS(initial, SIZES, sgd, method, scored_at)
    for t, done in enumerate(record):
        batches, probes = seen_batches(done)
        assert set(probes) == (set(done.cohort) if method.probe and method.pattern == "learned" else set())
        densities = {k: density_of(method, bandits, k, t) for k in done.cohort}
        twin.round(t, batches, probes, densities, {k: drawn_units(k, t) for k in done.cohort})
        slowest = 0.0
        for k in done.cohort:
            check_memory(done.memory[k], twin, k, densities[k] > method.score_above)
            if batch_size == 64:  # a batch of all
                check_price(method, done.rows[k], initial, twin.kept[k], k, bandits.of[k].accuracy)
            if method.ratio == "bandit":
                if bandits.of[k].accuracy is None:
                    own = ClientData(k, 1)
                    right = slow.forward(initial, own.x[: SIZES[k]])[1].argmax(1) == own.y[: SIZES[k]]
                    assert float(done.rows[k]["local/train_acc_first"]) == pytest.approx(right.mean())
                slowest = max(slowest, bandits.learn(k, densities[k], done.rows[k]))
        if method.ratio == "bandit":
            assert done.losses["time/simulated"] == pytest.approx(slowest)
        close(done.weights, twin.weights)
        for k in CLIENTS:
            close(done.scored_with[k], twin.personal(k, t + 1, drawn_units(k, t + 1)))
    assert moved(record, initial)
    return twin


FEDLPS = {
    "defaults": {},
    "as printed": {"reduction": "sum"},
    "published code": {
        "mu": 0.0,
        "arms_from": 0.5,
        "explore": "epsilon",
        "compare_with": "best",
        "score_above": 0.4,
        "time_unit": 0.001,
    },
    "literal bandit": {"explore": "bonus", "arms": 3, "alpha": 0.0},
    "flst": {"ratio": "fixed", "score_lr": 1.0},
    "rcr": {"ratio": "capacity", "reduction": "sum", "mu": 0.01, "score_lr": 0.5},
    "once a round": {"refresh": "round", "reduction": "sum", "mu": 0.01, "score_lr": 1.0},
    "no probe": {"ratio": "fixed", "density": 0.3, "probe": False, "mu": 0.0, "score_strength": 0.2},
    "magnitude": {"ratio": "fixed", "pattern": "magnitude", "mu": 0.1},
    "magnitude once a round": {"ratio": "capacity", "pattern": "magnitude", "refresh": "round", "mu": 0.1},
    "ordered": {"ratio": "capacity", "pattern": "ordered"},
    "random": {"ratio": "fixed", "pattern": "random", "mu": 0.1},
    "rolling": {"ratio": "bandit", "pattern": "rolling", "mu": 0.1, "alpha": 0.0},
}


@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (CLIPPED, 64)], ids=["plain", "clipped"])
@pytest.mark.parametrize("options", FEDLPS.values(), ids=FEDLPS)
def test_fedlps(fit, options, sgd, batch_size):
    twin = compare_fedlps(fit, FedLPS(**options), sgd, batch_size)
    assert len(twin.own) > PER_ROUND


@pytest.mark.parametrize(
    "options", [{"ratio": "fixed", "mu": 0.1}, {"ratio": "capacity", "refresh": "round"}], ids=repr
)
def test_fedlps_on_small_batches(fit, options):
    compare_fedlps(fit, FedLPS(**options), HEAVY, 4)


@pytest.mark.parametrize(
    "option", [{"local_engine": "trainer"}, {"wire": "encode"}, {"execution": "cut"}], ids=["trainer", "encode", "cut"]
)
@pytest.mark.parametrize("pattern", ["learned", "rolling"])
def test_fedlps_whichever_way_the_engine_goes(fit, option, pattern):
    method = FedLPS(ratio="capacity", refresh="round", pattern=pattern, mu=0.1)
    compare_fedlps(fit, method, CLIPPED, 4, **option)


RATES = (1.0, 0.6, 0.5, 0.3)
WIDE = [0.5, 0.7, 1.0]
"""Capacities of two clients each: widths of .5, .6 and 1."""
OWN_WIDTH = [0.5, 0.5, 0.6, 0.6, 1.0, 1.0]


OWN_CLASSES = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0], [1, 0, 0]], dtype=bool)
"""Which classes each client is taken to have."""


def compare_heterofl(fit, method, sgd, batch_size, trains=None, **federation):
    initial, record = fit(method, sgd, batch_size, capacities=WIDE, **federation)
    inner = method.base if isinstance(method, PerFedMask) else method
    twin = slow.HeteroFL(
        initial,
        OWN_WIDTH,
        sgd,
        scaler=inner.scaler,
        classes=OWN_CLASSES if inner.label_mask else None,
        trains=trains,
    )
    for done in record:
        twin.round(full_batches(done.cohort)[0] if batch_size == 64 else seen_batches(done)[0])
        agree(done, twin)
    assert moved(record, initial)
    return initial, record, twin


@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (HEAVY, 4), (CLIPPED, 4)])
@pytest.mark.parametrize("scaler", [True, False], ids=["scaler", "no scaler"])
@pytest.mark.parametrize("execution", ["mask", "cut"])
def test_heterofl(fit, scaler, execution, sgd, batch_size):
    compare_heterofl(fit, HeteroFL(rates=RATES, scaler=scaler), sgd, batch_size, execution=execution)


@pytest.mark.parametrize("batch_size", [64, 4])
def test_heterofl_with_masked_labels(fit, monkeypatch, batch_size):
    counts = torch.from_numpy(OWN_CLASSES).long()
    monkeypatch.setattr(ClientDataModules, "client_label_counts", lambda self, client: counts[client])
    compare_heterofl(fit, HeteroFL(rates=RATES, label_mask=True), HEAVY, batch_size, wire="encode")


def test_heterofl_of_one_width_is_the_plain_mean(fit):
    initial, record = fit(HeteroFL(), HEAVY, 64)
    twin = slow.FedAvg(initial, [1] * len(SIZES), HEAVY)
    for done in record:
        twin.round(full_batches(done.cohort)[0])
        agree(done, twin)


def batches_by_base(done, twin):
    """What each base network of a client was trained on: they take turns, all epochs at once."""
    found = {}
    for k in done.cohort:
        numbers = [n for _, n in done.trained_on if n[0] // 100 == k]
        bases = twin.own(k, twin.t)
        share = len(numbers) // len(bases)
        assert share * len(bases) == len(numbers)
        found[k] = {b: [samples(n) for n in numbers[i * share : (i + 1) * share]] for i, b in enumerate(bases)}
        assert all(sum(len(y) for _, y in steps) == EPOCHS * SIZES[k] for steps in found[k].values())
    return found


def compare_splitmix(fit, method, sgd, batch_size, trains=None, **federation):
    initial, record = fit(method, sgd, batch_size, capacities=WIDE, **federation)
    bases = (method.base if isinstance(method, PerFedMask) else method).bases
    counts = [max(1, math.floor(capacity * bases)) for capacity in np.repeat(WIDE, 2)]
    twin = slow.SplitMix(initial, bases, counts, SIZES, sgd, trains)
    x = ClientData(0, 1).x
    for done in record:
        twin.round(batches_by_base(done, twin))
        agree(done, twin)
        for k in CLIENTS:  # one module holds the ensemble
            mixed = slow.forward(done.scored_with[k], x)[1]
            assert np.abs(mixed - twin.logits(twin.own(k, 0), x)).max() < TOLERANCE
    assert moved(record, initial)
    return initial, record, twin


@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (HEAVY, 4), (CLIPPED, 4)])
@pytest.mark.parametrize("bases", [2, 3])
@pytest.mark.parametrize("execution", ["mask", "cut"])
def test_splitmix(fit, bases, execution, sgd, batch_size):
    compare_splitmix(fit, SplitMix(bases=bases), sgd, batch_size, execution=execution)


def test_splitmix_of_one_network_is_fedavg(fit):
    initial, record = fit(SplitMix(bases=1), HEAVY, 64)
    twin = slow.FedAvg(initial, SIZES, HEAVY)
    for done in record:
        twin.round(full_batches(done.cohort)[0])
        agree(done, twin)


NARROW_PLAN = [["net.2"], ["net.2"], ["net.0"], ["net.0"], list(BODY), list(BODY)]
"""The first groups that fit: the body has 28 + 20 parameters at width .5 and in a base network, 35 + 30 at width .6."""


@pytest.mark.parametrize("execution", ["mask", "cut"])
def test_perfedmask_over_heterofl(fit, execution):
    method = PerFedMask(base=HeteroFL(rates=RATES), masking="sequential", finetune_epochs=0)
    trains = [tensors(groups) for groups in NARROW_PLAN]
    initial, record, _ = compare_heterofl(fit, method, CLIPPED, 4, trains, execution=execution)
    assert all(np.array_equal(record[-1].weights[name], initial[name]) for name in tensors(HEAD))


@pytest.mark.parametrize("execution", ["mask", "cut"])
def test_perfedmask_over_splitmix(fit, execution):
    method = PerFedMask(base=SplitMix(bases=2), masking="sequential", finetune_epochs=0)
    trains = [tensors(groups) for groups in NARROW_PLAN]
    compare_splitmix(fit, method, CLIPPED, 4, trains, execution=execution, wire="encode")


def test_cohorts_and_orders_follow_from_seed_round_and_client(fit):
    _, sparse = fit(FedSpa(), PLAIN, 4)
    _, dense = fit(FedAvg(), HEAVY, 4)
    assert [done.cohort for done in sparse] == [done.cohort for done in dense]
    for t, (one, other) in enumerate(zip(sparse, dense, strict=True)):
        for k in one.cohort:
            expected = [numbers.tolist() for numbers in order(k, t, "fit", EPOCHS)]
            assert expected == drawn(one, k, training=True) == drawn(other, k, training=True)
            if t < ROUNDS - 1:
                assert [order(k, t, "gradient", 1)[0].tolist()] == drawn(one, k, training=False)


def order(client, t, purpose, epochs):
    loader = ClientData(client, 4).train_dataloader()
    seed_all(SEED, t, client, purpose, 0)
    return [numbers for _ in range(epochs) for _, _, numbers in loader]


def drawn(done, client, *, training):
    return [n.tolist() for mode, n in done.trained_on if mode == training and n[0] // 100 == client]
