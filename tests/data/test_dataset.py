"""Any data set as a federation: what is read of it, what a client gets of it, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import (
    IID,
    BrightnessShift,
    ByGroup,
    Dirichlet,
    Examples,
    FederatedDataModule,
    FederatedDataset,
    NoiseShift,
    Pathological,
    QuantitySkew,
    RotationShift,
)
from lightning_sparsefl.data.columns import find_labels
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import MLP
from lightning_sparsefl.testing.contents import comparable

INPUTS = torch.randn(150, 1, 1, 6, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS.sum((1, 2, 3)) > 0).long() + (INPUTS[:, 0, 0, 0] > 0).long()
SITES = [("north", "east", "south")[i % 7 % 3] for i in range(150)]


class Records(Dataset):
    """Items that are mappings, read by column name as in Hugging Face's data sets."""

    def __init__(self, rows: Sequence[int], *names: str) -> None:
        columns = {"x": INPUTS, "label": LABELS, "site": SITES, "number": list(range(150))}
        self.columns = {name: [columns[name][row] for row in rows] for name in names or columns}

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def with_format(self, kind: str | None) -> Records:
        assert kind is None
        return self

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns[key]
        return {name: values[key] for name, values in self.columns.items()}


class Pairs(Dataset):
    """Items that are pairs, without a word about labels."""

    def __init__(self, first: int, last: int) -> None:
        self.rows = range(first, last)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return INPUTS[self.rows[index]], int(LABELS[self.rows[index]])


def tensors(first: int, last: int) -> TensorDataset:
    return TensorDataset(INPUTS[first:last], LABELS[first:last])


def numbers(loader, name: str = "number") -> list[int]:
    return sorted(chain.from_iterable(batch[name].tolist() for batch in loader))


def as_pair(items: list[dict]) -> tuple[Tensor, Tensor]:
    """Collate function of records."""
    return torch.stack([item["x"] for item in items]), torch.stack([item["label"] for item in items])


def run(data, folder, algorithm=None, rounds=2, ckpt_path=None, **options) -> FederatedTrainer:
    federation = Federation(clients_per_round=3, **options.pop("federation", {}))
    trainer = FederatedTrainer(
        algorithm=algorithm or FedAvg(),
        federation=federation,
        accelerator="cpu",
        **{"devices": 1, **options},
        max_rounds=rounds,
        logger=False,
        quiet=True,
        default_root_dir=str(folder),
        timeout=120,
    )
    torch.manual_seed(0)
    trainer.summary = trainer.fit(MLP(3, (1, 1, 6), hidden=(5,)), data, ckpt_path)
    return trainer


def weights(trainer: FederatedTrainer):
    path = trainer.run_folder / "checkpoints" / "last.ckpt"
    return comparable(torch.load(path, weights_only=True)["state_dict"])


LABEL_SOURCES = {
    "found": (tensors(0, 100), None),
    "found in a subset": (Subset(tensors(0, 150), range(100)), None),
    "found in a concatenation": (ConcatDataset([tensors(0, 30), tensors(30, 100)]), None),
    "found in a column": (Records(range(100)), None),
    "tensor": (Pairs(0, 100), LABELS[:100]),
    "array": (Pairs(0, 100), LABELS[:100].numpy()),
    "list": (Pairs(0, 100), LABELS[:100].tolist()),
    "column": (Records(range(100)), "label"),
    "column of a subset": (Subset(Records(range(150)), list(range(100))), "label"),
    "function": (Pairs(0, 100), lambda item: item[1]),
    "function of tensors": (tensors(0, 100), lambda item: item[1]),
    "names": (tensors(0, 100), ["abc"[label] for label in LABELS[:100]]),
    "shifted": (tensors(0, 100), LABELS[:100] - 1),
    "fractions that are whole": (Pairs(0, 100), LABELS[:100].double()),
}


