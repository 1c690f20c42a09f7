"""Partitions as promises: disjoint, covering, repeatable, and of the shape that each one states."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_sparsefl.data import IID, Dirichlet, Partition, Pathological, QuantitySkew, matching_test
from lightning_sparsefl.data.partition import _draw_counts
from lightning_sparsefl.errors import InvalidOption

PARTITIONS = [
    IID(),
    Dirichlet(alpha=0.3),
    Dirichlet(0.1, min_examples=5),
    Pathological(classes_per_client=3),
    QuantitySkew(0.5),
    QuantitySkew(1.2, law="power", min_examples=3),
]


@pytest.fixture
def labels() -> Tensor:
    """1,000 labels of 10 classes, unequally frequent and shuffled."""
    sizes = torch.tensor([60, 80, 100, 120, 140, 140, 120, 100, 80, 60])
    ordered = torch.arange(10).repeat_interleave(sizes)
    return ordered[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]


def counts(labels: Tensor, owned: list[Tensor]) -> Tensor:
    return torch.stack([labels[indices].bincount(minlength=10) for indices in owned])


@pytest.mark.parametrize("partition", PARTITIONS, ids=repr)
def test_every_example_has_one_owner(partition, labels):
    owned = partition.split(labels, num_clients=20, seed=1)
    assert len(owned) == 20
    assert torch.cat(owned).sort().values.tolist() == list(range(1000))
    assert all(len(indices) and bool((indices.diff() > 0).all()) for indices in owned)


@pytest.mark.parametrize("partition", PARTITIONS, ids=repr)
def test_depends_on_the_seed_alone(partition, labels):
    torch.manual_seed(1)
    first = partition.split(labels, num_clients=20, seed=1)
    torch.manual_seed(2)
    again = partition.split(labels, num_clients=20, seed=1)
    other = partition.split(labels, num_clients=20, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_one_client_owns_everything(labels):
    for partition in [IID(), Dirichlet(alpha=0.5), Pathological(classes_per_client=10)]:
        (owned,) = partition.split(labels, num_clients=1, seed=0)
        assert len(owned) == 1000


@pytest.mark.parametrize(("num_clients", "sizes"), [(4, {250: 4}), (3, {334: 1, 333: 2}), (1000, {1: 1000})])
def test_iid_sizes_differ_by_one_at_most(labels, num_clients, sizes):
    assert Counter(len(indices) for indices in IID().split(labels, num_clients, seed=0)) == sizes


def test_iid_is_not_the_files_order():
    owned = IID().split(torch.arange(10).repeat_interleave(100), num_clients=2, seed=0)
    assert all(35 <= int(count) <= 65 for count in counts(torch.arange(10).repeat_interleave(100), owned)[0])


def skew(labels: Tensor, alpha: float) -> float:
    """Mean over clients of the largest label share."""
    shares = counts(labels, Dirichlet(alpha=alpha).split(labels, num_clients=10, seed=3)).double()
    return float((shares.max(1).values / shares.sum(1)).mean())


def test_dirichlet_alpha_says_how_skewed(labels):
    skews = [skew(labels, alpha) for alpha in (0.05, 0.5, 5.0, 500.0)]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.5
    assert skews[-1] < 0.2


def test_dirichlet_shares_have_the_moments_of_the_distribution():
    """One class, so the cap never binds: shares of 4 clients have mean 1/4 and variance 3/16/(4 alpha + 1)."""
    alpha, one_class = 0.7, torch.zeros(10_000, dtype=torch.int64)
    drawn = [Dirichlet(alpha=alpha).split(one_class, num_clients=4, seed=seed) for seed in range(600)]
    shares = torch.tensor([[len(indices) / 10_000 for indices in owned] for owned in drawn]).double()
    assert shares.mean(0).tolist() == pytest.approx([0.25] * 4, abs=0.03)
    assert float(shares.var(0).mean()) == pytest.approx(3 / 16 / (4 * alpha + 1), rel=0.1)


def test_dirichlet_gives_no_more_to_a_client_above_the_equal_share(labels):
    """So nobody owns more than an equal share and the class that took it there."""
    owned = Dirichlet(alpha=0.1).split(labels, num_clients=20, seed=1)
    assert max(len(indices) for indices in owned) < 50 + 140


def test_dirichlet_gives_nothing_of_a_class_to_a_client_with_an_equal_share():
    """Two clients share four examples, so that one often has exactly two before the last class."""
    exact = 0
    for seed in range(50):
        counts = _draw_counts([2, 1, 1], 2, alpha=0.5, rng=torch.Generator().manual_seed(seed))
        before = counts.cumsum(0)[:-1]
        assert not counts[1:][before >= 2].any()
        exact += int((before == 2).sum())
    assert exact > 20


@pytest.mark.parametrize("min_examples", [1, 10, 20])
def test_dirichlet_draws_until_everyone_owns_enough(labels, min_examples):
    owned = Dirichlet(alpha=0.2, min_examples=min_examples).split(labels, num_clients=20, seed=0)
    assert min(len(indices) for indices in owned) >= min_examples


@pytest.mark.parametrize("min_examples", [50, 51])
def test_dirichlet_gives_up_with_a_sentence(labels, min_examples):
    partition = Dirichlet(alpha=0.05, min_examples=min_examples)
    with pytest.raises(InvalidOption, match=rf"alpha=0.05, min_examples={min_examples}.* over 20 clients"):
        partition.split(labels, num_clients=20, seed=0)


@pytest.mark.parametrize("classes_per_client", [1, 2, 3, 7, 10])
def test_pathological_clients_own_exactly_that_many_classes(labels, classes_per_client):
    partition = Pathological(classes_per_client=classes_per_client)
    table = counts(labels, partition.split(labels, num_clients=20, seed=0))
    assert ((table > 0).sum(1) == classes_per_client).all()
    owners = (table > 0).sum(0)
    assert owners.max() - owners.min() <= 1
    for label in range(10):
        parts = table[:, label][table[:, label] > 0]
        assert parts.max() - parts.min() <= 1


def test_pathological_sizes_are_equal_for_equal_classes():
    balanced = torch.arange(1000) % 10
    owned = Pathological(classes_per_client=2).split(balanced, num_clients=20, seed=0)
    assert {len(indices) for indices in owned} == {50}


def test_pathological_leaves_out_classes_that_nobody_is_dealt(labels):
    owned = Pathological(classes_per_client=2).split(labels, num_clients=3, seed=0)
    assert int((counts(labels, owned).sum(0) > 0).sum()) == 6


def test_pathological_counts_the_classes_that_occur():
    two = torch.tensor([3, 9] * 10)
    assert [len(i) for i in Pathological(classes_per_client=2).split(two, num_clients=2, seed=0)] == [10, 10]
    with pytest.raises(
        InvalidOption, match=r"`data.partition.classes_per_client` is 3; expected at most 2, the number of classes"
    ):
        Pathological(classes_per_client=3).split(two, num_clients=2, seed=0)


def test_pathological_refuses_more_owners_than_examples():
    with pytest.raises(InvalidOption, match="assigns class 1 to 6 clients, but it has 2 examples; lower"):
        Pathological(classes_per_client=1).split(torch.tensor([0] * 10 + [1] * 2), num_clients=12, seed=0)


@pytest.mark.parametrize("num_clients", [0, -1, 1001])
@pytest.mark.parametrize("partition", PARTITIONS, ids=repr)
def test_refuses_impossible_numbers_of_clients(partition, labels, num_clients):
    with pytest.raises(InvalidOption, match=f"`data.num_clients` is {num_clients}; expected a number from 1 to 1000"):
        partition.split(labels, num_clients, seed=0)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: Dirichlet(alpha=0.0), "alpha"),
        (lambda: Dirichlet(alpha=float("nan")), "alpha"),
        (lambda: Dirichlet(alpha=float("inf")), "alpha"),
        (lambda: Dirichlet(alpha=1.0, min_examples=0), "min_examples"),
        (lambda: Pathological(classes_per_client=0), "classes_per_client"),
    ],
)
def test_refuses_options_out_of_range(make, option):
    with pytest.raises(InvalidOption, match=rf"`data\.partition\.{option}` is .*; expected a"):
        make()


def test_a_partition_of_ones_own_may_leave_nobody_empty():
    @dataclass(frozen=True, kw_only=True)
    class Greedy(Partition):
        def assign(self, labels: Tensor, num_clients: int, rng: torch.Generator) -> list[Tensor]:
            return [torch.arange(len(labels)), *[torch.arange(0)] * (num_clients - 1)]

    with pytest.raises(InvalidOption, match=r"leaves 2 of 3 clients without examples, .* client 1; lower"):
        Greedy().split(torch.zeros(9, dtype=torch.int64), num_clients=3, seed=0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (None, "returned a NoneType; expected a list of 2 tensors"),
        ([torch.arange(4)], "returned 1 parts; expected a list of 2 tensors"),
        ([[0, 1], [2, 3]], "a list for client 0; expected indices, int64"),
        ([torch.arange(2), torch.arange(2.0)], r"a torch.float32 tensor of shape \(2,\) for client 1"),
        ([torch.tensor([True, False] * 2)] * 2, r"a torch.bool tensor of shape \(4,\) for client 0"),
        ([torch.arange(2), torch.tensor([2, 4])], "the index 4; expected 0 to 3"),
        ([torch.arange(2), torch.tensor([-1])], "the index -1; expected 0 to 3"),
        ([torch.arange(3), torch.arange(2, 4)], "the example 2 more than once"),
        ([torch.tensor([0, 0]), torch.tensor([1])], "the example 0 more than once"),
    ],
)
def test_a_partition_of_ones_own_must_be_one(parts, message):
    class Mine(Partition):
        def assign(self, labels, num_clients, rng):
            return parts

    with pytest.raises(InvalidOption, match=f"`Mine.assign` returned {message.removeprefix('returned ')}"):
        Mine().split(torch.zeros(4, dtype=torch.int64), num_clients=2, seed=0)


def test_matching_test_rounds_each_label_up():
    pool = torch.arange(1000) % 10
    rng = torch.Generator().manual_seed(0)
    chosen = matching_test(torch.tensor([1] * 1 + [4] * 2), pool, 100, rng)
    assert pool[chosen].bincount(minlength=10).tolist() == [0, 34, 0, 0, 67, 0, 0, 0, 0, 0]
    assert len(set(chosen.tolist())) == 101


def test_matching_test_takes_what_there_is():
    pool = torch.tensor([0] * 50 + [1] * 3)
    chosen = matching_test(torch.tensor([0, 1]), pool, 20, torch.Generator().manual_seed(0))
    assert pool[chosen].bincount().tolist() == [10, 3]


def test_matching_test_exact_shares_are_not_rounded_up():
    """0.07 * 100 is 7.000000000000001 in floating point."""
    train = torch.tensor([0] * 7 + [1] * 93)
    chosen = matching_test(train, torch.arange(400) % 2, 100, torch.Generator().manual_seed(0))
    assert (torch.arange(400) % 2)[chosen].bincount().tolist() == [7, 93]


def test_a_tiny_alpha_gives_each_class_to_one_client_and_does_not_underflow():
    labels = torch.arange(5000) % 5
    counts = _draw_counts([1000] * 5, 8, alpha=1e-4, rng=torch.Generator().manual_seed(0))
    assert counts.sum() == len(labels)
    assert ((counts > 0).sum(1) == 1).all()


def test_a_client_may_have_exactly_the_smallest_number_of_examples():
    for least in (1, 3):
        parts = Dirichlet(1e9, min_examples=least).split(torch.zeros(2 * least, dtype=torch.long), 2, seed=0)
        assert [len(part) for part in parts] == [least, least]
