"""The toy set."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.data import FederatedBlobs, FederatedBlobsOnDemand
from lightning_sparsefl.errors import InvalidOption


def test_shapes_and_sizes_are_those_asked_for():
    data = FederatedBlobs(num_clients=3, num_classes=5, dim=7, num_train=50, num_test=20)
    assert (data.sample_shape, sum(data.client_sizes)) == ((1, 1, 7), 50)
    inputs, labels, test_inputs, test_labels = data.load()
    assert (inputs.shape, test_inputs.shape) == ((50, 1, 1, 7), (20, 1, 1, 7))
    assert labels.bincount().tolist() == [10] * 5
    assert test_labels.bincount().tolist() == [4] * 5


def test_noise_is_the_spread_within_a_class():
    inputs, labels, *_ = FederatedBlobs(num_train=4000, noise=0.3, seed=1).load()
    within = torch.stack([inputs[labels == label].std(0).mean() for label in range(4)])
    assert within.tolist() == pytest.approx([0.3] * 4, rel=0.05)


def test_the_seed_draws_the_examples():
    def first(seed: int) -> torch.Tensor:
        return FederatedBlobs(seed=seed).load()[0]

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))


@pytest.mark.parametrize("wrong", [{"num_classes": 0}, {"dim": 0}, {"num_test": 0}, {"num_train": 5}])
def test_refuses_empty_sets(wrong):
    with pytest.raises(InvalidOption, match=r"`data\.\w+` is (0|10); expected a "):
        FederatedBlobs(**wrong)


def on_demand(**options):
    return FederatedBlobsOnDemand(**{"num_clients": 10**9, "sample_shape": (1, 2, 3), "seed": 0, **options})


def whole(loader):
    return tuple(torch.cat(parts) for parts in zip(*loader, strict=True))


def test_a_client_is_made_from_the_seed_and_its_number_alone():
    for client in (0, 7, 999_999_999):
        first, again = (on_demand().client_test_dataloader(client) for _ in range(2))
        assert all(map(torch.equal, whole(first), whole(again)))
    inputs, labels = whole(on_demand().client_test_dataloader(7))
    assert inputs.shape == (20, 1, 2, 3)
    assert len(labels.unique()) == 2
    for other in (on_demand().client_val_dataloader(7), on_demand().client_test_dataloader(8)):
        assert not torch.equal(whole(other)[0], inputs)
    assert not torch.equal(whole(on_demand(seed=1).client_test_dataloader(7))[0], inputs)


def test_sizes_are_known_before_the_examples_and_spread():
    data = on_demand(num_clients=500, fewest=3, most=6)
    sizes = [data.num_examples(client) for client in range(500)]
    assert sizes == list(data.client_sizes)
    assert set(sizes) == {3, 4, 5, 6}
    for client in range(5):
        assert len(whole(data.client_train_dataloader(client))[1]) == sizes[client]
        assert int(data.client_label_counts(client).sum()) == sizes[client]


def test_nothing_grows_with_the_number_of_clients():
    for data in (on_demand(), on_demand(num_clients=10)):
        data.setup()
        assert not [v for v in vars(data).values() if isinstance(v, list | dict | torch.Tensor) and len(v) > 20]


def test_common_sets_have_all_classes_and_the_clients_centres():
    data = on_demand(num_clients=4, num_classes=3, noise=1e-3, classes_per_client=1, num_pooled=9)
    inputs, labels = whole(data.test_dataloader())
    assert labels.bincount().tolist() == [3, 3, 3]
    own, owned = whole(data.client_train_dataloader(0))
    assert torch.allclose(own[0], inputs[labels == owned[0]][0], atol=0.02)
    joined, _ = whole(data.train_dataloader())
    assert len(joined) == sum(data.client_sizes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_clients": 0},
        {"fewest": 0},
        {"num_pooled": 0},
        {"batch_size": 0},
    ],
)
def test_refuses_numbers_below_one(wrong):
    (name,) = wrong
    with pytest.raises(InvalidOption, match=f"`data.{name}` is 0; expected a whole number >= 1"):
        on_demand(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"most": 1}, "`data.most` is 1; expected at least `data.fewest`, which is "),
        ({"noise": float("nan")}, "`data.noise` is nan; expected a number >= 0"),
        ({"classes_per_client": 11}, "`data.classes_per_client` is 11; expected a number from 1 to 10"),
        (
            {"val_fraction": 0.1},
            "`data.val_fraction` is for a data set that is split, but this class generates",
        ),
    ],
)
def test_refuses_what_cannot_be_made(wrong, message):
    with pytest.raises(InvalidOption, match=message):
        on_demand(**wrong)


@pytest.mark.parametrize(("option", "value"), [("num_train", -5), ("num_test", 0), ("noise", -1.0)])
def test_numbers_out_of_range_are_refused_by_name(option, value):
    with pytest.raises(InvalidOption, match=f"`data.{option}` is {value}; expected"):
        FederatedBlobs(**{option: value})