@pytest.mark.parametrize("case", LABEL_SOURCES)
def test_labels_come_from_wherever_they_are(case: str):
    train, labels = LABEL_SOURCES[case]
    data = FederatedDataset(train, labels=labels, num_clients=5, partition=Dirichlet(0.5), test_fraction=0.2, seed=0)
    twin = FederatedDataset(tensors(0, 100), num_clients=5, partition=Dirichlet(0.5), test_fraction=0.2, seed=0)
    for each in (data, twin):
        each.setup()
    assert data.num_classes == 3
    assert data.client_sizes == twin.client_sizes
    for client in range(5):
        assert data.client_label_counts(client).tolist() == twin.client_label_counts(client).tolist()


def test_targets_of_a_regression_are_no_labels():
    assert find_labels(TensorDataset(INPUTS, torch.randn(150))) is None
    assert find_labels(TensorDataset(INPUTS, torch.zeros(150, 4))) is None
    assert find_labels(TensorDataset(INPUTS, LABELS, LABELS)) is None
    assert find_labels(Records(range(9), "x")) is None
    data = FederatedDataset(TensorDataset(INPUTS, torch.randn(150)), num_clients=5, test_fraction=0.2)
    data.setup()
    assert data.client_sizes == [24] * 5
    with pytest.raises(InvalidOption, match=r"`data.labels` is not set, but label counts need it"):
        data.client_label_counts(0)


def test_whole_numbers_in_floats_are_labels_only_of_a_partition_that_needs_some():
    data = TensorDataset(torch.randn(200, 2), torch.arange(200.0) % 4)
    plain = FederatedDataset(data, data, num_clients=4, partition=IID(), test_per_client=10)
    plain.setup()
    assert [len(plain.client_test_dataloader(client).dataset) for client in range(4)] == [10] * 4
    assert not hasattr(plain, "num_classes")
    by_label = FederatedDataset(data, data, num_clients=4, partition=Dirichlet(0.5), test_per_client=10)
    by_label.setup()
    assert int(by_label.client_label_counts(0).sum()) == by_label.num_examples(0)


@pytest.mark.parametrize("partition", [IID(), Dirichlet(0.4, min_examples=5), QuantitySkew(0.7, min_examples=5)])
@pytest.mark.parametrize("val_fraction", [0.0, 0.3])
def test_every_example_is_in_one_set_of_one_client(partition, val_fraction: float):
    train = Records(range(120))
    data = FederatedDataset(
        train, num_clients=8, partition=partition, test_fraction=0.2, val_fraction=val_fraction, seed=1
    )
    data.setup()
    train_loaders = [data.client_train_dataloader(client) for client in range(8)]
    held_out = [data.client_test_dataloader(client) for client in range(8)]
    held_out += [data.client_val_dataloader(client) for client in range(8)] if val_fraction else []
    assert all(len(loader.dataset) for loader in held_out)
    assert sorted(chain(*map(numbers, train_loaders + held_out))) == list(range(120))
    assert [len(loader.dataset) for loader in train_loaders] == data.client_sizes
    assert numbers(data.train_dataloader()) == sorted(chain(*map(numbers, train_loaders)))
    assert numbers(data.test_dataloader()) == sorted(chain(*map(numbers, held_out[:8])))


def test_is_split_as_tensors_in_a_data_module_of_ones_own():
    class Own(FederatedDataModule):
        num_classes, sample_shape, num_train = 3, (1, 1, 6), 100

        def load(self):
            return INPUTS[:100], LABELS[:100], INPUTS[100:], LABELS[100:]

    options = {"num_clients": 6, "partition": Dirichlet(0.5), "val_fraction": 0.2, "test_per_client": 9, "seed": 3}
    own = Own(**options)
    for data in (
        FederatedDataset(tensors(0, 100), tensors(100, 150), **options),
        FederatedDataset(Pairs(0, 100), Pairs(100, 150), labels=lambda item: item[1], **options),
    ):
        for client in range(6):
            for split in ("val", "test"):
                ours, theirs = (getattr(each, f"client_{split}_dataloader")(client) for each in (data, own))
                for batch, twin in zip(ours, theirs, strict=True):
                    assert all(a.equal(b) for a, b in zip(batch, twin, strict=True))
            assert data.client_label_counts(client).equal(own.client_label_counts(client))


