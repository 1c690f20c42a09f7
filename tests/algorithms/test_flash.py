from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import FLASH, FedAvg
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import ServerOptimizer
from lightning_sparsefl.types import Merged, Message, ServerState

LAYERS = {
    "a.weight": torch.arange(1.0, 41.0).reshape(4, 10),
    "a.bias": torch.ones(4),
    "b.weight": torch.arange(1.0, 11.0).reshape(1, 10),
    "norm.mean": torch.ones(2, 2),
}


@pytest.fixture
def start(fleet):
    """The state before round 0, where two of ten clients found densities of `found` in the mean, and the question."""

    def start(method, found, clients=10):
        asked = []

        def survey(message):
            asked.append(message)
            densities = {name: torch.tensor(0.2 * value) for name, value in found.items()}  # the others count as 0
            return Merged(weights=LAYERS, covered={}, extra={"densities": densities})

        state = method.init(LAYERS, fleet(clients=clients, buffers=["norm.mean"], survey=survey))
        return state, asked

    return start


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"density": 0.0}, r"`algorithm.density` is 0.0; expected a number in \(0, 1\]"),
        ({"first_clients": 1.5}, r"`algorithm.first_clients` is 1.5; expected a number in \(0, 1\]"),
        ({"exchange": 1.0}, r"`algorithm.exchange` is 1.0; expected a number in \[0, 1\)"),
        ({"first_epochs": 0}, r"`algorithm.first_epochs` is 0; expected a whole number >= 1"),
        ({"move_every": 0}, r"`algorithm.move_every` is 0; expected a whole number >= 1"),
        ({"form": "PDST"}, r"`algorithm.form` is 'PDST'; expected"),
    ],
)
def test_an_option_outside_its_range_is_refused(option, expected):
    with pytest.raises(InvalidOption, match=expected):
        FLASH(**option)


def test_the_mask_has_the_mean_densities_at_the_density_of_the_run(start):
    # of 40 and 10 weights, .1 and .6 are 10 in all; a density of .4 is 20, so .2 and 1.2, which is dense
    state, (question,) = start(FLASH(density=0.4), {"a.weight": 0.1, "b.weight": 0.6})
    assert {name: int(mask.sum()) for name, mask in state.masks.items()} == {"a.weight": 8, "b.weight": 10}
    assert torch.equal(state.weights["a.weight"], LAYERS["a.weight"] * state.masks["a.weight"])
    assert torch.equal(state.weights["a.bias"], LAYERS["a.bias"])
    assert torch.equal(state.weights["norm.mean"], LAYERS["norm.mean"])
    assert question.weights == {}  # everybody has the initial weights
    assert {name: int(mask.sum()) for name, mask in question.masks.items()} == {"a.weight": 16, "b.weight": 4}
    assert not torch.equal(question.masks["a.weight"], state.masks["a.weight"])


@pytest.mark.parametrize(("share", "number"), [(0.1, 1), (0.29, 29), (0.001, 1), (1.0, 100)])
def test_a_part_of_the_clients_is_asked(share, number, start):
    clients = 10 if share == 0.1 else 100
    _, (question,) = start(FLASH(first_clients=share), {"a.weight": 0.1, "b.weight": 0.1}, clients)
    asked = question.extra["asked"]["clients"].tolist()
    assert len(asked) == len(set(asked)) == number
    assert set(asked) <= set(range(clients))


def test_layers_that_stay_dense_have_no_mask(start):
    state, (question,) = start(FLASH(density=0.5, dense_layers=("b.*",)), {"a.weight": 0.25})
    assert list(state.masks) == list(question.masks) == ["a.weight"]
    assert int(state.masks["a.weight"].sum()) == 20


def question(masks, *clients):
    return Message(weights={}, masks=masks, extra={"asked": {"clients": torch.tensor(clients, dtype=torch.float64)}})


def test_a_client_that_is_not_asked_does_nothing(client):
    someone, script = client(client=2)
    update = FLASH().survey(question({}, 1, 3), someone)
    assert (update.weights, update.extra, script.fits) == ({}, {}, [])


def first(count, of):
    """A mask that keeps the first positions."""
    return torch.arange(of).reshape(1, of) < count


