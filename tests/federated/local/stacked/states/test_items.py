"""Stacks of clients whose data sets and batches are of any kind, beside clients that train one after another."""

from __future__ import annotations

import random
import re
import warnings
from collections import namedtuple
from unittest import mock

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from helpers.device import on_several_ranks
from lightning_sparsefl import APFL, FedAvg, FederatedTrainer, Federation, FedSpa, FjORD, PerFedAvg, PFedMe
from lightning_sparsefl.callbacks.stacking.rows import _of_one
from lightning_sparsefl.data import Dirichlet, FederatedDataset
from lightning_sparsefl.data.examples import reads_here
from lightning_sparsefl.federated.local.stacked import worker
from lightning_sparsefl.federated.local.stacked.logs import NotStackable, StackedLog
from lightning_sparsefl.federated.local.stacked.reading.reader import ClientReader, reader_of
from lightning_sparsefl.federated.local.stacked.reading.stack_reader import StackReader, samples_of
from lightning_sparsefl.federated.local.stacked.scoring.evaluation import EvaluationRequest, readable_in_order
from lightning_sparsefl.federated.local.stacked.scoring.evaluator import StackEvaluator
from lightning_sparsefl.federated.local.stacked.states.leaves import layout_of, stack_trees
from lightning_sparsefl.federated.local.stacked.worker import StackedWorker

Pair = namedtuple("Pair", ["features", "target"])
SIZE = 240


class Items(Dataset):
    """Items of one kind, with noise that is drawn for each of them."""

    def __init__(self, kind="mapping", noise=0.1):
        rng = torch.Generator().manual_seed(0)
        self.kind, self.noise = kind, noise
        self.features = torch.randn(SIZE, 6, generator=rng)
        self.labels = (self.features[:, 0] > 0).long() + (self.features[:, 1] > 0).long()

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        x = self.features[index]
        x, y = x + self.noise * torch.randn(6), int(self.labels[index])
        if self.kind == "mapping":
            return {"x": x, "extra": {"y": y, "pair": (x[:2], y)}}
        return Pair(x, y) if self.kind == "named" else (x, y)


def nested(items):
    """Collate to a mapping with None in it."""
    x, y = default_collate(items)
    return {"inputs": [x, None], "y": y}


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        self.example_input_array = torch.zeros(1, 6)

    def forward(self, x):
        return self.net(x)

    def loss(self, batch, name):
        if isinstance(batch, dict) and "extra" in batch:
            x, y = batch["x"], batch["extra"]["pair"][1]
        elif isinstance(batch, dict):
            x, y = batch["inputs"][0], batch["y"]
        else:
            x, y = (batch.features, batch.target) if isinstance(batch, Pair) else batch
        loss = F.cross_entropy(self(x), y)
        self.log(name, loss, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.loss(batch, "train_loss")

    def validation_step(self, batch, batch_idx):
        self.loss(batch, "val_loss")

    def test_step(self, batch, batch_idx):
        self.loss(batch, "test_loss")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def stacks():
    """Numbers of clients of all stacks that are trained, and of those that are evaluated, without the trials."""
    sizes = {"trained": [], "evaluated": []}

    def counting(kind, method):
        def run(self, group):
            method(self, group)
            if all(request.result for request in group):
                sizes[kind].append(len(group))

        return run

    with (
        mock.patch.object(StackedWorker, "_fit_group", counting("trained", StackedWorker._fit_group)),
        mock.patch.object(StackEvaluator, "_run_group", counting("evaluated", StackEvaluator._run_group)),
    ):
        yield sizes


def trained(folder, engine, data, algorithm=None, devices=1, module=Net, **federation):
    torch.manual_seed(0)
    module = module()
    trainer = FederatedTrainer(
        algorithm=algorithm or FedAvg(),
        federation=Federation(clients_per_round=5, local_engine=engine, **federation),
        max_rounds=2,
        max_epochs=2,
        accelerator="cpu",
        devices=devices,
        strategy="client_parallel_fork" if devices > 1 else "auto",
        precision="64-true",
        default_root_dir=str(folder),
        seed=3,
        quiet=True,
        logger=False,
        enable_progress_bar=False,
    )
    scores = trainer.fit(module, data)
    return module.state_dict(), {name: value for name, value in scores.items() if "loss" in name}


def split(kind="mapping", noise=0.1, items=None, **options):
    items = items or Items(kind, noise)
    settings = {"num_clients": 8, "partition": Dirichlet(1.0), "labels": items.labels, "batch_size": 7, **options}
    return FederatedDataset(items, test_fraction=0.2, eval_batch_size=9, num_classes=3, **settings)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")  # of None in a batch
@pytest.mark.parametrize("algorithm", [FedAvg(), FedSpa(density=0.5)], ids=["FedAvg", "FedSpa"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mapping", {}),
        ("tuple", {}),
        ("named", {}),
        ("tuple", {"collate_fn": nested}),
        ("mapping", {"drop_last": True, "batch_size": 4}),
    ],
    ids=["mapping", "tuple", "named tuple", "collated", "whole batches"],
)
def test_clients_of_any_data_end_where_they_end_one_after_another(kind, options, algorithm, tmp_path, stacks):
    weights, scores = trained(tmp_path, "stacked", split(kind, **options), algorithm, stack_size=5)
    assert max(stacks["trained"]) > 1
    assert max(stacks["evaluated"]) > 1
    own, own_scores = trained(tmp_path, "fast", split(kind, **options), algorithm)
    for name, tensor in own.items():
        torch.testing.assert_close(weights[name].double(), tensor.double(), rtol=1e-12, atol=1e-12)
    assert scores == pytest.approx(own_scores, rel=1e-12)


def test_stacks_of_any_size_agree(tmp_path, stacks):
    """The random numbers of a client's items do not depend on its neighbours."""
    (first, score), *others = [trained(tmp_path, "stacked", split(), stack_size=size) for size in (5, 2, 3)]
    assert set(stacks["trained"]) >= {2, 3}
    for weights, found in others:
        assert found == pytest.approx(score, rel=1e-12)
        for name, tensor in first.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-12, atol=1e-12)