@pytest.mark.parametrize("shape", [(100,), (100, 2)])
def test_tensors_are_read_in_whole_batches_whatever_the_labels_are(shape):
    """Targets of a regression are not labels, which their bins may be."""
    inputs, targets = torch.randn(100, 8), torch.randn(shape)
    bins = (targets.reshape(100, -1)[:, 0] > 0).long()
    options = {"labels": bins, "partition": Pathological(1), "num_clients": 4, "test_fraction": 0.2}
    whole = FederatedDataset(TensorDataset(inputs, targets), **options)
    items = FederatedDataset(TensorDataset(inputs, targets), collate_fn=default_collate, **options)
    for client in range(4):
        assert Examples.are_read_by(whole.client_train_dataloader(client))
        assert not Examples.are_read_by(items.client_train_dataloader(client))
        assert whole.client_label_counts(client).equal(items.client_label_counts(client))
        assert int((whole.client_label_counts(client) > 0).sum()) == 1
        for ours, theirs in zip(
            whole.client_test_dataloader(client), items.client_test_dataloader(client), strict=True
        ):
            assert all(one.equal(other) for one, other in zip(ours, theirs, strict=True))


def test_groups_are_clients_and_test_on_their_own():
    data = FederatedDataset(Records(range(100)), Records(range(100, 150)), partition=ByGroup("site"), test_per_client=8)
    assert data.num_clients == 3
    for client, site in enumerate(["east", "north", "south"]):
        train, test = data.client_train_dataloader(client), data.client_test_dataloader(client)
        assert numbers(train) == [number for number in range(100) if SITES[number] == site]
        assert {SITES[number] for number in numbers(test)} == {site}
        assert len(numbers(test)) == 8
        assert min(numbers(test)) >= 100


@pytest.mark.parametrize("by", [SITES[:100], np.array(SITES[:100]), lambda item: item["site"]])
def test_groups_come_from_wherever_they_are(by):
    data = FederatedDataset(Records(range(100)), partition=ByGroup(by), test_fraction=0.1)
    data.setup()
    assert sorted(size + round(size / 9) for size in data.client_sizes) == sorted(Counter(SITES[:100]).values())


