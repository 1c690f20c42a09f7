"""What stacks read, beside the random numbers of their steps, and data that they cannot read, named by its class."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from helpers.networks import Classifier
from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import FederatedBlobs, FederatedDataset
from lightning_sparsefl.federated.local.fast.device_samples import DeviceSamples
from lightning_sparsefl.federated.local.stacked import worker
from lightning_sparsefl.federated.local.stacked.reading.reader import name_of_data, reader_of
from lightning_sparsefl.federated.local.stacked.reading.stack_reader import stack_reader


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
    expected = "since client 0's loader reads a `Patients` with workers, pinned memory, or a sampler"
    with pytest.warns(UserWarning, match=expected) as said:
        trainer.fit(Classifier(), data_of(Patients(), num_workers=1))
    assert not any(name in str(each.message) for each in said for name in ("Examples", "ClientItems"))


class Shifted(FederatedBlobs):
    """Has a transform, which may draw."""

    draw = False

    def transform(self, train):
        return (lambda x: x + torch.rand(len(x), 1, 1, 1)) if self.draw else (lambda x: 2 * x)


@pytest.mark.parametrize("kind", [FederatedBlobs, Shifted, type("Drawn", (Shifted,), {"draw": True})])
def test_clients_draw_from_their_own_random_numbers_and_leave_those_of_the_steps_alone(kind):
    data = kind(num_clients=2, num_classes=4, dim=8, num_train=64, num_test=16, batch_size=8)
    data.setup()
    readers, expected = [], []
    for client in range(2):
        torch.manual_seed(client)
        readers.append(reader_of(data.client_train_dataloader(client), 1.0))
        torch.manual_seed(client)
        loader = data.client_train_dataloader(client)
        expected.append([[x for x, _ in loader] for _ in range(2)])
    torch.manual_seed(7)
    state, stack = torch.get_rng_state(), stack_reader(readers, DeviceSamples(torch.device("cpu")))
    for epoch in range(2):
        stack.start_epoch()
        assert torch.equal(torch.get_rng_state(), state)
        for number in range(readers[0].batches):
            ((low, high, (inputs, _)),) = stack.read(0, 2, number)
            assert (low, high) == (0, 2)
            assert all(torch.equal(inputs[client], expected[client][epoch][number]) for client in range(2))
            assert torch.equal(torch.get_rng_state(), state)
