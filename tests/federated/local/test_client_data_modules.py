"""Clients whose data modules are their own: hooks of the batch transfer, and what a run does not call."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation, FedSpa
from lightning_sparsefl.data import ClientDataModules
from lightning_sparsefl.errors import InvalidOption

CLIENTS, SAMPLES = 3, 8
INPUTS = torch.randn(CLIENTS, SAMPLES, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.arange(CLIENTS * SAMPLES).view(CLIENTS, SAMPLES) % 3


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Own(L.LightningDataModule):
    """Data of a client; `shift` is added to its inputs before they are stored, or when a batch is transferred."""

    def __init__(self, client: int, stored: bool) -> None:
        super().__init__()
        self.client, self.shift = client, client + 1.0
        self.inputs = INPUTS[client] + self.shift if stored else INPUTS[client]
        self.ended: list[str] = []

    def loader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.inputs, LABELS[self.client]), batch_size=4)

    train_dataloader = test_dataloader = loader

    def teardown(self, stage: str) -> None:
        self.ended.append(stage)


class Transferred(Own):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + self.shift, batch[1]]


class Stream(IterableDataset):
    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows[i] for i in range(len(self.rows)))


class Endless(IterableDataset):
    """A stream whose length is not known."""

    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __iter__(self):
        return iter(self.rows[i] for i in range(len(self.rows)))


class StreamingOn(Own):
    def stream(self):
        return DataLoader(Endless(TensorDataset(self.inputs, LABELS[self.client])), batch_size=4)

    train_dataloader = stream


class StreamingEverywhere(StreamingOn):
    test_dataloader = StreamingOn.stream


class Streaming(Own):
    def train_dataloader(self):
        return DataLoader(Stream(TensorDataset(self.inputs, LABELS[self.client])), batch_size=4)


def fitted(modules, tmp_path, engine="auto", algorithm=None, sizes=None):
    trainer = FederatedTrainer(
        algorithm=FedAvg() if algorithm is None else algorithm,
        federation=Federation(clients_per_round=CLIENTS, local_engine=engine),
        max_rounds=2,
        precision="64-true",
        accelerator="cpu",
        devices=1,
        seed=1,
        quiet=True,
        logger=False,
        default_root_dir=tmp_path,
    )
    module = Net()
    found = trainer.fit(module, ClientDataModules(list(modules), eval_split="test", client_sizes=sizes))
    return module.state_dict(), found["personal/test_loss"]


@pytest.mark.parametrize("engine", ["trainer", "fast", "auto"])
@pytest.mark.parametrize("algorithm", [FedAvg(), FedSpa(density=0.5)], ids=["FedAvg", "FedSpa"])
def test_each_client_s_hooks_of_the_transfer_are_called(engine, algorithm, tmp_path):
    stored = fitted([Own(client, stored=True) for client in range(CLIENTS)], tmp_path, engine, algorithm)
    moved = fitted([Transferred(client, stored=False) for client in range(CLIENTS)], tmp_path, engine, algorithm)
    # With `auto`, those whose samples are stored train as a stack.
    tolerance = 1e-12 if engine == "auto" else 0
    assert stored[1] == pytest.approx(moved[1], rel=tolerance)
    torch.testing.assert_close(stored[0], moved[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("engine", ["trainer", "fast"])
def test_a_run_does_not_tear_data_modules_down(engine, tmp_path):
    modules = [Own(client, stored=True) for client in range(CLIENTS)]
    fitted(modules, tmp_path, engine)
    assert [module.ended for module in modules] == [[]] * CLIENTS


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_streams_train_as_data_sets_do(tmp_path):
    sets = fitted([Own(client, stored=True) for client in range(CLIENTS)], tmp_path, "fast")
    for engine in ("trainer", "fast"):
        streams = fitted([Streaming(client, stored=True) for client in range(CLIENTS)], tmp_path, engine)
        assert all(torch.equal(sets[0][name], streams[0][name]) for name in sets[0])


@pytest.mark.parametrize("algorithm", [FedAvg(), FedSpa(density=0.5)], ids=["FedAvg", "FedSpa"])
@pytest.mark.parametrize("kinds", [[StreamingEverywhere] * 3, [Own, StreamingOn, Own]], ids=["all", "one"])
@pytest.mark.filterwarnings("ignore:Clients train one after another, since client 0's loader reads")
def test_streams_without_a_length_train_in_a_trainer_as_data_sets_do(kinds, algorithm, tmp_path):
    sets = fitted([Own(client, stored=True) for client in range(CLIENTS)], tmp_path, "trainer", algorithm)
    modules = [kind(client, stored=True) for client, kind in enumerate(kinds)]
    for engine in ("trainer", "auto", "stacked"):
        streams = fitted(modules, tmp_path, engine, algorithm, sizes=[SAMPLES] * CLIENTS)
        assert all(torch.allclose(sets[0][name], streams[0][name], atol=1e-12) for name in sets[0])
        assert streams[1] == pytest.approx(sets[1], abs=1e-12)
    with pytest.raises(InvalidOption, match=r"`DataLoader` has no length; set `federation.local_engine: trainer`"):
        fitted(modules, tmp_path, "fast", sizes=[SAMPLES] * CLIENTS)
