"""Ordinary data modules, one per client."""

from __future__ import annotations

import copy
import pickle

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_sparsefl.data import ClientDataModules, FederatedDataModule, FederatedDigits
from lightning_sparsefl.data.examples import Examples
from lightning_sparsefl.errors import InvalidOption


def numbers(first: int, count: int) -> TensorDataset:
    inputs = torch.arange(first, first + count)
    return TensorDataset(inputs, inputs % 3)


class Own(L.LightningDataModule):
    """`count` training samples from `first` on, half as many to validate, and 2 to test with."""

    def __init__(self, first: int, count: int, batch_size: int = 4) -> None:
        super().__init__()
        self.first, self.count, self.batch_size = first, count, batch_size
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)

    def teardown(self, stage: str) -> None:
        self.calls.append(f"end {stage}")

    def train_dataloader(self):
        return DataLoader(numbers(self.first, self.count), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(numbers(self.first + 50, self.count // 2), batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(numbers(self.first + 80, 2), batch_size=self.batch_size)


class TrainOnly(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(numbers(0, 6), batch_size=2)


def drawn(loader) -> list[int]:
    return sorted(int(number) for inputs, _ in loader for number in inputs)


@pytest.fixture
def data() -> ClientDataModules:
    return ClientDataModules([Own(0, 10), Own(100, 6, batch_size=3)], num_classes=3, sample_shape=(1, 1, 1))


def test_is_a_federated_data_module(data):
    assert isinstance(data, FederatedDataModule)
    assert (data.num_clients, data.num_classes, data.sample_shape, data.batch_size) == (2, 3, (1, 1, 1), 4)


def test_each_client_uses_its_own_loaders(data):
    data.setup()
    assert drawn(data.client_train_dataloader(0)) == list(range(10))
    assert drawn(data.client_train_dataloader(1)) == list(range(100, 106))
    assert data.client_train_dataloader(1).batch_size == 3
    assert drawn(data.client_val_dataloader(1)) == [150, 151, 152]
    assert drawn(data.client_test_dataloader(0)) == [80, 81]


class Part(L.LightningDataModule):
    """Some samples of a data set that the clients share, which a sampler draws."""

    def __init__(self, indices: list[int], batches: bool = False) -> None:
        super().__init__()
        self.indices, self.batches = indices, batches

    def train_dataloader(self):
        sampler = SubsetRandomSampler(self.indices)
        if self.batches:
            return DataLoader(numbers(0, 20), batch_sampler=BatchSampler(sampler, 4, drop_last=False))
        return DataLoader(numbers(0, 20), batch_size=4, sampler=sampler)


@pytest.mark.parametrize("batches", [False, True])
def test_clients_have_the_samples_that_their_samplers_draw(batches):
    data = ClientDataModules([Part([3, 4], batches), Part(list(range(5, 20)), batches)])
    data.setup()
    assert list(data.client_sizes) == [2, 15]
    assert drawn(data.train_dataloader()) == list(range(3, 20))


class Dropping(Own):
    """Leaves out a last batch that is smaller."""

    def train_dataloader(self):
        return DataLoader(numbers(self.first, self.count), batch_size=4, shuffle=True, drop_last=True)


def test_what_a_loader_drops_is_not_trained_on_and_counts_as_a_label():
    data = ClientDataModules([Dropping(0, 10), Dropping(10, 10)], num_classes=3)
    data.setup()
    assert (data.batch_size, data.drop_last) == (4, True)
    assert data.client_label_counts(0).tolist() == [4, 3, 3]


def test_batches_that_differ_from_those_of_the_first_client_are_known(data):
    assert data.own_batches == {1: (3, False)}
    data.setup()
    assert data.own_batches == {1: (3, False)}
    mixed = ClientDataModules([Own(0, 10), Dropping(10, 10), Own(20, 10)])
    mixed.setup()
    assert mixed.own_batches == {1: (4, True)}


def test_pooled_loaders_join_everyone(data):
    data.setup()
    assert drawn(data.train_dataloader()) == [*range(10), *range(100, 106)]
    assert drawn(data.val_dataloader()) == [*range(50, 55), 150, 151, 152]
    assert drawn(data.test_dataloader()) == [80, 81, 180, 181]
    assert data.test_dataloader().batch_size == 4


def test_pooled_loaders_join_federated_data_modules():
    parts = [FederatedDigits(num_clients=3, batch_size=16, test_per_client=5), FederatedDigits(num_clients=1)]
    data = ClientDataModules(parts)
    data.setup()
    inputs, labels = (torch.cat(values) for values in zip(*data.test_dataloader(), strict=True))
    own = [list(part.test_dataloader()) for part in parts]
    assert torch.equal(inputs, torch.cat([batch[0] for batches in own for batch in batches]))
    assert torch.equal(labels, torch.cat([batch[1] for batches in own for batch in batches]))
    assert data.client_label_counts(0).sum() == 1442
    assert len(next(iter(data.train_dataloader()))[0]) == 16


class WholeBatches(Own):
    """Has batches as the items of its data set."""

    def train_dataloader(self):
        return DataLoader(numbers(self.first, 8).tensors[0].split(4), batch_size=None)


def test_pooled_loaders_have_the_batches_of_a_batch_sampler():
    data = ClientDataModules([Part(list(range(10)), batches=True), Part([11, 12], batches=True)])
    data.setup()
    assert (data.batch_size, data.own_batches) == (4, {})
    assert [len(inputs) for inputs, _ in data.train_dataloader()] == [4, 4, 4]
    pooled = ClientDataModules([WholeBatches(0, 8), WholeBatches(8, 8)]).train_dataloader()
    assert sorted(batch.tolist() for batch in pooled) == [[k, k + 1, k + 2, k + 3] for k in range(0, 16, 4)]


def test_modules_are_prepared_and_set_up_once(data):
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    data.teardown("fit")
    assert [module.calls for module in data.modules] == [["prepare", "fit", "test", "end fit"]] * 2


def test_sizes_are_unknown_until_setup_unless_told(data):
    assert data.client_sizes == [0, 0]
    data.setup()
    assert data.client_sizes == [10, 6]
    assert data.num_examples(1) == 6
    assert ClientDataModules(data.modules, client_sizes=[10, 6]).client_sizes == [10, 6]


def test_facts_come_from_the_first_module_or_stay_unknown():
    knowing = Own(0, 4)
    knowing.num_classes, knowing.sample_shape = 3, (1, 2, 3)
    assert ClientDataModules([knowing]).sample_shape == (1, 2, 3)
    assert not hasattr(ClientDataModules([Own(0, 4)]), "sample_shape")


def test_label_counts(data):
    data.setup()
    assert data.client_label_counts(0).tolist() == [4, 3, 3]
    with pytest.raises(InvalidOption, match=r"`data.num_classes` is not set, .*; expected a whole number >= 1"):
        ClientDataModules([Own(0, 4)]).client_label_counts(0)


class Batches(L.LightningDataModule):
    """Loads given samples."""

    def __init__(self, samples):
        super().__init__()
        self.samples = samples

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=4)


LABELLED = {
    "a key": [{"x": torch.zeros(1), "label": i % 3} for i in range(10)],
    "a key among others": [{"labels": i % 3, "x": torch.zeros(1), "id": str(i)} for i in range(10)],
    "a column": TensorDataset(torch.zeros(10, 1), torch.arange(10)[:, None] % 3),
}
UNLABELLED = {
    "no key": [{"x": torch.zeros(1), "class": 0}],
    "three parts": TensorDataset(torch.zeros(2, 1), torch.zeros(2), torch.zeros(2)),
    "fractions": TensorDataset(torch.zeros(2, 1), torch.zeros(2)),
    "too many classes": TensorDataset(torch.zeros(2, 1), torch.tensor([0, 3])),
    "a negative number": TensorDataset(torch.zeros(2, 1), torch.tensor([0, -1])),
    "texts": [(0, "a"), (1, "b")],
}


@pytest.mark.parametrize("name", LABELLED)
def test_labels_are_counted_wherever_batches_have_them(name):
    data = ClientDataModules([Batches(LABELLED[name])], num_classes=3)
    data.setup()
    assert data.client_label_counts(0).tolist() == [4, 3, 3]


@pytest.mark.parametrize("name", UNLABELLED)
def test_batches_without_classes_are_refused(name):
    data = ClientDataModules([Batches(UNLABELLED[name])], num_classes=3)
    data.setup()
    with pytest.raises(InvalidOption, match=r"Label counts need batches .* below `data\.num_classes` = 3; expected"):
        data.client_label_counts(0)


def test_validation_and_test_are_optional():
    data = ClientDataModules([TrainOnly()])
    data.setup()
    assert data.client_val_dataloader(0) is None
    assert data.val_dataloader() is None
    with pytest.raises(InvalidOption, match="client 0 has no `test_dataloader`"):
        data.client_test_dataloader(0)


def test_the_trainer_is_handed_on(data):
    trainer = object()
    data.trainer = trainer
    data.setup()
    assert all(module.trainer is trainer for module in data.modules)


def test_refuses_several_loaders_for_one_client():
    class Two(TrainOnly):
        def train_dataloader(self):
            return [super().train_dataloader()] * 2

    with pytest.raises(
        InvalidOption,
        match="`train_dataloader` of the data module of client 0 returns a list; expected a single DataLoader",
    ):
        ClientDataModules([Two()]).setup()


def test_refuses_streams_and_empty_sets():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    class Streaming(TrainOnly):
        def train_dataloader(self):
            return DataLoader(Stream())

    class Empty(TrainOnly):
        def train_dataloader(self):
            return DataLoader(numbers(0, 0))

    for module, words, advice in (
        (Streaming(), "has no length", "or give its number of samples in `data.client_sizes`"),
        (Empty(), "is empty", "leave the client out"),
    ):
        expected = f"client 1 {words}; expected a data set with `__len__` and at least one sample; {advice}\\.$"
        with pytest.raises(InvalidOption, match=expected):
            ClientDataModules([TrainOnly(), module]).setup()


def test_refuses_bad_arguments():
    with pytest.raises(InvalidOption, match=r"`data.modules` is \[\]; expected at least one data module"):
        ClientDataModules([])
    with pytest.raises(
        InvalidOption, match=r"`data.client_sizes` has 2 entries; expected one for each of the 1 modules"
    ):
        ClientDataModules([TrainOnly()], client_sizes=[1, 2])


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(1), torch.tensor(0))] * 5)