def found(client, a, b, large, small, **options):
    """What a client that is asked answers, and the script behind it: two layers, each with equal weights."""
    masks = {"a.weight": a, "b.weight": b}
    trained = {"a.weight": large * a.float(), "b.weight": small * b.float()}
    someone, script = client(trained=trained, client=3)
    update = FLASH(first_epochs=2, exchange=0.5, **options).survey(question(masks, 1, 3), someone)
    return {
        name: round(float(value) * masks[name].numel()) for name, value in update.extra["densities"].items()
    }, script


def test_a_client_moves_its_masks_between_epochs(client):
    # a quarter of 8 and of 2 is dropped, 2 and 1; three grow by means of 3 and 1: 2.25 and .75, so 2 and 1
    densities, script = found(client, first(8, 16), first(2, 16), 3.0, 1.0)
    assert densities == {"a.weight": 8, "b.weight": 2}
    assert script.epochs == [1, 1]
    (no_weights, before, *_), (weights, after, *_) = script.fits
    assert (no_weights, weights) == ({}, script.trained)
    assert {name: int(mask.sum()) for name, mask in after.items()} == densities
    assert int((after["a.weight"] & before["a.weight"]).sum()) >= 6
    assert not torch.equal(after["a.weight"], before["a.weight"])


def test_an_answer_counts_once(client):
    someone, _ = client(trained={"a.weight": torch.ones(1, 4)}, client=1)
    update = FLASH(first_epochs=1).survey(question({"a.weight": first(1, 4)}, 1), someone)
    assert (update.weights, update.weight) == ({}, 1)
    assert update.extra == {"densities": {"a.weight": torch.tensor(0.25)}}


def test_layers_with_larger_weights_become_denser(client):
    # both drop 2 of 8; of four, 3.6 and .4 grow, so 4 and 0
    assert found(client, first(8, 16), first(8, 16), 9.0, 1.0)[0] == {"a.weight": 10, "b.weight": 6}


def test_an_almost_dense_layer_with_large_weights_drops_no_more_than_its_sparsity(client):
    # a drops ceil(.1 * 18) = 2 instead of 5, b 1 of 4; 2.7 and .3 of three grow
    assert found(client, first(18, 20), first(4, 20), 9.0, 1.0)[0] == {"a.weight": 19, "b.weight": 3}
    # a drops 5, b 1; of six, .5 and 5.5 grow, of equal remainders that of the first
    assert found(client, first(18, 20), first(4, 20), 1.0, 11.0)[0] == {"a.weight": 14, "b.weight": 8}


def test_what_has_no_room_grows_elsewhere(client):
    # a drops ceil(15 / 16) = 1 and has room for 2 of the three that grow, nearly all of which are its share
    assert found(client, first(15, 16), first(8, 16), 1e3, 1.0)[0] == {"a.weight": 16, "b.weight": 7}


def test_a_layer_keeps_one_weight(client):
    assert found(client, first(1, 16), first(8, 16), 1.0, 1e6)[0] == {"a.weight": 1, "b.weight": 8}


def test_a_density_of_1_is_fedavg(federation, last):
    methods = (("a", FLASH(density=1, first_epochs=1)), ("b", FedAvg()))
    dense, plain = (last(federation(method, folder=name)) for name, method in methods)
    assert dense["state_dict"] == plain["state_dict"]


MASKS = {"a.weight": torch.tensor([[True, True, False, False]]), "b.weight": torch.tensor([[True, False]])}


def test_masks_move_in_some_rounds():
    assert [FLASH().moves(round) for round in range(3)] == [False] * 3
    assert [FLASH(form="JMWST").moves(round) for round in range(3)] == [True] * 3
    assert [FLASH(form="JMWST", move_every=2).moves(round) for round in range(4)] == [True, False, True, False]