@on_several_ranks
@pytest.mark.slow
def test_ranks_have_the_bytes_of_one(tmp_path):
    one, two = (trained(tmp_path, "stacked", split(), stack_size=2, devices=ranks) for ranks in (1, 2))
    assert all(torch.equal(one[0][name], tensor) for name, tensor in two[0].items())
    assert one[1] == two[1]


class Texts(Items):
    """Texts of several lengths, which a batch pads."""

    def __getitem__(self, index):
        length = 6 if index < 200 else 3 + index % 4
        return self.features[index, :length], int(self.labels[index])


def padded(items):
    rows, labels = zip(*items, strict=True)
    width = max(map(len, rows))
    return torch.stack([F.pad(row, (0, width - len(row))) for row in rows]), torch.tensor(labels)


class MeanNet(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.net(x.unsqueeze(-1)).mean(1)


def loader_of(first, **options):
    return DataLoader(torch.utils.data.Subset(Texts(), range(first, first + 8)), batch_size=4, **options)


def test_batches_of_different_shapes_are_read_apart():
    loaders = [loader_of(first, collate_fn=padded) for first in (0, 8, 232, 16)]
    readers = [ClientReader(loader, 1.0) for loader in loaders]
    readers[2].loader.dataset.indices = range(203, 211)  # none of the first four has all six words
    stack = StackReader(readers)
    stack.start_epoch()
    own = [list(loader) for loader in loaders]
    assert [own[client][0][0].shape[1] for client in range(4)] == [6, 6, 6, 6]
    readers[2].loader.dataset.indices = [200, 204, 208, 212, 0, 1, 2, 3]  # three words each, then six
    own[2] = list(loaders[2])
    parts = [[(low, high) for low, high, _ in stack.read(0, 4, number)] for number in range(2)]
    assert parts == [[(0, 2), (2, 3), (3, 4)], [(0, 4)]]
    for low, high, (rows, labels) in stack.read(0, 4, 0):
        for place, client in enumerate(range(low, high)):
            assert torch.equal(rows[place], own[client][0][0])
            assert torch.equal(labels[place], own[client][0][1])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"shuffle": True, "drop_last": True}, True),
        ({"num_workers": 1}, False),
        ({"batch_size": None}, False),
        ({"generator": torch.Generator()}, False),
        ({"sampler": SubsetRandomSampler([1, 2])}, False),
        ({"sampler": RandomSampler(Items(), generator=torch.Generator())}, False),
        ({"batch_size": 1, "batch_sampler": BatchSampler(RandomSampler(Items()), 4, False)}, True),
        ({"batch_size": 1, "batch_sampler": BatchSampler(SubsetRandomSampler([1, 2]), 4, False)}, False),
    ],
)
def test_what_can_be_read(options, expected):
    assert reads_here(DataLoader(Items(), **{"batch_size": 4, **options})) == expected


