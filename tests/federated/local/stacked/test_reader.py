"""Data that stacks cannot read: named by its class, as its user knows it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from helpers.networks import Classifier
from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import FederatedDataset
from lightning_sparsefl.federated.local.stacked import worker
from lightning_sparsefl.federated.local.stacked.reader import name_of_data


class Patients(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((8,), float(index)), index % 4


def data_of(train, **options):
    data = FederatedDataset(train, num_clients=2, test_fraction=0.2, labels=[0, 1, 2, 3] * 10, batch_size=8, **options)
    data.setup()
    return data


def test_data_has_the_name_of_the_users_class():
    tensors = TensorDataset(torch.zeros(40, 8), torch.arange(40) % 4)
    names = [
        name_of_data(data_of(Patients()).client_train_dataloader(0)),
        name_of_data(data_of(tensors, collate_fn=torch.utils.data.default_collate).client_train_dataloader(0)),
        name_of_data(DataLoader(tensors)),
        name_of_data([1, 2]),
    ]
    assert names == ["Patients", "TensorDataset", "TensorDataset", "list"]


def test_a_run_names_no_internals(tmp_path):
    worker._messages.clear()
    trainer = FederatedTrainer(
        algorithm=FedAvg(),
        federation=Federation(clients_per_round=2, local_engine="stacked"),
        accelerator="cpu",
        max_rounds=1,
        default_root_dir=str(tmp_path),
        logger=False,
        enable_progress_bar=False,
    )
    expected = "since client 0's loader reads a `Patients` in a way of its own, and not whole batches of two tensors"
    with pytest.warns(UserWarning, match=expected) as said:
        trainer.fit(Classifier(), data_of(Patients()))
    assert not any(name in str(each.message) for each in said for name in ("Examples", "ClientItems"))
