"""FLOPs and units of a module whose data name no shape: from one sample of the first client."""

import csv
import json
import re
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_sparsefl import FederatedTrainer, Federation, FedLPS, FedSpa, HeteroFL
from lightning_sparsefl.cost import count_layers
from lightning_sparsefl.data import ClientDataModules, FederatedDataset
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.local.example_input import example_of, layers_of, units_of


class Tokens(L.LightningModule):
    """A user's module for tokens, without an example of its inputs."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.hidden = nn.Linear(4, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.out(F.relu(self.hidden(self.embed(tokens).mean(1))))

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.log("train_acc", (logits.argmax(1) == batch[1]).float().mean())
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Text(L.LightningDataModule):
    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def setup(self, stage=None):
        tokens = torch.randint(10, (16, 5), generator=torch.Generator().manual_seed(self.seed))
        self.data = TensorDataset(tokens, tokens.sum(1) % 3)
        self.order = torch.Generator().manual_seed(self.seed)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=4, shuffle=True, generator=self.order)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=8)


def text():
    data = ClientDataModules([Text(seed) for seed in range(4)])
    data.setup()
    return data


def trainer(tmp_path, algorithm, **options):
    return FederatedTrainer(
        algorithm=algorithm,
        federation=Federation(clients_per_round=2, **options),
        accelerator="cpu",
        max_rounds=1,
        enable_progress_bar=False,
        default_root_dir=str(tmp_path),
    )


def test_the_first_sample_of_the_first_client_is_the_example():
    module, data = Tokens(), text()
    assert torch.equal(example_of(module, data)[0], data.modules[0].data.tensors[0][:1])
    assert layers_of(module, data) == count_layers(module, torch.zeros(1, 5, dtype=torch.int64))
    assert [group.name for group in units_of(module, data)] == ["hidden"]


def test_random_states_and_the_order_of_the_loader_stay_as_they_were():
    module, data = Tokens(), text()
    before = torch.get_rng_state(), data.modules[0].order.get_state()
    layers_of(module, data)
    units_of(module, data)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(data.modules[0].order.get_state(), before[1])


@pytest.mark.parametrize("algorithm", [FedSpa(density=0.5), HeteroFL(), FedLPS()], ids=lambda a: type(a).__name__)
def test_methods_run_on_tokens_and_count_flops(algorithm, tmp_path):
    data = ClientDataModules([Text(seed) for seed in range(4)])
    summary = trainer(tmp_path, algorithm, capacities=[0.5, 1.0]).fit(Tokens(), data)
    assert summary["flops/train_total"] > 0


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(5, dtype=torch.int64), torch.tensor(1)


class Batches(TensorDataset):
    """Each item is a batch."""

    def __getitem__(self, index):
        return tuple(tensor[:3] for tensor in self.tensors)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), batch_size=2),
        DataLoader(Batches(torch.zeros(4, 5, dtype=torch.int64), torch.zeros(4)), batch_size=None),
    ],
    ids=["stream", "batches"],
)
def test_other_kinds_of_loaders(loader, monkeypatch):
    data = text()
    monkeypatch.setattr(data.modules[0], "train_dataloader", lambda: loader)
    assert example_of(Tokens(), data)[0].shape == (1, 5)


class Normed(Tokens):
    def __init__(self, norm):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), norm(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, rows):
        return self.net(rows)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_an_example_of_a_table_is_a_batch(norm):
    """The data set of the loader collates itself, as `TensorDataset` of two tensors does here."""
    table = FederatedDataset(TensorDataset(torch.zeros(12, 5), torch.zeros(12, 1)), num_clients=3, test_fraction=0.1)
    table.setup()
    module = Normed(norm)
    assert example_of(module, table)[0].shape == (1, 5)
    assert layers_of(module, table)
    assert [group.size for group in units_of(module, table)] == [8]


class NoForward(Tokens):
    forward = L.LightningModule.forward

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.out(self.hidden(self.embed(batch[0]).mean(1))), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


def test_unknown_flops_have_no_key_and_no_number(tmp_path, capsys):
    data, run = ClientDataModules([Text(seed) for seed in range(4)]), trainer(tmp_path, FedSpa(density=0.5))
    with pytest.warns(UserWarning, match="FLOPs are not counted: `NoForward` has no `forward`, .*; define it"):
        summary = run.fit(NoForward(), data)
    assert not [name for name in summary if name.startswith("flops/")]
    assert {"algorithm": "FedSpa", **summary} == json.loads((run.run_folder / "summary.json").read_text())
    for table in ("metrics.csv", "clients.csv"):
        with (run.run_folder / table).open() as file:
            assert not [name for name in next(csv.reader(file)) if "flops" in name]
    assert re.search("training FLOPs +not counted\n", capsys.readouterr().out)


def test_the_reason_why_there_are_no_units_is_named(monkeypatch):
    data = text()
    monkeypatch.setattr(data.modules[0], "train_dataloader", lambda: DataLoader([], batch_size=2))
    with pytest.raises(
        InvalidOption, match=r"units of `Tokens` cannot be found: .*IndexError.*set one of the first two"
    ):
        units_of(Tokens(), data)


class Scaled(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, scale):
        return self.out(self.hidden(x)) * scale


def test_a_forward_that_needs_more_than_the_sample_names_the_attribute():
    words = r"units of `Scaled` cannot be found: its `forward` fails on one sample \(TypeError: .*'scale'\); set its "
    with pytest.raises(InvalidOption, match=words + "`example_input_array` to arguments of `forward`"):
        units_of(Scaled(), SimpleNamespace(sample_shape=(3,)))


class Compiled(Scaled):
    def __init__(self):
        super().__init__()
        self.hidden = torch.compile(self.hidden, backend="eager")

    def forward(self, x):
        raise RuntimeError("cannot be traced")


def test_a_compiled_model_that_cannot_be_traced_is_told_apart():
    with pytest.warns(UserWarning, match=r"cannot be traced\); expected a model without `torch.compile`"):
        assert layers_of(Compiled(), SimpleNamespace(sample_shape=(3,))) is None


def test_an_example_that_does_not_fit_is_told_apart():
    module = Scaled()
    module.example_input_array = torch.zeros(1, 3)
    with pytest.raises(InvalidOption, match=r"expected its `example_input_array` to be arguments with which `forward`"):
        units_of(module, SimpleNamespace(sample_shape=(3,)))


@pytest.mark.parametrize(
    "data", [SimpleNamespace(sample_shape=(5,)), text()], ids=["a shape of samples", "the first sample"]
)
def test_of_an_example_of_several_samples_the_first_is_counted(data):
    module, one = Tokens(), Tokens()
    one.example_input_array = torch.zeros(1, 5, dtype=torch.int64)
    module.example_input_array = torch.zeros(32, 5, dtype=torch.int64)
    assert layers_of(module, data) == layers_of(one, data)


def test_an_example_whose_samples_are_in_an_unknown_dimension_is_counted_whole_and_said():
    module = Tokens()
    module.example_input_array = torch.zeros(7, 3, dtype=torch.int64)
    words = r"those of all of `Tokens.example_input_array`, whose first dimension is 7; expected a batch of one sample"
    with pytest.warns(UserWarning, match=words):
        counted = layers_of(module, text())
    assert {layer.weight: layer.macs for layer in counted}["embed.weight"] == 7 * 3 * 4


def test_a_list_of_one_sample_is_one_sample():
    module = Tokens()
    module.example_input_array = ([torch.zeros(3, 5, 5)],)
    (images,) = example_of(module, text())  # without the warning of another first dimension than 1
    assert [image.shape for image in images] == [(3, 5, 5)]