def test_the_order_is_that_of_a_batch_sampler():
    def loader():
        torch.manual_seed(1)
        return DataLoader(Items(), batch_sampler=BatchSampler(RandomSampler(Items()), 7, True))

    reader = reader_of(loader(), 1.0)
    reader.start_epoch()
    expected = list(loader())
    assert len(reader.order) == len(expected) == SIZE // 7
    for number, batch in enumerate(expected):
        assert torch.equal(reader.read(number)["x"], batch["x"])


def test_evaluations_take_batches_of_a_batch_sampler():
    loader = DataLoader(Items(), batch_sampler=BatchSampler(SequentialSampler(Items()), 100, False))
    assert readable_in_order(loader)
    assert [EvaluationRequest(0, (), {}, loader, "test").size(number) for number in range(4)] == [100, 100, 40, 0]
    assert not readable_in_order(DataLoader(Items(), batch_sampler=BatchSampler(RandomSampler(Items()), 100, False)))
    assert not readable_in_order(DataLoader(Items(), batch_size=100, sampler=SequentialSampler(range(13))))


def test_the_samples_of_a_batch_are_counted_as_for_one_client():
    clients, x = torch.zeros(3), torch.zeros(3, 5, 2)
    assert [samples_of(batch) for batch in ((x, clients), {"x": x}, (clients, clients))] == [5, 5, 1]


def test_samples_are_not_counted_where_a_step_gives_their_number():
    log = StackedLog(2, high=2)
    log.samples = None
    log.log("loss", torch.zeros(2), batch_size=3)
    assert [each.batch_size for each in log.pending] == [3]


def test_callbacks_of_one_client_get_its_part_of_any_batch():
    found = _of_one({"x": torch.tensor([[1], [2]]), "pair": (torch.tensor([3, 4]), None)}, 1)
    assert found == {"x": torch.tensor([2]), "pair": (torch.tensor(4), None)}


def test_values_that_are_no_tensors_are_not_stacked():
    with pytest.raises(NotStackable, match="gets batches with a `str`, of which each client has its own"):
        layout_of({"x": torch.zeros(1), "name": ["a"]})


def test_stacked_batches_keep_their_structure():
    trees = [{"x": [torch.full((2,), float(place)), None], "y": Pair(torch.tensor(place), None)} for place in range(3)]
    found = stack_trees(trees)
    assert layout_of(found) != layout_of(trees[0]) == layout_of(trees[1])
    assert found["x"][0].tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert isinstance(found["y"], Pair)
    assert found["y"].features.tolist() == [0, 1, 2]
    assert found["x"][1] is found["y"].target is None


class Named(Items):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "name": f"item {index}"}


class Global(Items):
    def __getitem__(self, index):
        x, y = self.features[index], int(self.labels[index])
        return {"x": x + random.random(), "extra": {"y": y, "pair": (x, y)}}


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("items", "options", "reason"),
    [
        (Named(), {}, "gets batches with a `str`"),
        (Global(), {}, "draws random numbers from `random`"),
        (Items(), {"num_workers": 1}, "client 0's loader reads a `Items` with workers"),
    ],
    ids=["text", "Python's random numbers", "workers"],
)
@pytest.mark.filterwarnings("ignore:.*are evaluated one after another", "ignore:Trying to infer the `batch_size`")
def test_what_cannot_be_stacked_is_named_and_trains_alone(items, options, reason, tmp_path, stacks):
    worker._messages.clear()
    settings = {"num_clients": 5, "labels": items.labels, "num_classes": 3, "batch_size": 8, "test_fraction": 0.2}
    found = []
    for engine in ("stacked", "fast"):
        data = FederatedDataset(items, **settings, **options)
        if engine == "fast":
            found.append(trained(tmp_path, engine, data))
        else:
            with pytest.warns(UserWarning, match=reason):
                found.append(trained(tmp_path, engine, data))
    assert not stacks["trained"]
    assert all(torch.equal(found[0][0][name], tensor) for name, tensor in found[1][0].items())