@pytest.mark.parametrize(("capacity", "kept"), [(1.0, [7, 5, 3, 1]), (0.5, [7, 5]), (0.75, [7, 5, 3]), (0.01, [7])])
def test_a_client_gets_the_largest_weights_of_the_mask(view, capacity, kept):
    weights = {"a.weight": torch.tensor([[1.0, 0.0, -7.0, 3.0, 5.0, 0.0]]), "a.bias": torch.ones(1)}
    masks = {"a.weight": weights["a.weight"] != 0}
    server = ServerState(round=0, weights=weights, masks=masks)
    message = FLASH(hetero=True).download(server, view(capacity=capacity))
    assert sorted(message.weights["a.weight"][message.masks["a.weight"]].abs().tolist(), reverse=True) == kept
    assert int((message.weights["a.weight"] != 0).sum()) == len(kept)
    assert torch.equal(message.weights["a.bias"], weights["a.bias"])
    assert FLASH().download(server, view(capacity=capacity)).masks is masks


def test_a_weight_of_the_mask_that_is_0_belongs_to_it(view):
    server = ServerState(round=0, weights={"a.weight": torch.zeros(1, 4)}, masks={"a.weight": first(2, 4).flip(1)})
    masks = FLASH(hetero=True).download(server, view(capacity=0.5)).masks
    assert masks["a.weight"].tolist() == [[False, False, True, False]]


@pytest.mark.parametrize(("merge", "kept"), [("mean", [[0.5, 4.0, 0.0, 0.0]]), ("count", [[2.0, 4.0, 9.0, 0.0]])])
def test_parts_of_the_mask_are_averaged_over_all_or_those_who_keep_them(merge, kept):
    masks, votes = {"a.weight": first(3, 4)}, torch.tensor([[1, 4, 0, 0]], dtype=torch.int32)
    before = ServerState(round=1, weights={"a.weight": torch.tensor([[8.0, 8.0, 9.0, 0.0]])}, masks=masks)
    means, reports = {"a.weight": torch.tensor([[2.0, 4.0, 0.0, 0.0]])}, {client: {} for client in range(4)}
    merged = Merged(means, {"a.weight": votes > 0}, voters={"a.weight": votes}, reports=reports)
    server = FLASH(hetero=True, merge=merge).aggregate(before, merged)
    assert server.weights["a.weight"].tolist() == kept
    assert server.masks is masks


def test_clients_with_parts_of_the_mask_count_alike(client):
    message = Message(weights={name: mask.float() for name, mask in MASKS.items()}, masks=MASKS)
    someone, _ = client(trained=message.weights, client=3)
    assert FLASH(hetero=True).train(message, someone).weight == 1
    assert FLASH().train(message, someone).weight == someone.num_examples > 1


def test_layers_take_the_densities_of_the_merged_weights():
    # of 10 positions 5 are kept; of the means 4 and 1 are not 0, where the clients' masks would say 1 and 4
    means = {
        "a.weight": torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.0]]),
        "b.weight": torch.tensor([[5.0, 0.0, 0.0, 0.0, 0.0]]),
    }
    masks, densities = (
        {name: first(2, 5) for name in means},
        {"a.weight": torch.tensor(0.2), "b.weight": torch.tensor(0.8)},
    )
    before = ServerState(round=0, weights=means, masks=masks)
    merged = Merged(means, {}, extra={"densities": densities}, reports={0: {}})
    sizes = {}
    for sensitivity in ("masks", "weights"):
        server = FLASH(form="JMWST", density=0.5, sensitivity=sensitivity).aggregate(before, merged)
        sizes[sensitivity] = [int(mask.sum()) for mask in server.masks.values()]
    assert sizes == {"masks": [1, 4], "weights": [4, 1]}


def test_densities_that_are_not_used_are_not_sent(client):
    message = Message(weights={name: mask.float() for name, mask in MASKS.items()}, masks=MASKS)
    someone, _ = client(trained=message.weights, client=3)
    assert FLASH(form="JMWST", sensitivity="weights", exchange=0.0).train(message, someone).extra == {}


def test_what_takes_changes_is_refused_where_clients_send_what_they_have_not_received(federation):
    method = FLASH(hetero=True, form="JMWST", merge="count", sensitivity="weights", first_epochs=1)
    with pytest.raises(
        InvalidOption, match="FLASH has clients move their masks to weights that they have not received"
    ):
        federation(method, rounds=1, federation={"clip_update": 1.0, "capacities": [0.5, 1.0]})
    own = (FLASH(hetero=True), FLASH(form="JMWST"))
    assert [each.sends_unreceived for each in own] == [None] * 2


