"""The contract between a federated data module and the engine, and its use in a plain Trainer."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_sparsefl.data import (
    IID,
    Dirichlet,
    FederatedBlobs,
    FederatedDataModule,
    FederatedDigits,
    Partition,
    Pathological,
)
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import MLP


class Numbered(FederatedDataModule):
    """Every input is its own number: 100 to train with, then 50 to test with; labels 0 to 4 in turn."""

    num_classes, sample_shape, num_train = 5, (1, 1, 1), 100
    loads = 0

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self.loads += 1
        numbers = torch.arange(150)
        inputs, labels = numbers.float()[:, None, None, None], numbers % 5
        return inputs[:100], labels[:100], inputs[100:], labels[100:]


def drawn(loader) -> list[int]:
    """Numbers in the order of the loader."""
    return [int(number) for inputs, _ in loader for number in inputs.flatten()]


def ready(**options) -> Numbered:
    data = Numbered(**{"num_clients": 10, "seed": 0, **options})
    data.setup()
    return data


def test_facts_are_known_before_the_data_is_there():
    class Absent(Numbered):
        def load(self):
            raise AssertionError("the disk was read")

    data = Absent(num_clients=30, val_fraction=0.25)
    assert (data.num_clients, data.num_classes, data.sample_shape) == (30, 5, (1, 1, 1))
    assert (data.batch_size, data.eval_split) == (32, "val")
    assert data.client_sizes == [3] * 10 + [2] * 20
    assert data.num_examples(0) == 3


@pytest.mark.parametrize("val_fraction", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("partition", [IID(), Dirichlet(alpha=0.5, min_examples=2), Pathological(classes_per_client=2)])
def test_clients_share_the_training_data_without_overlap(partition: Partition, val_fraction: float):
    data = ready(partition=partition, val_fraction=val_fraction)
    train = [drawn(data.client_train_dataloader(k)) for k in range(10)]
    val = [drawn(data.client_val_dataloader(k)) for k in range(10)] if val_fraction else []
    assert sorted(chain(*train, *val)) == list(range(100))
    assert [len(numbers) for numbers in train] == data.client_sizes == [data.num_examples(k) for k in range(10)]
    for k in range(10):
        assert (
            data.client_label_counts(k).tolist() == torch.tensor(train[k]).remainder(5).bincount(minlength=5).tolist()
        )
    if val_fraction:
        assert sorted(drawn(data.val_dataloader())) == sorted(chain(*val))
    assert sorted(drawn(data.train_dataloader())) == sorted(chain(*train))


def test_nominal_sizes_are_the_actual_ones_of_an_equal_split():
    nominal = Numbered(num_clients=7, val_fraction=0.3).client_sizes
    assert sorted(ready(num_clients=7, val_fraction=0.3).client_sizes) == sorted(nominal)


def test_clients_may_own_a_part_of_what_they_are_dealt():
    data = ready(partition=Pathological(classes_per_client=2), examples_per_client=6, val_fraction=0.5)
    whole = ready(partition=Pathological(classes_per_client=2))
    for client in range(10):
        own = drawn(data.client_train_dataloader(client)) + drawn(data.client_val_dataloader(client))
        assert len(own) == len(set(own)) == 6
        assert set(own) < set(drawn(whole.client_train_dataloader(client)))
    assert (
        data.client_sizes == Numbered(num_clients=10, examples_per_client=6, val_fraction=0.5).client_sizes == [3] * 10
    )
    with pytest.raises(InvalidOption, match=r"`data.examples_per_client` is .* gives client 0 only 10"):
        ready(examples_per_client=11)


def test_validation_is_drawn_and_has_the_share_asked_for():
    data = ready(num_clients=2, val_fraction=0.1)
    assert [len(drawn(data.client_val_dataloader(k))) for k in (0, 1)] == [5, 5]
    owned = [sorted(drawn(data.client_val_dataloader(k)) + drawn(data.client_train_dataloader(k))) for k in (0, 1)]
    assert sorted(drawn(data.client_val_dataloader(0))) not in (owned[0][:5], owned[0][-5:])


def test_a_small_client_validates_on_one_example():
    data = ready(num_clients=50, val_fraction=0.01)
    assert data.client_sizes == [1] * 50
    assert [len(drawn(data.client_val_dataloader(k))) for k in range(50)] == [1] * 50


def test_without_a_fraction_there_is_no_validation():
    data = ready()
    assert data.client_val_dataloader(0) is None
    assert data.val_dataloader() is None


def test_test_sets_have_the_label_shares_of_the_training_data():
    data = ready(partition=Dirichlet(alpha=0.5, min_examples=2), val_fraction=0.2, test_per_client=8)
    for k in range(10):
        counts = data.client_label_counts(k)
        wanted = [-(-int(c) * 8 // int(counts.sum())) for c in counts]
        numbers = drawn(data.client_test_dataloader(k))
        assert torch.tensor(numbers).remainder(5).bincount(minlength=5).tolist() == wanted
        assert len(set(numbers)) == len(numbers)
        assert min(numbers) >= 100
    assert drawn(data.test_dataloader()) == list(range(100, 150))


def test_setup_happens_once_and_by_itself():
    data = Numbered(num_clients=10)
    drawn(data.client_train_dataloader(0))
    data.setup("fit")
    data.setup("test")
    assert data.loads == 1


def test_everything_depends_on_the_seed(monkeypatch: pytest.MonkeyPatch):
    def picture(data: Numbered) -> list[list[int]]:
        loaders = [data.client_train_dataloader(3), data.client_val_dataloader(3), data.client_test_dataloader(3)]
        return [sorted(drawn(loader)) for loader in loaders]

    options = {"num_clients": 10, "val_fraction": 0.3, "test_per_client": 5}
    torch.manual_seed(0)
    seven = picture(Numbered(seed=7, **options))
    torch.manual_seed(1)
    assert picture(Numbered(seed=7, **options)) == seven
    assert picture(Numbered(seed=8, **options)) != seven

    assert picture(Numbered(**options)) == picture(Numbered(seed=0, **options))
    early = Numbered(**options)
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert picture(early) == picture(Numbered(**options)) == seven


def test_training_order_comes_from_the_global_generator():
    data = ready(num_clients=1)

    def order(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return drawn(data.client_train_dataloader(0))

    assert order(0) == order(0) != order(1)


def test_batches():
    data = ready(num_clients=4, batch_size=10, eval_batch_size=20, test_per_client=30)
    assert [len(labels) for _, labels in data.client_train_dataloader(0)] == [10, 10, 5]
    assert max(len(labels) for _, labels in data.client_test_dataloader(0)) == 20
    dropped = ready(num_clients=4, batch_size=10, drop_last=True)
    assert [len(labels) for _, labels in dropped.client_train_dataloader(0)] == [10, 10]


def test_inputs_are_used_as_stored_without_a_mean():
    assert {float(x) for inputs, _ in ready().client_train_dataloader(0) for x in inputs.flatten()} <= set(range(100))


def test_only_training_batches_are_augmented():
    class Pictures(Numbered):
        sample_shape = (1, 4, 4)
        mean, std, crop_padding = (0.0,), (1.0,), 1

        def load(self):
            images = torch.full((100, 1, 4, 4), 255, dtype=torch.uint8)
            return images, torch.arange(100) % 5, images, torch.arange(100) % 5

    data = Pictures(num_clients=1, val_fraction=0.1)
    assert min(float(inputs.min()) for inputs, _ in data.client_train_dataloader(0)) == 0
    assert all(inputs.eq(1).all() for inputs, _ in data.client_val_dataloader(0))
    assert all(inputs.eq(1).all() for inputs, _ in data.client_test_dataloader(0))


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"num_clients": 0}, "num_clients"),
        ({"num_clients": 101}, "num_clients"),
        ({"val_fraction": 1.0}, "val_fraction"),
        ({"val_fraction": -0.1}, "val_fraction"),
        ({"num_clients": 100, "val_fraction": 0.1}, "val_fraction"),
        ({"eval_split": "train"}, "eval_split"),
        ({"batch_size": 0}, "batch_size"),
        ({"eval_batch_size": 0}, "eval_batch_size"),
        ({"test_per_client": 0}, "test_per_client"),
    ],
)
def test_refuses_bad_options_at_the_door(options, option):
    with pytest.raises(InvalidOption, match=rf"`data\.{option}` is .*[;,] (expected|which needs) "):
        Numbered(**options)


def test_refuses_clients_that_cannot_hold_anything_out():
    data = Numbered(num_clients=2, val_fraction=0.5, partition=Lopsided(), seed=0)
    with pytest.raises(InvalidOption, match=r"`data.val_fraction` is 0.5, .* client 1 has 1;"):
        data.setup()


class Lopsided(Partition):
    def assign(self, labels, num_clients, rng):
        return [torch.arange(99), torch.tensor([99])]


def test_refuses_clients_without_anything_to_test_on():
    class Untested(Numbered):
        def load(self):
            inputs, labels, test_inputs, test_labels = super().load()
            return inputs, labels, test_inputs[test_labels == 0], test_labels[test_labels == 0]

    data = Untested(num_clients=5, partition=Pathological(classes_per_client=1))
    with pytest.raises(
        InvalidOption, match=r"contains no example of the classes of client .*; change `data.partition`"
    ):
        data.setup()


def test_a_subclass_must_load():
    class Nothing(FederatedDataModule):
        num_classes, sample_shape, num_train = 2, (1, 1, 1), 10

    with pytest.raises(NotImplementedError, match=r"`Nothing` must implement `load\(\)`"):
        Nothing(num_clients=2).setup()


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning",
    "ignore:.*does not have many workers",
    "ignore:Total length of `list` across ranks is zero",
)
@pytest.mark.parametrize("val_fraction", [0.0, 0.2])
def test_is_the_centralised_baseline_in_a_plain_trainer(val_fraction: float, tmp_path: Path):
    torch.manual_seed(0)
    data = FederatedBlobs(val_fraction=val_fraction, seed=0)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    model = MLP(data.num_classes, data.sample_shape)
    trainer.fit(model, data)
    assert ("val_acc" in trainer.callback_metrics) == (val_fraction > 0)
    (scores,) = trainer.test(model, data, verbose=False)
    assert scores["test_acc"] > 0.9


def test_digits_without_a_global_seed_repeat():
    first, second = FederatedDigits(), FederatedDigits()
    assert torch.equal(first.client_label_counts(5), second.client_label_counts(5))


INPUTS, ANSWERS = torch.zeros(100, 1, 1, 1), torch.zeros(100, dtype=torch.int64)


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        ((INPUTS, ANSWERS[:90], INPUTS, ANSWERS), "returned 100 training inputs with 90 labels"),
        ((INPUTS, ANSWERS, INPUTS[:50], ANSWERS), "returned 50 test inputs with 100 labels"),
        ((INPUTS, ANSWERS), "returned Tensor, Tensor; expected four tensors"),
        ((INPUTS.numpy(), ANSWERS, INPUTS, ANSWERS), "returned ndarray, Tensor, Tensor, Tensor; expected four tensors"),
        (None, "returned NoneType; expected four tensors"),
    ],
)
def test_what_is_loaded_is_checked(loaded, words, monkeypatch):
    monkeypatch.setattr(Numbered, "load", lambda self: loaded)
    with pytest.raises(InvalidOption, match=f"`Numbered.load` {words}"):
        Numbered(num_clients=10).setup()


def test_a_subclass_names_its_number_of_examples():
    class Unnumbered(FederatedDataModule):
        num_classes, sample_shape = 2, (1, 1, 1)

    with pytest.raises(InvalidOption, match="`Unnumbered` has no `num_train`; set it in the class"):
        Unnumbered()


@pytest.mark.parametrize("partition", [Dirichlet(alpha=1.0), Pathological(classes_per_client=2)])
def test_labels_may_be_any_numbers(partition, monkeypatch):
    before, load = ready(partition=partition), Numbered.load
    wide = [*load(before)]
    wide[1], wide[3] = ((labels - 2) * 10**12 for labels in (wide[1], wide[3]))
    monkeypatch.setattr(Numbered, "load", lambda self: tuple(wide))
    after = ready(partition=partition)
    for client in range(10):
        for kind in ("train", "test"):
            loaders = (getattr(data, f"client_{kind}_dataloader")(client).dataset for data in (before, after))
            assert len({tuple(examples.inputs.flatten().tolist()) for examples in loaders}) == 1


@pytest.mark.parametrize(
    ("owned", "words"),
    [
        ([torch.arange(10)] * 5, r"returned 5 parts; expected a list of 4 tensors"),
        (None, r"returned a NoneType; expected a list of 4 tensors"),
        ([[0, 1]] * 4, r"returned a list for client 0; expected indices, int64 of shape \(examples,\)"),
        (
            [torch.zeros(2, 2, dtype=torch.int64)] * 4,
            r"a torch.int64 tensor of shape \(2, 2\) for client 0; expected in",
        ),
        ([torch.tensor([100])] * 4, r"returned the index 100; expected 0 to 99, the examples"),
    ],
)
def test_what_assign_returns_is_checked(owned, words, monkeypatch):
    monkeypatch.setattr(Numbered, "assign", lambda *_: owned)
    with pytest.raises(
        InvalidOption, match=rf"^`Numbered\.assign` {'' if words.startswith('returned') else '.*'}{words}"
    ):
        Numbered(num_clients=4).setup()


def test_clients_may_share_examples(monkeypatch):
    monkeypatch.setattr(Numbered, "assign", lambda *_: [torch.arange(20)] * 4)
    data = Numbered(num_clients=4)
    data.setup()
    assert data.client_sizes == [20] * 4


def test_what_choose_test_returns_is_checked(monkeypatch):
    monkeypatch.setattr(Numbered, "choose_test", lambda *_: None)
    with pytest.raises(InvalidOption, match=r"`Numbered.choose_test` is None; expected an instance of `Tensor`"):
        Numbered(num_clients=4).setup()
