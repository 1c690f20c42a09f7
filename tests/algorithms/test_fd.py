"""Federated Dropout and eFD: which units a client trains, what it costs, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lightning_sparsefl import FD
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.masks import same
from lightning_sparsefl.sparse.units import unit_masks
from lightning_sparsefl.sparse.width import held_units, prefix_units

PRERESNET = {
    1.0: 11_172_170,
    0.8: 7_174_150,
    0.6: 4_048_274,
    0.5: 2_796_714,
    0.4: 1_802_594,
    0.25: 701_018,
    0.2: 457_216,
    0.125: 176_178,
    0.0625: 44_510,
}
"""Parameters of PreResNet18 with 10 classes, by its width."""


@pytest.mark.slow_after_first
@pytest.mark.parametrize("rate", [0.0625, *(rate for rate in PRERESNET if rate != 0.0625)])
def test_parameters_of_the_sub_model_of_a_capacity(preresnet, rate):
    method = FD(rate="capacity")
    server, (person,) = preresnet.start(method, rate)
    assert preresnet.sent(method.download(server, person)) == PRERESNET[rate]


def test_a_unit_is_trained_in_a_share_of_the_rounds_that_is_the_rate(mlp):
    """16 and 8 units: of 75 %, 12 and 6."""
    method, rounds = FD(keep=0.75), 400
    _, (person,) = mlp.start(method, 1.0)
    seen = {group.name: torch.zeros(group.size) for group in mlp.units}
    for round in range(rounds):
        for name, kept in method.kept(mlp.units, replace(person, round=round)).items():
            assert int(kept.sum()) == 3 * len(kept) // 4
            seen[name] += kept
    for count in seen.values():
        deviation = math.sqrt(0.75 * 0.25 / rounds)
        assert (count / rounds - 0.75).abs().max() < 4 * deviation


def test_halves_are_rounded_up_and_one_unit_stays(mlp):
    _, (person,) = mlp.start(FD(), 1.0)
    counts = lambda keep: [int(kept.sum()) for kept in FD(keep=keep).kept(mlp.units, person).values()]  # noqa: E731
    assert counts(0.03) == [1, 1]
    assert counts(0.1) == [2, 1]
    assert counts(0.28) == [4, 2]


def test_a_capacity_is_rounded_up(mlp):
    method = FD(rate="capacity")
    _, (person,) = mlp.start(method, 0.26)
    assert [int(kept.sum()) for kept in method.kept(mlp.units, person).values()] == [5, 3]


def test_clients_and_rounds_draw_their_own_units(mlp):
    server, (one, other) = mlp.start(FD(), 1.0, 1.0)
    for method, equal in ((FD(), False), (FD(per="round"), True)):
        mine, theirs = (method.download(server, view).masks for view in (one, other))
        assert same(mine, theirs) == equal
        assert not same(mine, method.download(server, replace(one, round=1)).masks)
        assert same(mine, method.download(server, one).masks)


def test_a_client_reads_its_units_from_the_message(mlp, client):
    method = FD(keep=0.5)
    server, (person,) = mlp.start(method, 1.0)
    message = method.download(server, person)
    kept = held_units(mlp.units, message.masks)
    assert same(kept, method.kept(mlp.units, person))
    assert same(unit_masks(mlp.units, kept, message.weights), message.masks)
    assert not method.download_for(server, person, "score").masks


def test_a_client_returns_its_change_by_samples(mlp, client):
    method = FD(keep=0.5)
    server, (person,) = mlp.start(method, 1.0)
    message = method.download(server, person)
    trained = {name: value + 1 for name, value in message.weights.items()}
    someone, script = client(trained=trained, num_examples=7)
    script.units = mlp.units
    update = method.train(message, someone)
    assert update.kind == "difference"
    assert update.weight == 7
    assert all(torch.allclose(value, torch.ones(())) for value in update.weights.values())


@pytest.mark.parametrize("rate", [0.25, 0.5, 1.0])
def test_costs_are_those_of_the_narrow_network(mlp, rate):
    server, (person,) = mlp.start(FD(keep=rate), 1.0)
    mlp.check_costs(FD(keep=rate), server, person, [prefix_units(mlp.units, rate)])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep": 0.0}, r"`algorithm.keep` is 0.0; expected a number in \(0, 1\]"),
        ({"keep": 1.5}, r"`algorithm.keep` is 1.5; expected a number in \(0, 1\]"),
        ({"rate": "tier"}, "`algorithm.rate` is 'tier'; expected one of 'keep', 'capacity'"),
        ({"per": "batch"}, "`algorithm.per` is 'batch'; expected one of 'client', 'round'"),
    ],
)
def test_options_out_of_range_are_refused(options, expected):
    with pytest.raises(InvalidOption, match=expected):
        FD(**options)