class Damaged(Items):
    """Items some of which cannot be read."""

    damaged = frozenset()

    def __getitem__(self, index):
        if index in self.damaged:
            raise OSError(f"item {index} is damaged")
        return super().__getitem__(index)


def test_a_client_whose_data_fails_leaves_the_others_and_its_data_is_named(tmp_path, stacks):
    worker._messages.clear()
    found = []
    for engine in ("stacked", "fast"):
        data = split("tuple", num_clients=5, items=Damaged("tuple"))
        data.setup()
        data.train.damaged = frozenset(data.client_train_dataloader(3).dataset.rows[:, 0].tolist())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found.append(trained(tmp_path, engine, data, on_client_error="skip")[0])
        reasons = [str(each.message) for each in told if "one after another" in str(each.message)]
        if engine == "stacked":
            assert re.match(
                r"\d clients train one after another, since `Net.training_step` gets no batch of `Damaged` "
                r"\(OSError: item \d+ is damaged\); set `federation.local_engine: fast`",
                reasons[0],
            )
    assert all(torch.allclose(found[0][name], tensor, rtol=0, atol=1e-12) for name, tensor in found[1].items())


class PartlyScored(FederatedDataset):
    """Of all clients but the first one, the last samples are not evaluated."""

    def client_test_dataloader(self, client):
        loader = super().client_test_dataloader(client)
        part = {} if client == 0 else {"sampler": SequentialSampler(range(len(loader.dataset) - 2))}
        return DataLoader(loader.dataset, batch_size=3, collate_fn=loader.collate_fn, **part)


@pytest.mark.parametrize("tensors", [True, False], ids=["tensors", "items"])
def test_parts_of_the_samples_are_evaluated_as_alone(tensors, tmp_path):
    items = Items("tuple")
    found = []
    for engine in ("stacked", "fast"):
        train = TensorDataset(items.features, items.labels) if tensors else items
        options = {"labels": None if tensors else items.labels, "batch_size": 8, "num_classes": 3}
        data = PartlyScored(train, num_clients=5, test_fraction=0.2, eval_split="test", **options)
        found.append(trained(tmp_path, engine, data)[1])
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert "personal/test_loss" in found[0]


class Halving(L.Callback):
    """Replaces an entry of the batch."""

    stackable = True

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        batch["x"] = 0.5 * batch["x"]


class WithHalving(FedAvg):
    def callbacks(self, message, client):
        return [Halving()]


def test_an_entry_that_a_callback_replaces_is_what_trains(tmp_path, stacks):
    worker._messages.clear()
    with pytest.warns(UserWarning, match="a callback replaces an entry of the batch instead of writing into it"):
        found = trained(tmp_path, "stacked", split(), WithHalving())
    assert not stacks["trained"]
    alone = trained(tmp_path, "fast", split(), WithHalving())
    assert all(torch.equal(found[0][name], tensor) for name, tensor in alone[0].items())
    assert not torch.equal(trained(tmp_path, "fast", split())[0]["net.0.weight"], alone[0]["net.0.weight"])


class Altering(Net):
    """Its training step alters the batch in a way of `kind`."""

    kind = ""

    def training_step(self, batch, batch_idx):
        x, y = batch["x"], batch["extra"]["pair"][1]
        if self.kind == "writes":
            x = x.mul_(1.5).add_(0.1)
        elif self.kind == "replaces":
            x = batch["x"] = x * 1.5 + 0.1
        else:
            x = (batch.pop("x") if self.kind == "takes out" else x) * 1.5 + 0.1
        return F.cross_entropy(self(x), y)


@pytest.mark.slow_after_first("kind")
@pytest.mark.parametrize("kind", ["writes", "replaces", "takes out"])
@pytest.mark.parametrize(
    "algorithm", [APFL(), PFedMe(lam=5.0), PerFedAvg(order="hessian"), FjORD(distill=True)], ids=repr
)
def test_each_pass_has_the_samples_as_they_were_read(kind, algorithm, tmp_path, stacks):
    found = []
    for engine, own in (("stacked", kind), ("fast", kind), ("fast", "")):
        with mock.patch.object(Altering, "kind", own):
            found.append(trained(tmp_path, engine, split(), algorithm, module=Altering)[0])
    assert stacks["trained"]
    for other in found[1:]:
        assert all(torch.allclose(found[0][name], tensor, rtol=0, atol=1e-12) for name, tensor in other.items())
