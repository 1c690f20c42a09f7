from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from lightning_sparsefl import DisPFL
from lightning_sparsefl.cost import Devices
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.rounds import server
from lightning_sparsefl.federated.sampling.draws import Training
from lightning_sparsefl.federated.sampling.oort import Oort
from lightning_sparsefl.testing.small_federation import SmallFederation
from lightning_sparsefl.types import Message, ServerState

MASK = torch.tensor([True, True, False, False])
OTHER = torch.tensor([True, False, True, False])
BIAS = torch.tensor([1.0])
SERVER = ServerState(
    round=1, weights={"w": torch.tensor([1.0, 2.0, 3.0, 4.0]), "b": BIAS}, extra={"first_masks": {"w": MASK}}
)


def record(values, trained, masks=None, bias=0.0):
    """What the server keeps about a client that has trained."""
    shared = {"values": {"w": torch.tensor(values), "b": torch.tensor([bias])}, "masks": {"w": trained}}
    return shared if masks is None else {**shared, "masks": {"w": masks}, "trained": {"w": trained}}


@pytest.mark.parametrize("density", [0, 1.1, float("nan")])
def test_a_density_outside_its_range_is_refused(density):
    with pytest.raises(InvalidOption, match=r"`algorithm.density` is .*; expected a number in \(0, 1\], or 'capacity'"):
        DisPFL(density=density)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"neighbours": 0}, r"`algorithm.neighbours` is 0; expected a whole number >= 1"),
        ({"exchange": 1.5}, r"`algorithm.exchange` is 1.5; expected a number in \[0, 1\]"),
        (
            {"density": "capacity", "mask_init": "same"},
            "is 'same'; expected 'different', since `density` is",
        ),
        ({"topology": "star"}, "topology"),
        ({"density": "half"}, "density"),
    ],
)
def test_other_options_are_refused(options, sentence):
    with pytest.raises(InvalidOption, match=sentence):
        DisPFL(**options)


def test_the_ring(view):
    ring = DisPFL(topology="ring")
    assert [ring.neighbours_of(view(k), range(4)) for k in range(4)] == [[1, 3], [0, 2], [1, 3], [0, 2]]
    assert [ring.neighbours_of(view(k), range(2)) for k in range(2)] == [[1], [0]]
    assert ring.neighbours_of(view(0), range(1)) == []


def test_the_ring_of_the_clients_that_train(view):
    ring, training = DisPFL(topology="ring"), Training(6, [2, 5])
    assert list(training) == [0, 1, 3, 4]
    assert [ring.neighbours_of(view(k), training) for k in range(6)] == [[1, 4], [0, 3], [1, 3], [1, 4], [0, 3], [0, 4]]


def test_the_full_graph(view):
    full = DisPFL(topology="full")
    assert full.neighbours_of(view(1), range(4)) == [0, 2, 3]
    assert full.neighbours_of(view(1), [0, 2]) == [0, 2]


def test_random_neighbours_are_others_drawn_evenly_in_each_round(view):
    method, times = DisPFL(neighbours=3), Counter()
    for round in range(600):
        drawn = method.neighbours_of(view(2, round), range(7))
        assert drawn == method.neighbours_of(view(2, round), range(7)) == sorted(set(drawn) - {2})
        assert len(drawn) == 3
        times.update(drawn)
    assert set(times) == {0, 1, 3, 4, 5, 6}
    assert all(abs(count - 300) < 60 for count in times.values())  # a standard deviation is 12
    assert method.neighbours_of(view(0, seed=1), range(7)) != method.neighbours_of(view(0, seed=2), range(7))
    assert method.neighbours_of(view(1), range(3)) == [0, 2]


def test_few_of_a_million_clients_are_drawn_at_once(view):
    assert len(set(DisPFL().neighbours_of(view(999_999), range(1_000_000)))) == 10


