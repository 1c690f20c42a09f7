from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from helpers.scripted import Scripted, scripted_client
from lightning_sparsefl import FedAvg, Hermes
from lightning_sparsefl.callbacks import GroupPenalty
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, PlainMean
from lightning_sparsefl.sparse.masks import same
from lightning_sparsefl.sparse.submodel import cut
from lightning_sparsefl.sparse.unit_tables import unit_tables
from lightning_sparsefl.sparse.units import find_groups, unit_masks
from lightning_sparsefl.types import Merged, Message, ServerState

NET = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
GROUPS = find_groups(NET, torch.zeros(1, 3))
WEIGHTS = {name: torch.full_like(value, 0.5) for name, value in NET.state_dict().items()}
WEIGHTS["0.weight"] = torch.arange(1.0, 19).view(6, 3)
"""The first units have the smallest rows."""
TRAINED = {name: value + 1 for name, value in WEIGHTS.items()}
FULL = {"0": torch.ones(6, dtype=torch.bool)}
FOUR = {"0": torch.tensor([False, True, True, False, True, True])}


def train(method, message=None, score=0.9, memory=None, trained=TRAINED):
    script = Scripted(trained, scores={"val_acc": score}, units=GROUPS)
    update = method.train(message or Message(weights=WEIGHTS), scripted_client(script, memory))
    return update, script


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0}, r"`algorithm.density` is 0; expected a number in \(0, 1\]"),
        ({"step": 1}, r"`algorithm.step` is 1; expected a number in \[0, 1\)"),
        ({"penalty": -1.0}, "`algorithm.penalty` is -1.0; expected a number >= 0"),
        ({"gate": "test"}, "`algorithm.gate` is 'test'; expected one of 'val', 'train'"),
        ({"metric": "val_loss"}, "`algorithm.metric` is 'val_loss'; expected a score that rises as a model improves"),
    ],
)
def test_options_outside_their_range_are_refused(options, message):
    with pytest.raises(InvalidOption, match=message):
        Hermes(**options)


def test_a_model_without_units_is_refused(fleet):
    with pytest.raises(InvalidOption, match="`Hermes` finds no units in the model; expected hidden channels"):
        Hermes().init(WEIGHTS, fleet())


def test_a_client_receives_what_it_has_in_common_with_all(view):
    held = unit_masks(GROUPS, FOUR, WEIGHTS)
    common = unit_masks(GROUPS, {"0": torch.tensor([True, True, False, True, True, True])}, WEIGHTS)
    state = ServerState(round=1, weights=WEIGHTS, extra={"common": common})
    method = Hermes()
    fresh = method.download(state, view())
    assert fresh.masks == {}
    assert all(torch.equal(value, WEIGHTS[name]) for name, value in fresh.weights.items())
    message = method.download(state, view(shared={"masks": held}))
    both = unit_masks(GROUPS, {"0": torch.tensor([False, True, False, False, True, True])}, WEIGHTS)
    assert same(message.masks, both)
    assert not message.weights["0.weight"][2].any()
    assert method.download_for(state, view(shared={"masks": held}), "score").weights == {}
    assert method.download_for(state, view(), "score").masks == {}
    theirs = Hermes(own=False).download(state, view(shared={"masks": held}))
    assert same(theirs.masks, held)


def test_received_weights_replace_the_clients_own_where_they_were_sent():
    own = {name: torch.full_like(value, -1.0) for name, value in WEIGHTS.items()}
    masks = unit_masks(GROUPS, FOUR, WEIGHTS)
    message = Message(weights={n: w * masks.get(n, True) for n, w in WEIGHTS.items()}, masks=masks)
    _, script = train(Hermes(), message, memory={"units": FULL, "weights": own})
    ((start, held, units, (penalty,)),) = script.fits
    assert start["0.weight"][0].tolist() == [-1, -1, -1]
    assert start["0.weight"][1].tolist() == [4, 5, 6]
    assert start["2.bias"].tolist() == [0.5, 0.5]  # without a mask it is sent whole
    assert (held, units) == ({}, None)  # the client has all units, whatever was sent
    assert isinstance(penalty, GroupPenalty)
    assert (penalty.strength, penalty.stairs, penalty.groups) == (1e-4, None, "units")