def test_whole_capacities_are_told():
    assert FLASH(hetero=True).at_full_capacity == "trains the whole mask on every client"
    assert FLASH().at_full_capacity is None


def test_what_changes_the_mean_is_refused_where_it_is_scaled(federation):
    with pytest.raises(InvalidOption, match="FLASH scales the mean by the share of the clients that keep a weight"):
        federation(FLASH(form="JMWST"), rounds=1, federation={"server_optimizer": ServerOptimizer()})
    assert FLASH(hetero=True).needs_exact_mean
    own = (FLASH(), FLASH(form="JMWST", merge="count"), FLASH(hetero=True, merge="count"))
    assert [method.needs_exact_mean for method in own] == [None] * 3


@pytest.mark.parametrize("merge", ["mean", "count"])
def test_the_server_keeps_the_largest_weights_by_the_mean_densities(merge):
    # of 6 positions half are kept, 2.25 and .75 by the clients' densities: 2 and 1 at least
    voters = {"a.weight": torch.tensor([[4, 1, 3, 0]], dtype=torch.int32)}
    means = {"a.weight": torch.tensor([[1.0, 6.0, 3.0, 9.0]]), "b.weight": torch.tensor([[1.0, -2.0]])}
    densities = {"a.weight": torch.tensor(0.5625), "b.weight": torch.tensor(0.375)}
    covered = {"a.weight": voters["a.weight"] > 0}
    before = ServerState(round=3, weights={name: torch.zeros_like(value) for name, value in means.items()}, masks=MASKS)
    reports = {client: {} for client in range(4)}
    merged = Merged(means, covered, extra={"densities": densities}, voters=voters, reports=reports)
    server = FLASH(form="JMWST", density=0.5, merge=merge).aggregate(before, merged)
    # in the mean 1, 1.5, 2.25 and 0
    kept = {"mean": [[0.0, 1.5, 2.25, 0.0]], "count": [[0.0, 6.0, 3.0, 0.0]]}[merge]
    assert server.weights["a.weight"].tolist() == kept
    assert server.weights["b.weight"].tolist() == [[0.0, -2.0]]
    assert {name: mask.tolist() for name, mask in server.masks.items()} == {
        "a.weight": [[False, True, True, False]],
        "b.weight": [[False, True]],
    }


def test_the_mask_stays_where_it_was_not_moved():
    before = ServerState(round=1, weights={name: mask.float() for name, mask in MASKS.items()}, masks=MASKS)
    merged = Merged({name: 2 * mask.float() for name, mask in MASKS.items()}, MASKS, reports={0: {}})
    server = FLASH(form="JMWST", move_every=2).aggregate(before, merged)
    assert server.masks is MASKS
    assert server.weights["a.weight"].tolist() == [[2.0, 2.0, 0.0, 0.0]]


def test_a_client_that_does_not_move_the_mask_counts_as_the_others(client):
    message = Message(weights={name: mask.float() for name, mask in MASKS.items()}, masks=MASKS)
    someone, script = client(trained=message.weights, client=3, round=1)
    update = FLASH(form="JMWST", move_every=2).train(message, someone)
    assert (update.weight, update.extra) == (1, {})
    assert update.votes is MASKS  # so that no more is sent
    assert script.fits[0][1] is MASKS


def test_a_move_costs_a_bit_for_each_position(facts):
    masks = {"a.weight": torch.ones(2, 5, dtype=torch.bool)}
    for round, (down, up) in enumerate([(0, 10 / 8), (10 / 8, 0), (0, 10 / 8)]):
        costs, plain = (own.costs(facts(masks, round=round)) for own in (FLASH(form="JMWST", move_every=2), FLASH()))
        assert costs.bytes_down_paper == plain.bytes_down_paper + down
        assert costs.bytes_up_paper == plain.bytes_up_paper + up
        assert costs.flops_analytic == plain.flops_analytic
        for capacity in (0.5, 1.0):  # a part changes with the weights
            own = FLASH(hetero=True).costs(facts(masks, round=round, capacity=capacity))
            assert own.bytes_down_paper == plain.bytes_down_paper + (10 / 8 if round and capacity < 1 else 0)
            assert own.bytes_up_paper == plain.bytes_up_paper