def test_a_client_without_a_model_gets_the_initial_one(view):
    sent = DisPFL(mask_init="same").download(replace(SERVER, round=0), view(neighbours={1: view(1)}))
    assert sent.weights["w"].tolist() == [1, 2, 0, 0]
    assert sent.weights["b"] is BIAS
    assert (sent.masks["w"].tolist(), sent.extra) == (MASK.tolist(), {})  # in round 0 all models are equal


def test_the_models_of_the_neighbours_are_sent(view):
    neighbours = {3: view(3), 1: view(1, shared=record([5.0, 6.0], MASK, OTHER, 7.0))}
    sent = DisPFL(mask_init="same").download(SERVER, view(shared=record([8.0, 9.0], OTHER), neighbours=neighbours))
    assert (sent.weights, sent.masks) == ({}, {"w": OTHER})
    assert list(sent.extra) == ["1/values", "1/masks", "3/values", "3/masks"]
    assert {name: value.tolist() for name, value in sent.extra["1/values"].items()} == {"w": [5, 6], "b": [7]}
    assert sent.extra["1/masks"]["w"] is MASK  # that of the values, not the next one
    assert sent.extra["3/values"]["w"].tolist() == [1, 2]  # it has not trained


def test_a_client_trains_the_mean_of_those_that_keep_a_weight(client):
    trained = {"w": torch.tensor([0.5, 0.0, 0.1, 0.0]), "b": torch.tensor([2.0])}
    slopes = {"w": torch.tensor([0.0, 3.0, 0.0, 4.0]), "b": torch.zeros(1)}
    memory = {"values": {"w": torch.tensor([2.0, 4.0]), "b": torch.tensor([1.0])}, "masks": {"w": MASK}}
    someone, script = client(trained, slopes, memory=memory)
    extra = {
        "4/values": {"w": torch.tensor([6.0, 8.0]), "b": torch.tensor([3.0])},
        "4/masks": {"w": OTHER},
    }
    message = Message(weights={}, masks={"w": OTHER}, extra=extra)
    method = DisPFL(exchange=0.5)
    update = method.train(message, someone)
    ((weights, masks, _, _),) = script.fits
    assert {name: value.tolist() for name, value in weights.items()} == {"w": [4, 0, 8, 0], "b": [2]}
    assert masks == {"w": OTHER}
    assert (update.weights, update.weight) == ({}, 7)
    assert {name: value.tolist() for name, value in update.shared["values"].items()} == {
        "w": [0.5, pytest.approx(0.1)],
        "b": [2],
    }
    assert update.shared["trained"]["w"] is update.memory["masks"]["w"] is OTHER
    assert update.shared["masks"]["w"].tolist() == [True, False, False, True]  # .1 dropped, the slope of 4 grown
    assert {name: value.tolist() for name, value in method.trained(message, update).items()} == {
        "w": [0.5, 0, pytest.approx(0.1), 0],
        "b": [2],
    }


def test_a_static_mask_is_sent_once(client):
    someone, script = client({"w": torch.tensor([0.5, 0.2, 0.0, 0.0])})
    message = Message(weights={"w": torch.tensor([1.0, 2.0, 0.0, 0.0])}, masks={"w": MASK})
    update = DisPFL(search="static").train(message, someone)
    assert script.fits[0][0]["w"].tolist() == [1, 2, 0, 0]
    assert set(update.shared) == {"values", "masks"}
    assert not script.gradients


def test_masks_by_capacity(fleet, view):
    weights = {"a.weight": torch.ones(20, 10), "a.bias": torch.ones(20)}
    method = DisPFL(density="capacity")
    state = method.init(weights, fleet())
    kept = [
        int(method.masks(state, view(k, capacity=share))["a.weight"].sum()) for k, share in enumerate((0.2, 0.6, 1))
    ]
    assert kept == [40, 120, 200]
    assert method.plans_by_capacity
    assert not DisPFL().plans_by_capacity