def test_without_a_merge_the_clients_own_model_is_complete():
    own = {name: torch.full_like(value, -1.0) for name, value in WEIGHTS.items()}
    client = scripted_client(Scripted({}), {"weights": own})
    model = Hermes().personalize(Message(weights=WEIGHTS), client)
    assert all(torch.equal(model[name], value) for name, value in own.items())


def test_the_penalty_is_on_the_units_of_the_narrow_model():
    masks = unit_masks(GROUPS, FOUR, WEIGHTS)
    message = Message(weights={n: w * masks.get(n, True) for n, w in WEIGHTS.items()}, masks=masks)
    _, script = train(Hermes(), message, memory={"units": FOUR, "weights": message.weights})
    ((_, _, units, (penalty,)),) = script.fits
    narrow = dict(cut(NET, GROUPS, units).named_parameters())
    assert [group.size for group in penalty.units(narrow)] == [4]


def test_units_are_removed_after_training():
    # ceil(.2 * 5) = 1 of 6 units, that with the smallest row
    update, script = train(Hermes())
    assert update.memory["units"]["0"].tolist() == [False, True, True, True, True, True]
    masks = unit_masks(GROUPS, update.memory["units"], WEIGHTS)
    assert same(update.votes, masks)
    assert same(update.shared["masks"], masks)
    assert script.fits[0][2] is None  # trained whole
    assert script.evaluations == [(TRAINED, "val")]
    assert not update.weights["0.weight"][0].any()
    assert update.weights["0.weight"][1].tolist() == [5, 6, 7]
    assert update.memory["weights"] is update.weights
    assert (update.kind, update.weight) == ("weights", 1)
    assert update.metrics == {"train_loss": 0.5, "common": 1.0}


def test_live_units_are_trained_and_stay_removed():
    update, script = train(Hermes(density=0.4), memory={"units": FOUR, "weights": WEIGHTS})
    assert same(script.fits[0][2], FOUR)
    # ceil(.2 * 3) = 1 of the 4 live units
    assert update.memory["units"]["0"].tolist() == [False, False, True, False, True, True]


@pytest.mark.parametrize(
    ("options", "score"), [({}, 0.6), ({"density": 4 / 6}, 0.9), ({"step": 0.0}, 0.9)], ids=["score", "target", "step"]
)
def test_a_closed_gate_keeps_the_units(options, score):
    update, _ = train(Hermes(**options), score=score, memory={"units": FOUR, "weights": WEIGHTS})
    assert update.shared is None
    assert same(update.memory["units"], FOUR)


def test_the_first_upload_has_the_masks_even_if_nothing_was_removed():
    update, _ = train(Hermes(), score=0.1)
    assert all(bool(mask.all()) for mask in update.shared["masks"].values())


def test_the_servers_weights_are_pruned_before_training_and_changes_are_sent():
    method = Hermes(own=False, penalty=0.0)
    update, script = train(method)
    ((start, _, units, callbacks),) = script.fits
    assert start is WEIGHTS
    assert callbacks == []
    assert units["0"].tolist() == [False, True, True, True, True, True]
    assert script.evaluations == [(WEIGHTS, "val")]
    assert update.kind == "difference"
    assert update.weights["0.weight"][1:].unique().tolist() == [1.0]
    assert list(update.memory) == ["units"]
    assert isinstance(method.reducer(), PlainMean)
    assert isinstance(Hermes().reducer(), CoverageMean)


def test_only_what_all_clients_have_moves():
    mean = {name: value + 5 for name, value in WEIGHTS.items()}
    votes = {"0.bias": torch.tensor([2, 3, 3, 1, 0, 3], dtype=torch.int32), "2.bias": torch.tensor([3, 3])}
    covered = {"0.bias": votes["0.bias"] > 0}
    reports = {client: {} for client in (1, 2, 4)}
    state = ServerState(round=0, weights=WEIGHTS, extra={"units": unit_tables(GROUPS)})
    after = Hermes().aggregate(state, Merged(weights=mean, covered=covered, reports=reports, voters=votes))
    assert after.weights["0.bias"].tolist() == [0.5, 5.5, 5.5, 0.5, 0.5, 5.5]
    assert after.weights["2.bias"].tolist() == [5.5, 5.5]
    assert after.weights["0.weight"][0].tolist() == [6, 7, 8]  # voted on by all
    assert {n: m.tolist() for n, m in after.extra["common"].items()} == {
        "0.bias": [False, True, True, False, False, True]
    }
    assert after.masks == {}  # the global model is dense