class Counted(Stream):
    def __len__(self):
        return 5


def streaming(dataset) -> L.LightningDataModule:
    module = TrainOnly()
    module.train_dataloader = lambda: DataLoader(dataset, batch_size=2)
    return module


def test_a_stream_has_the_length_that_it_knows_or_is_given():
    counted = ClientDataModules([streaming(Counted()), TrainOnly()])
    counted.setup()
    assert [counted.num_examples(client) for client in (0, 1)] == [5, 6]
    told = ClientDataModules([streaming(Stream()), TrainOnly()], client_sizes=[7, 6])
    told.setup()
    assert [told.num_examples(client) for client in (0, 1)] == [7, 6]


@pytest.mark.parametrize("hook", ["setup", "train_dataloader"])
def test_a_hook_that_needs_a_trainer_is_named(hook):
    class Scaled(TrainOnly):
        pass

    setattr(Scaled, hook, lambda self, *args: self.trainer.world_size)
    message = rf"`{hook}` of the data module of client 1 reads `world_size` of None; expected .* `self.trainer`"
    with pytest.raises(InvalidOption, match=message):
        ClientDataModules([TrainOnly(), Scaled()]).setup()

    def fail(self, *args):
        raise AttributeError("mine")

    setattr(Scaled, hook, fail)
    with pytest.raises(AttributeError, match="mine"):
        ClientDataModules([TrainOnly(), Scaled()]).setup()