def test_costs_by_hand(facts, view):
    """Of 18 numbers a client keeps 5 + 6 weights and 2 biases, as does a neighbour that is not sent; one keeps 9."""
    masks = {"a.weight": torch.arange(10).reshape(2, 5) < 5}
    known = facts(masks)
    initial = {**known.message.weights, "mean": torch.ones(2)}
    sent = Message(weights={}, masks=masks, extra={"1/values": {"x": torch.ones(9), "mean": torch.ones(2)}})
    known = replace(
        known,
        view=view(neighbours={1: view(1), 2: view(2)}),
        message=sent,
        buffers=frozenset(["mean"]),
        model=SimpleNamespace(initial=initial),
    )
    costs = DisPFL().costs(known)
    assert (costs.bytes_down_paper, costs.bytes_up_paper) == (4 * (9 + 13), 4 * 13 * 2)
    search = 4 * 3 * 34  # a dense pass over a batch of four
    static = DisPFL(search="static").costs(known)
    assert costs.flops_analytic - static.flops_analytic == search
    assert costs.flops_paper == static.flops_paper


def test_the_exchange_ends_in_the_round_after_the_last(view):
    assert DisPFL()._rate(view(round=4, max_rounds=5)) > 0
    assert DisPFL()._rate(view(round=0, max_rounds=5)) == 0.5


@pytest.mark.parametrize("buffers", ["local", "server"])
def test_buffers_that_are_not_averaged_are_refused(buffers, tmp_path):
    run = SmallFederation(tmp_path)  # of a network with batch norm
    with pytest.raises(InvalidOption, match=rf"`federation.buffers` is '{buffers}', but DisPFL averages buffers, such"):
        run(DisPFL(), federation={"buffers": buffers})
    run(DisPFL(), federation={"buffers": "average"}, rounds=1)


@dataclass(frozen=True, kw_only=True)
class Lost(DisPFL):
    def neighbours_of(self, view, clients):
        return [clients[-1] + 1]


def test_a_neighbour_that_is_no_client_is_named(tmp_path):
    with pytest.raises(InvalidOption, match=r"`Lost.neighbours_of` returned 6 for client \d; expected numbers of cl"):
        SmallFederation(tmp_path)(Lost())


def test_a_last_fit_starts_from_the_mean_that_was_scored(tmp_path, monkeypatch):
    rounds, before = [], DisPFL.neighbours_of
    monkeypatch.setattr(
        DisPFL, "neighbours_of", lambda self, view, clients: (rounds.append(view.round), before(self, view, clients))[1]
    )
    SmallFederation(tmp_path)(DisPFL(neighbours=2), rounds=2, federation={"finetune_epochs": 1})
    assert rounds[-12:] == [2] * 12  # six clients, first scored and then trained


def test_models_that_are_relayed_are_not_remembered(tmp_path, monkeypatch):
    def refuse(*args):
        raise AssertionError("a message with the models of neighbours is remembered")

    monkeypatch.setattr(server._Messages, "prepare", refuse)
    SmallFederation(tmp_path)(DisPFL(), rounds=2)


def test_expected_and_measured_times_are_of_one_upload(tmp_path, monkeypatch):
    expected, before = {}, server.Server._seconds_by_costs

    def noted(self, state, client):
        expected[state.server.round, client] = before(self, state, client)
        return expected[state.server.round, client]

    monkeypatch.setattr(server.Server, "_seconds_by_costs", noted)
    federation = {"devices": Devices(bytes_per_second=1e3), "sampler": Oort(over_select=1.3)}
    trainer = SmallFederation(tmp_path)(DisPFL(topology="full"), federation=federation)
    with (trainer.run_folder / "metrics.csv").open() as file:
        measured = float(list(csv.DictReader(file))[-1]["time/simulated"])
    assert 0.5 * measured < max(seconds for (round, _), seconds in expected.items() if round == 2) < 2 * measured