def test_values_of_groups_leave_the_test_set_to_the_labels():
    data = FederatedDataset(tensors(0, 100), tensors(100, 150), partition=ByGroup(SITES[:100]), test_per_client=10)
    counts = data.client_label_counts(0)
    labels = torch.cat([labels for _, labels in data.client_test_dataloader(0)])
    assert labels.bincount(minlength=3).tolist() == [-(-int(c) * 10 // int(counts.sum())) for c in counts]


def test_which_split_is_evaluated():
    assert FederatedDataset(tensors(0, 100), tensors(100, 150)).eval_split == "test"
    assert FederatedDataset(tensors(0, 100), tensors(100, 150), num_clients=9, val_fraction=0.2).eval_split == "val"
    data = FederatedDataset(tensors(0, 100), num_clients=9, val_fraction=0.2)
    assert data.eval_split == "val"
    assert data.client_test_dataloader(0) is None
    assert data.test_dataloader() is None


def test_texts_of_several_lengths_are_collated():
    class Texts(Dataset):
        targets = [0, 1] * 20

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.full((index % 5 + 1,), index), self.targets[index]

    def pad(items):
        return torch.nn.utils.rnn.pad_sequence([text for text, _ in items], batch_first=True), len(items)

    data = FederatedDataset(Texts(), num_clients=4, partition=Dirichlet(1.0), collate_fn=pad, test_fraction=0.25)
    rows = [text for client in range(4) for texts, _ in data.client_train_dataloader(client) for text in texts]
    assert len(rows) == sum(data.client_sizes)
    assert all(set(row.tolist()) <= {0, int(row.max())} for row in rows)


def test_batches_are_read_at_once_where_the_data_set_can():
    class Batched(Pairs):
        calls = 0

        def __getitems__(self, indices: list[int]):
            self.calls += 1
            return [self[index] for index in indices]

    train = Batched(0, 100)
    data = FederatedDataset(train, num_clients=2, test_fraction=0.1, batch_size=45)
    assert [len(labels) for _, labels in data.client_train_dataloader(0)] == [45]
    assert train.calls == 1


def test_tensors_are_read_in_whole_batches():
    whole = FederatedDataset(tensors(0, 100), tensors(100, 150), num_clients=5, sample_shape=(1, 1, 6))
    assert Examples.are_read_by(whole.client_train_dataloader(0))
    assert FederatedDataset(tensors(0, 100), tensors(100, 150), num_clients=5).sample_shape == (1, 1, 6)
    assert not hasattr(FederatedDataset(Pairs(0, 100), num_clients=5, test_fraction=0.1), "sample_shape")
    other = FederatedDataset(tensors(0, 100), num_clients=5, test_fraction=0.1, collate_fn=default_collate)
    assert not Examples.are_read_by(other.client_train_dataloader(0))


def test_items_are_shifted_for_their_client():
    options = {"num_clients": 4, "test_fraction": 0.2, "feature_shift": BrightnessShift(1.0, 2.0), "seed": 0}
    data = FederatedDataset(Pairs(0, 100), **options)
    twin = FederatedDataset(tensors(0, 100), **options)
    for client in range(4):
        ours = torch.cat([inputs for inputs, _ in data.client_test_dataloader(client)])
        assert ours.equal(torch.cat([inputs for inputs, _ in twin.client_test_dataloader(client)]))
    assert len(torch.cat([inputs for inputs, _ in data.test_dataloader()])) == 20
    noisy = FederatedDataset(Pairs(0, 100), **{**options, "feature_shift": NoiseShift(1.0)})
    first, again = (
        sorted(x for inputs, _ in noisy.client_train_dataloader(3) for x in inputs.flatten().tolist()) for _ in range(2)
    )
    assert first == again
    turned = FederatedDataset(Records(range(100)), **{**options, "feature_shift": RotationShift()})
    with pytest.raises(InvalidOption, match=r"an item is a dict; expected a tuple that starts with a tensor"):
        next(iter(turned.client_train_dataloader(0)))


def test_items_and_tensors_train_alike(tmp_path):
    options = {"num_clients": 6, "partition": Dirichlet(0.5, min_examples=3), "batch_size": 8, "seed": 0}
    alone = {"federation": {"local_engine": "fast"}}  # items cannot be stacked
    whole = run(FederatedDataset(tensors(0, 100), tensors(100, 150), **options), tmp_path / "tensors", **alone)
    single = FederatedDataset(Pairs(0, 100), Pairs(100, 150), labels=lambda item: item[1], **options)
    columns = FederatedDataset(Records(range(100)), Records(range(100, 150)), collate_fn=as_pair, **options)
    for data in (single, columns):
        other = run(data, tmp_path / "items", **alone)
        assert weights(other) == weights(whole)
        assert {k: v for k, v in other.summary.items() if "test" in k} == {
            k: v for k, v in whole.summary.items() if "test" in k
        }


@pytest.mark.slow
def test_ranks_resume_and_stacks(tmp_path):
    """The same bytes on two ranks and after an interruption; the same scores as a stack."""

    def data() -> FederatedDataset:
        return FederatedDataset(
            tensors(0, 120), partition=ByGroup(torch.arange(120) % 5), test_fraction=0.2, feature_shift=NoiseShift(0.2)
        )

    alone = run(data(), tmp_path / "alone", rounds=3)
    ranks = run(data(), tmp_path / "ranks", rounds=3, devices=2, strategy="client_parallel_fork")
    assert weights(ranks) == weights(alone)
    half = run(data(), tmp_path / "half", rounds=2)
    resumed = run(data(), tmp_path / "half", rounds=3, ckpt_path=str(half.run_folder))
    assert weights(resumed) == weights(alone)
    stacked = run(data(), tmp_path / "stacked", rounds=3, federation={"local_engine": "stacked"})
    assert stacked.summary["global/test_acc"] == pytest.approx(alone.summary["global/test_acc"], abs=0.05)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Unsized(Dataset):
    def __getitem__(self, index):
        return index


REFUSED = {
    "labels of another length": (
        lambda: FederatedDataset(Pairs(0, 100), labels=LABELS[:99], test_fraction=0.1),
        r"`data.labels` has 99 values; expected one for each of the 100 examples\.",
    ),
    "labels of another shape": (
        lambda: FederatedDataset(Pairs(0, 100), labels=torch.zeros(100, 3), test_fraction=0.1),
        r"`data.labels` has values of shape \(100, 3\); expected one for each of the 100",
    ),
    "ragged labels": (
        lambda: FederatedDataset(Pairs(0, 2), labels=[[1], [1, 2]], test_fraction=0.1),
        r"`data.labels` has values of several lengths; expected a number or a name each",
    ),
    "fractions": (
        lambda: FederatedDataset(Pairs(0, 2), labels=[0.5, 1.0], test_fraction=0.1),
        r"`data.labels` has the value .*0\.5.*; expected classes: whole numbers, or names",
    ),
    "missing labels": (
        lambda: FederatedDataset(Pairs(0, 2), labels=["a", None], test_fraction=0.1),
        r"`data.labels` has values that are missing or of several kinds; expected one per example",
    ),
    "an unknown column": (
        lambda: FederatedDataset(Records(range(9)), labels="klass", test_fraction=0.1),
        r"`data.labels` is 'klass', but Records has no such column; expected one of x, label, site, number\.",
    ),
    "an unknown group": (
        lambda: FederatedDataset(Records(range(9)), partition=ByGroup("ward"), test_fraction=0.1),
        r"`data.partition.by` is 'ward', but Records has no such column; expected one of x, label, site, number\.",
    ),
    "a column of pairs": (
        lambda: FederatedDataset(Pairs(0, 9), partition=ByGroup("ward"), test_fraction=0.1),
        r"`data.partition.by` is 'ward', but Pairs has no such column; expected an attribute with one value",
    ),
    "no labels": (
        lambda: FederatedDataset(Pairs(0, 100), partition=Dirichlet(0.3), test_fraction=0.1),
        r"`data.labels` is not set, but `data.partition` is Dirichlet\(alpha=0.3, .*; expected the name of a column",
    ),
    "no labels of the test set": (
        lambda: FederatedDataset(Pairs(0, 100), Pairs(100, 150), labels=LABELS[:100], partition=Dirichlet(0.3)),
        r"`data.test_labels` is not set, but the test examples .*; expected one value per test example, or",
    ),
    "more clients than examples": (
        lambda: FederatedDataset(Pairs(0, 100), num_clients=101, test_fraction=0.1),
        r"`data.num_clients` is 101; expected a number from 1 to 100, the number of training examples\.",
    ),
    "a stream": (
        lambda: FederatedDataset(Endless(), test_fraction=0.1),
        r"`data.train` is a Endless, which is empty or has no length; expected a data set with `__len__`",
    ),
    "a dict of data sets": (
        lambda: FederatedDataset({"train": Pairs(0, 100)}, test_fraction=0.1),
        r"`data.train` is a dict, whose item 0 cannot be read \(KeyError: 0\); expected a data set whose items are",
    ),
    "names with a gap": (
        lambda: FederatedDataset(Pairs(0, 2), partition=ByGroup(["a", float("nan")]), test_fraction=0.1),
        r"`data.partition.by` has values that are missing or of several kinds; expected one per example",
    ),
    "no training data": (
        lambda: FederatedDataset(None, test_fraction=0.1),
        r"`data.train` is None; expected a data set with `__len__`",
    ),
    "no length": (
        lambda: FederatedDataset(Pairs(0, 100), Unsized()),
        r"`data.test` is a Unsized, which is empty or has no length",
    ),
    "no data to score with": (
        lambda: FederatedDataset(Pairs(0, 100)),
        r"`data.test` is not set, and no data is held out .*; expected test data, or `data.test_fraction` or",
    ),
    "two test sets": (
        lambda: FederatedDataset(tensors(0, 100), tensors(100, 150), test_fraction=0.1),
        r"`data.test_fraction` is 0.1; expected 0, since `data.test` is set",
    ),
    "a fraction of one": (
        lambda: FederatedDataset(tensors(0, 100), test_fraction=1.0),
        r"`data.test_fraction` is 1.0; expected a number in \[0, 1\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_does_not_fit(case: str):
    make, message = REFUSED[case]
    with pytest.raises(InvalidOption, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_an_error_of_a_function_is_shown_as_it_is():
    with pytest.raises(ValueError, match="invalid literal for int"):
        FederatedDataset(Pairs(0, 9), labels=lambda item: int("one"), test_fraction=0.1)


@pytest.mark.parametrize(
    ("options", "names", "said"),
    [
        (
            {"min_examples": 2},
            ["a", "b"],
            "2 of 4 groups, with 2 of 7 examples, are left out, since `data.parti",
        ),
        ({"min_examples": 2, "small_groups": "merge"}, ["a", "b", "2 small groups"], ""),
        ({"num_clients": 3}, ["a", "b", "d"], "1 of 4 groups, with 1 of 7 examples, are left out, since `data.num_cl"),
        (
            {"min_examples": 2, "num_clients": 1},
            ["a"],
            "since `data.partition.min_examples` is 2 and `data.num",
        ),
    ],
)
def test_clients_have_the_names_of_their_groups(options, names, said, caplog):
    number = options.pop("num_clients", None)
    data = FederatedDataset(
        TensorDataset(torch.zeros(7, 2), torch.zeros(7, dtype=torch.int64)),
        TensorDataset(torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)),
        partition=ByGroup(np.array(list("bbacbad")), **options),
        num_clients=number,
    )
    assert data.client_names is None
    data.setup()
    assert data.client_names == names
    assert said in caplog.text
    assert bool(said) == ("left out" in caplog.text)


def test_refuses_what_shows_in_the_split():
    data = FederatedDataset(Records(range(3)), Records(range(2)), partition=ByGroup("site"))
    words = "`data.test` has no example of 1 of the 3 groups that are clients, `south`; raise `data.partition.min_exam"
    with pytest.raises(InvalidOption, match=words):
        data.setup()
    data = FederatedDataset(Records(range(100)), partition=ByGroup("site"), num_clients=4, test_fraction=0.1)
    with pytest.raises(InvalidOption, match=r"`data.num_clients` is 4; expected a number from 1 to 3, the number of"):
        data.setup()
    data = FederatedDataset(Records(range(100)), num_clients=100, test_fraction=0.1)
    words = r"`data.test_fraction` is 0.1, which needs at least 2 examples per client, but client 0 has 1; change"
    with pytest.raises(InvalidOption, match=words):
        data.setup()
    groups, both = [0] * 10 + [1] * 2, {"val_fraction": 0.2, "test_fraction": 0.2}
    data = FederatedDataset(Records(range(12)), partition=ByGroup(groups, min_examples=2), **both)
    words = (
        "per client beside those of `data.test_fraction`, but client 1 has 1; set `data.partition.min_examples` to "
        "more than 2, or set `data.val_fraction` to 0."
    )
    with pytest.raises(InvalidOption, match=words):
        data.setup()
    FederatedDataset(Records(range(12)), partition=ByGroup(groups, min_examples=3), **both).setup()