class Shifted(Own):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + self.first, batch[1]]


def test_pooled_batches_have_the_hooks_of_the_first_that_has_some():
    data = ClientDataModules([Own(0, 4), Shifted(10, 4), Shifted(20, 4)])
    assert not is_overridden("on_after_batch_transfer", data.datamodule_of(0))
    assert data.datamodule_of(2).on_after_batch_transfer([1, 2], 0) == [21, 2]
    for pooled in (data, copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert is_overridden("on_after_batch_transfer", pooled)
        assert pooled.on_after_batch_transfer([1, 2], 0) == [11, 2]
        assert not is_overridden("on_before_batch_transfer", pooled)


class Last(Sampler):
    """Sampler of the last samples, in batches if it has a size."""

    def __init__(self, first, size=None):
        self.rows, self.size = list(range(first, 20)), size

    def __len__(self):
        return len(self.rows) if self.size is None else len(self.rows) // self.size

    def __iter__(self):
        return iter(self.rows if self.size is None else torch.tensor(self.rows).split(self.size))


class Listed(Sampler):
    """Sampler of batches as lists."""

    def __iter__(self):
        return iter([[15, 16], [17, 18, 19]])


class OneSet(L.LightningDataModule):
    """Twenty samples, of which a sampler separates those to validate from those to train on."""

    def __init__(self, client, **options):
        super().__init__()
        self.data, self.options = numbers(100 * client, 20), options

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=4, sampler=SubsetRandomSampler(range(15)))

    def val_dataloader(self):
        return DataLoader(self.data, **self.options)


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": SubsetRandomSampler(range(15, 20)), "batch_size": 2},
        {"sampler": list(range(15, 20)), "batch_size": 2},
        {"sampler": Last(15), "batch_size": 2},
        {"batch_sampler": [[15, 16], [17, 18, 19]]},
        {"batch_sampler": Listed()},
        {"batch_sampler": Last(15, 2)},
        {"batch_sampler": BatchSampler(Last(15), 2, False)},
        {"sampler": BatchSampler(Last(15), 2, False), "batch_size": None},
    ],
    ids=[
        "subset",
        "list",
        "own sampler",
        "list of batches",
        "own batches",
        "batches as tensors",
        "batch sampler",
        "batches as indices",
    ],
)
def test_pooled_loaders_have_no_sample_that_a_client_does_not_draw(options):
    data = ClientDataModules([OneSet(client, **options) for client in range(3)])
    data.setup()
    mine = [drawn(data.client_val_dataloader(client)) for client in range(3)]
    assert mine == [list(range(100 * client + 15, 100 * client + 20)) for client in range(3)]
    state = torch.get_rng_state()
    pooled = data.val_dataloader()
    assert torch.equal(state, torch.get_rng_state())
    assert drawn(pooled) == [number for own in mine for number in own]
    assert len(drawn(data.train_dataloader())) == 45