def test_weights_that_all_clients_have_again_are_common_again():
    lost = {"0.bias": torch.tensor([False, True, True, True, True, True])}
    state = ServerState(round=1, weights=WEIGHTS, extra={"units": unit_tables(GROUPS), "common": lost})
    votes = {"0.bias": torch.full((6,), 2, dtype=torch.int32)}
    after = Hermes().aggregate(state, Merged(weights=WEIGHTS, covered={}, reports={1: {}, 2: {}}, voters=votes))
    assert after.extra["common"] == {}


def test_costs_of_live_units_and_common_weights(mlp):
    method = Hermes()
    server, (person,) = mlp.start(method, 1.0)
    whole = {group.name: torch.ones(group.size, dtype=torch.bool) for group in mlp.units}
    mlp.check_costs(method, server, person, [whole])
    live = {group.name: torch.arange(group.size) % 2 == 0 for group in mlp.units}
    masks = unit_masks(mlp.units, live, server.weights)
    common = {name: torch.zeros_like(mask) for name, mask in masks.items()}
    later = dataclasses.replace(person, shared={"masks": masks})
    mlp.check_costs(method, server, later, [live])
    state = dataclasses.replace(server, extra={**server.extra, "common": common})
    costs, alike = (method.costs(mlp.facts(method, each, later)) for each in (state, server))
    assert costs.bytes_down_paper == 4 * 4  # the bias of the head, which has no units
    assert (costs.bytes_up_paper, costs.flops_paper) == (alike.bytes_up_paper, alike.flops_paper)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("left", "scored"), [(3, True), (2, False)])
def test_a_gate_on_training_data_is_charged_while_units_may_be_removed(mlp, own, left, scored):
    """Of each four units `left` are live: more than half, or half."""
    charged = []
    for gate in ("val", "train"):
        method = Hermes(gate=gate, own=own)
        server, (person,) = mlp.start(method, 1.0)
        live = {group.name: torch.arange(group.size) % 4 < left for group in mlp.units}
        later = dataclasses.replace(person, shared={"masks": unit_masks(mlp.units, live, server.weights)})
        charged.append(method.costs(mlp.facts(method, server, later)).flops_analytic)
    assert charged[1] - charged[0] == scored * charged[0] / (2 * 3)  # one forward pass of each sample
    still = Hermes(gate="train", own=own, step=0.0)
    assert still.costs(mlp.facts(still, server, later)).flops_analytic == charged[0]


def test_flops_of_fedlps_s_row_count_outgoing_rows_only(mlp):
    method = Hermes(own=False)
    server, (person,) = mlp.start(method, 1.0)
    live = {group.name: torch.arange(group.size) % 2 == 0 for group in mlp.units}
    masks = unit_masks(mlp.units, live, server.weights)
    later = dataclasses.replace(person, shared={"masks": masks})
    facts = dataclasses.replace(mlp.facts(method, server, later), model=mlp)
    costs = method.costs(facts)
    # 9 inputs, 16, 8 and 4 units, of which 8, 4 and 4 are left, and the biases in full
    assert costs.flops_paper == 2 * 5 * 3 * (2 * (9 * 8 + 16 * 4 + 8 * 4) + 16 + 8 + 4)
    assert costs.flops_analytic == 2 * 5 * 3 * (2 * (9 * 8 + 8 * 4 + 4 * 4) + 8 + 4 + 4)


def test_a_profile_has_the_units_of_open_gates(mlp):
    method = Hermes(step=0.2, density=0.5)
    server, _ = mlp.start(method, 1.0)  # one client, in every round
    live = [int(method.profile_state(server, round).masks["net.fc1.bias"].sum()) for round in range(6)]
    # ceil(.2 * 15) = 3 of 16 units, then 3 and 2; with 4 of the other layer's 8 half of all units are left
    assert live == [16, 13, 10, 8, 8, 8]


class Uniform(FedAvg):
    """FedAvg in which each client counts once."""

    def train(self, message, client):
        return dataclasses.replace(super().train(message, client), weight=1)


def weights_of(trainer):
    return torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def test_without_removals_it_is_federated_averaging(federation):
    method = Hermes(min_score=1.0, penalty=0.0)
    ours, theirs = (
        weights_of(federation(m, rounds=3, folder=type(m).__name__, federation={"local_engine": "fast"}))
        for m in (method, Uniform())
    )
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
