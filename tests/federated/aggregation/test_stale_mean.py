"""The mean of a round and of late updates, by hand."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, PlainMean
from lightning_sparsefl.federated.aggregation.stale_mean import StaleMean
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.types import Message, PendingUpdate, Update

SERVER = {"w": torch.tensor([1.0, 2.0, 3.0]), "running": torch.tensor([4.0])}
LAYOUT = Layout({"w": SERVER["w"]}, {"running": SERVER["running"]})


def fresh(change, *, weight=1, votes=None, kind="weights"):
    weights = {name: value + (SERVER[name] if kind == "weights" else 0) for name, value in change.items()}
    return Update(weights=weights, weight=weight, votes=votes, kind=kind)


def late(change, *, round, weight=1, examples=1, votes=None):
    changes = {name: torch.tensor(value) for name, value in change.items()}
    return PendingUpdate(9, round, 0.0, weight, examples, changes, votes or {})


def merge(reducer, updates, pending, *, round=5, rule=None):
    sums = reducer.start(LAYOUT, SERVER, 100)
    for update in updates:
        sums.add(update, Message(weights=SERVER), 10)
    return (rule or StaleMean()).merge(
        sums.result({client: {} for client in range(len(updates))}),
        sums.weights_of_votes(),
        pending,
        server=SERVER,
        round=round,
        buffers=LAYOUT.buffers,
        silence_counts=sums.silence_counts,
    )


def changed(merged):
    base = SERVER["w"] if merged.kind == "weights" else 0
    return (merged.weights["w"] - base).tolist()


def two(kind="weights"):
    """Two updates whose mean change is 0."""
    zero = torch.zeros(1)
    return [
        fresh({"w": torch.tensor([sign, 0.0, 0.0]), "running": zero}, kind=kind, votes=None) for sign in (1.0, -1.0)
    ]


def test_the_weights_of_two_fresh_and_two_late_updates():
    factors = [1.0, 1.0, *StaleMean().factors([1, 3], [4.0, 1.0])]
    shares = [factor / sum(factors) for factor in factors]
    assert shares == pytest.approx([0.3589167, 0.3589167, 0.1960554, 0.0861112], abs=5e-8)


@pytest.mark.parametrize("reducer", [CoverageMean(), PlainMean()], ids=["coverage", "plain"])
def test_a_merge_has_these_weights(reducer):
    """Changes of lengths 2 and 1 from a mean of 0, drawn one and three rounds before: squared distances 4 and 1."""
    pending = [late({"w": [0.0, 2.0, 0.0]}, round=4), late({"w": [0.0, 0.0, 1.0]}, round=2)]
    merged = merge(reducer, two(), pending)
    assert changed(merged) == pytest.approx([0, 2 * 0.1960554, 0.0861112], abs=1e-6)


def test_factors_multiply_the_updates_own_weights_and_buffers_are_weighted_by_samples():
    pending = [late({"w": [0.0, 2.0, 0.0], "running": [3.0]}, round=4, weight=4, examples=40)]
    factor = 0.65 / 2 + 0.35 * (1 - torch.exp(torch.tensor(-1.0)).item())
    merged = merge(CoverageMean(), two(), pending)
    assert changed(merged)[1] == pytest.approx(2 * 4 * factor / (2 + 4 * factor), abs=1e-6)
    assert merged.weights["running"].item() == pytest.approx(4 + 3 * 40 * factor / (20 + 40 * factor), abs=1e-6)


def test_buffers_are_no_part_of_the_deviation():
    """Squared distances 4 and 1 from the mean change, whatever the buffers are."""
    pending = [late({"w": [0.0, 2.0, 0.0]}, round=4), late({"w": [0.0, 0.0, 1.0], "running": [50.0]}, round=2)]
    assert changed(merge(CoverageMean(), two(), pending)) == pytest.approx([0, 2 * 0.1960554, 0.0861112], abs=1e-6)


def test_a_coordinate_counts_those_that_vote_on_it():
    votes = {"w": torch.tensor([True, True, False])}
    updates = [fresh({"w": torch.tensor([1.0, 1.0, 1.0])}, votes=votes)]
    own = {"w": torch.tensor([False, True, True])}
    merged = merge(CoverageMean(), updates, [late({"w": [5.0, 3.0, 4.0]}, round=4, votes=own)])
    factor = 0.65 / 2 + 0.35 * (1 - torch.exp(torch.tensor(-1.0)).item())
    assert changed(merged) == pytest.approx([1, (1 + 3 * factor) / (1 + factor), 4], abs=1e-6)
    assert merged.covered["w"].tolist() == [True, True, True]
    unsent = merge(CoverageMean(), updates, [late({"w": [5.0, 3.0, 4.0]}, round=4, votes=votes)])
    assert unsent.covered["w"].tolist() == [True, True, False]
    assert unsent.weights["w"][2] == 0  # as in every merge, where nobody voted
    plain = merge(PlainMean(), updates, [late({"w": [5.0, 3.0, 4.0]}, round=4, votes=own)])
    assert changed(plain)[0] == pytest.approx(1 / (1 + factor), abs=1e-6)
    assert plain.covered.get("w", torch.ones(3)).tolist() == [True, True, True]
    silent = merge(PlainMean(), updates, [late({"w": [5.0, 3.0, 4.0]}, round=4, votes=votes)])
    assert silent.covered["w"].tolist() == [True, True, False]
    dense = merge(PlainMean(), updates, [late({"w": [5.0, 3.0, 4.0]}, round=4)])
    assert dense.covered.get("w", torch.ones(3)).tolist() == [True, True, True]


def test_where_no_fresh_update_votes_the_mean_change_is_zero():
    """Squared distances 4 and 1 from it."""
    votes = {"w": torch.tensor([True, True, False])}
    zero = fresh({"w": torch.zeros(3), "running": torch.zeros(1)}, votes=votes)
    pending = [late({"w": [0.0, 0.0, 2.0]}, round=4), late({"w": [0.0, 0.0, 1.0]}, round=2)]
    one, two = StaleMean().factors([1, 3], [4.0, 1.0])
    assert changed(merge(CoverageMean(), [zero], pending))[2] == pytest.approx((2 * one + two) / (one + two), abs=1e-6)


def test_late_updates_are_voters():
    """With two fresh updates that vote everywhere, or on two coordinates of three."""
    votes = {"w": torch.tensor([True, True, False])}
    own = {"w": torch.tensor([False, True, True])}
    everywhere = [late({"w": [1.0, 1.0, 1.0]}, round=4)]
    partly = [late({"w": [1.0, 1.0, 1.0]}, round=4, votes=own), late({"running": [1.0]}, round=4)]
    sums = [fresh({"w": torch.ones(3)}, votes=votes), fresh({"w": torch.ones(3)}, votes=votes)]
    dense, masked = (merge(CoverageMean(), updates, everywhere) for updates in (two(), sums))
    assert "w" not in dense.voters
    assert dense.clients == 3
    assert merge(CoverageMean(), two(), partly).voters["w"].tolist() == [2, 3, 3]
    assert masked.voters["w"].tolist() == [3, 3, 1]
    assert merge(CoverageMean(), sums, partly).voters["w"].tolist() == [2, 3, 1]


def test_without_late_updates_the_merge_is_the_same_object_and_equal_changes_have_no_deviation():
    sums = CoverageMean().start(LAYOUT, SERVER, 100)
    sums.add(two()[0], Message(weights=SERVER), 10)
    merged = sums.result({})
    options = {"server": SERVER, "round": 0, "buffers": LAYOUT.buffers, "silence_counts": False}
    assert StaleMean().merge(merged, sums.weights_of_votes(), [], **options) is merged
    assert StaleMean().factors([1, 2], [0.0, 0.0]) == [0.65 / 2, 0.65 / 3]


def test_updates_beyond_the_limit_are_dropped():
    pending = [late({"w": [0.0, 0.0, 0.0]}, round=round) for round in (1, 3, 4)]
    assert StaleMean(limit=2).current(pending, 5) == pending[1:]
    assert StaleMean().current(pending, 5) == pending


@pytest.mark.parametrize(("option", "value"), [("beta", 1.5), ("beta", "1"), ("limit", 0), ("limit", 1.5)])
def test_options(option, value):
    with pytest.raises(InvalidOption, match=rf"`federation.sampler.{option}` is {value!r}; expected a"):
        StaleMean(**{option: value})