class Batched(L.LightningDataModule):
    """Batches as indices of a data set, or as lists."""

    def __init__(self, count, size, listed=False):
        super().__init__()
        self.count, self.size, self.listed = count, size, listed

    def train_dataloader(self):
        data = numbers(0, self.count + 5)
        if self.listed:
            return DataLoader(data, batch_sampler=[list(rows) for rows in torch.arange(self.count).split(self.size)])
        return DataLoader(data, sampler=BatchSampler(RandomSampler(data), self.size, False), batch_size=None)

    def test_dataloader(self):
        data = numbers(0, self.count)
        return DataLoader(data, sampler=BatchSampler(range(self.count), self.size, False), batch_size=None)


@pytest.mark.parametrize("listed", [False, True], ids=["indices", "lists"])
def test_sizes_and_pooled_batches_of_loaders_of_batches(listed):
    data = ClientDataModules([Batched(8, 4, listed), Batched(10, 5, listed)], num_classes=3)
    data.setup()
    more = 0 if listed else 5
    assert list(data.client_sizes) == [8 + more, 10 + more]
    assert (data.batch_size, data.own_batches) == (4, {1: (5, False)})
    assert int(data.client_label_counts(0).sum()) == 8 + more
    assert [len(inputs) for inputs, _ in data.test_dataloader()] == [4, 4, 4, 4, 2]
    assert drawn(data.test_dataloader()) == sorted([*range(8), *range(10)])


class SomeExamples(L.LightningDataModule):
    def test_dataloader(self):
        examples = Examples(torch.arange(8.0)[:, None], torch.arange(8), lambda inputs: inputs + 1)
        return examples.loader(2, sampler=SubsetRandomSampler([5, 2, 7]))

    train_dataloader = test_dataloader


def test_pooled_examples_of_a_sampler_are_read_as_batches():
    data = ClientDataModules([SomeExamples(), SomeExamples()])
    data.setup()
    inputs, labels = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
    assert labels.tolist() == [5, 2, 7] * 2
    assert inputs.flatten().tolist() == [6.0, 3.0, 8.0] * 2


class Numbers(IterableDataset):
    def __init__(self, first):
        self.first = first

    def __iter__(self):
        return iter([(torch.tensor(self.first + number), torch.tensor(0)) for number in range(3)])


class OnAStream(Own):
    def test_dataloader(self):
        return DataLoader(Numbers(self.first), batch_size=2)


def test_pooled_streams_come_one_after_another_and_mixed_ones_are_refused():
    data = ClientDataModules([OnAStream(0, 8), OnAStream(100, 4)])
    data.setup()
    assert drawn(data.test_dataloader()) == [0, 1, 2, 100, 101, 102]
    mixed = ClientDataModules([Own(0, 8), OnAStream(100, 4)])
    mixed.setup()
    with pytest.raises(InvalidOption, match="client 1 is an `IterableDataset`, and that of client 0 is not"):
        mixed.test_dataloader()
