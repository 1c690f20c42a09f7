from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from helpers.scripted import Scripted, scripted_client
from lightning_sparsefl import FedAvg, SubFedAvg
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean
from lightning_sparsefl.federated.commands.simulated_worker import SimulatedWorker
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.sparse.masks import density, same
from lightning_sparsefl.types import Message

WEIGHTS = {"a.weight": torch.arange(1.0, 21).view(4, 5), "a.bias": torch.ones(4), "norm.mean": torch.ones(4)}
FULL = {"a.weight": torch.ones(4, 5, dtype=torch.bool), "a.bias": torch.ones(4, dtype=torch.bool)}
MESSAGE = Message(weights=WEIGHTS, masks=FULL)
EARLY = {**WEIGHTS, "a.weight": WEIGHTS["a.weight"].flip(0)}
"""After the first epoch the last row has the smallest weights, after the last epoch the first row has."""


def train(method, masks=FULL, early=EARLY, score=0.9, metric="val_acc"):
    script = Scripted(WEIGHTS, early, {metric: score})
    update = method.train(dataclasses.replace(MESSAGE, masks=masks), scripted_client(script))
    return update, script


def dropped(update):
    return (~update.shared["masks"]["a.weight"]).flatten().nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0}, r"`algorithm.density` is 0; expected a number in \(0, 1\]"),
        ({"density": 1.1}, r"`algorithm.density` is 1.1; expected a number in \(0, 1\]"),
        ({"step": 1}, r"`algorithm.step` is 1; expected a number in \[0, 1\)"),
        ({"min_change": -1e-4}, "`algorithm.min_change` is -0.0001; expected a number >= 0"),
        ({"gate": "test"}, "`algorithm.gate` is 'test'; expected one of 'val', 'train'"),
        ({"last_step": "long"}, "`algorithm.last_step` is 'long'"),
        ({"votes": "all"}, "`algorithm.votes` is 'all'"),
        ({"min_score": "high"}, "algorithm.min_score"),
        ({"metric": "val_loss"}, "`algorithm.metric` is 'val_loss'; expected a score that rises as a model improves"),
    ],
)
def test_options_outside_their_range_are_refused(options, message):
    with pytest.raises(InvalidOption, match=message):
        SubFedAvg(**options)


def test_clients_start_dense_and_buffers_have_no_masks(fleet, view):
    state = SubFedAvg().init(WEIGHTS, fleet(buffers=["norm.mean"]))
    assert state.masks == {}
    message = SubFedAvg().download(state, view())
    assert same(message.masks, FULL)
    assert list(message.masks) == ["a.weight", "a.bias"]
    assert all(torch.equal(message.weights[name], value) for name, value in WEIGHTS.items())
    half = {"a.weight": torch.eye(4, 5, dtype=torch.bool)}
    later = SubFedAvg().download(state, view(shared={"masks": half}))
    assert same(later.masks, half)
    assert later.weights["a.weight"].tolist() == (WEIGHTS["a.weight"] * half["a.weight"]).tolist()
    assert isinstance(SubFedAvg().reducer(), CoverageMean)


def test_a_pruning_drops_what_is_strictly_below_the_percentile():
    # of 20 weights .1 * 19 = 1.9, so 2 are below the percentile; 22 of 24 parameters are left
    update, script = train(SubFedAvg())
    limit = np.percentile(WEIGHTS["a.weight"].numpy(), 10)
    assert dropped(update) == [0, 1] == np.flatnonzero(WEIGHTS["a.weight"].numpy() < limit).tolist()
    assert update.shared["masks"]["a.bias"].all()
    assert update.votes is update.shared["masks"]
    assert (update.kind, update.weight, update.memory) == ("weights", 1, None)
    assert update.weights["a.weight"].flatten()[:3].tolist() == [0, 0, 3]
    assert update.metrics == {"train_loss": 0.5}
    ((scored, split),) = script.evaluations
    assert split == "val"
    assert torch.equal(scored["a.weight"], update.weights["a.weight"])
    ((started, masks, units, _),) = script.fits
    assert (started, units) == (MESSAGE.weights, None)
    assert same(masks, FULL)


def test_held_votes_count_dropped_weights_as_zeros():
    update, _ = train(SubFedAvg(votes="held"))
    assert update.votes is None
    assert dropped(update) == [0, 1]
    assert update.weights["a.weight"].flatten()[:2].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "early", "score"),
    [
        ({}, EARLY, 0.5),  # not above the threshold
        ({"min_change": 0.2}, EARLY, 0.9),  # 4 of 20 positions differ, which is not more than .2
        ({"density": 1.0}, EARLY, 0.9),
        ({"step": 0.0}, EARLY, 0.9),
    ],
)
def test_a_closed_gate_keeps_the_mask_and_uploads_nothing_about_it(options, early, score):
    update, _ = train(SubFedAvg(**options), early=early, score=score)
    assert update.shared is None
    assert update.votes is None or same(update.votes, FULL)
    assert torch.equal(update.weights["a.weight"], WEIGHTS["a.weight"])


def test_one_local_epoch_prunes_nothing_and_says_so():
    with pytest.warns(UserWarning, match=r"and they have one epoch; expected `trainer.max_epochs` of 2 or more"):
        update, _ = train(SubFedAvg(), early=WEIGHTS, score=0.9)
    assert update.shared is None


def test_the_difference_must_exceed_its_threshold():
    update, _ = train(SubFedAvg(min_change=0.19))
    assert dropped(update) == [0, 1]


# 24 parameters. At 22 of them (.9167), .05 above the target, a short pruning drops min(.05, .05 / .9167) of 18 weights:
# ceil(.05 * 17) = 1; a full one ceil(.1 * 17) = 2. Further above the target, .1 of 18.
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"density": 22 / 24 - 0.05}, 1),
        ({"density": 22 / 24 - 0.05, "last_step": "full"}, 2),
        ({"density": 0.7}, 2),
        ({"density": 22 / 24}, 0),
        ({"density": 22 / 24 - 0.001}, 1),
    ],
)
def test_the_last_pruning(options, count):
    mask = torch.ones(20, dtype=torch.bool)
    mask[:2] = False
    masks = {**FULL, "a.weight": mask.view(4, 5)}
    update, _ = train(SubFedAvg(**options), masks)
    kept = 18 if update.shared is None else int(update.shared["masks"]["a.weight"].sum())
    assert kept == 18 - count
    if count:
        assert dropped(update) == list(range(2 + count))  # what was dropped before stays so


def test_a_gate_on_training_data_is_charged(facts):
    assert train(SubFedAvg(gate="train"))[1].evaluations[0][1] == "train"
    assert SubFedAvg().costs(facts()).flops_analytic == 14 * 3 * 34
    costs = SubFedAvg(gate="train").costs(facts())
    assert (costs.flops_paper, costs.flops_analytic) == (14 * 3 * 34, 14 * 3 * 34 + 7 * 34)
    assert (costs.bytes_down_paper, costs.bytes_up_paper) == (72, 72)


def test_a_gate_is_not_charged_once_the_target_is_reached(facts):
    masks = {"a.weight": torch.arange(10).view(2, 5) < 5}
    for target, charged in ((0.4, True), (0.5, False)):
        costs = [SubFedAvg(density=target, gate=gate).costs(facts(masks)) for gate in ("val", "train")]
        assert (costs[1].flops_analytic > costs[0].flops_analytic) == charged


def test_a_score_that_the_module_does_not_log_is_refused():
    with pytest.raises(InvalidOption, match=r"`algorithm.metric` is 'val_acc', which .* expected one of `val_f1`"):
        train(SubFedAvg(), metric="val_f1")


def test_a_profile_has_the_masks_of_open_gates(fleet):
    method, people = SubFedAvg(), fleet(clients=4)
    people.clients_per_round = 2  # half of the clients, so one pruning in two rounds
    weights = {"w": torch.arange(1.0, 101).view(10, 10)}
    state = method.init(weights, people)
    kept = [int(method.profile_state(state, round).masks["w"].sum()) for round in range(12)]
    # ceil(.1 * 99) = 10, ceil(.1 * 89) = 9, ceil(.1 * 80) = 8; at .73 a short one: ceil(.03 / .73 * 72) = 3
    assert kept == [100, 100, 90, 90, 81, 81, 73, 73, 70, 70, 70, 70]
    worker = SimulatedWorker(Layout(weights, {}), weights, seed=0)
    update = method.train(Message(weights=weights, masks=method.profile_state(state, 2).masks), scripted_client(worker))
    assert update.weights["w"].shape == (10, 10)


def test_a_profile_counts_biases_in_the_density(fleet):
    method, people = SubFedAvg(density=0.8), fleet(clients=1)
    people.clients_per_round = 1
    state = method.init({"w": torch.arange(1.0, 101).view(10, 10), "b": torch.ones(100)}, people)
    masks = [method.profile_state(state, round).masks for round in range(10)]
    # full prunings of ceil(.1 * 99) = 10, 9 and 8 down to 173 of 200, then short ones of 4, 4, 2, 2 and 1
    assert [int(tree["w"].sum()) for tree in masks] == [100, 90, 81, 73, 69, 65, 63, 61, 60, 60]
    assert all(tree["b"].all() for tree in masks)


class Uniform(FedAvg):
    """FedAvg in which each client counts once."""

    def train(self, message, client):
        return dataclasses.replace(super().train(message, client), weight=1)


def weights_of(trainer):
    return torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.parametrize("method", [SubFedAvg(min_score=1.0), SubFedAvg(density=1.0)], ids=["gate", "density"])
def test_without_a_pruning_it_is_federated_averaging(method, federation):
    ours, theirs = (
        weights_of(federation(m, rounds=2, folder=type(m).__name__, federation={"local_engine": "fast"}))
        for m in (method, Uniform())
    )
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


NOTED = []


class Noting(SubFedAvg):
    """Notes each client's masks before and after its round."""

    def train(self, message, client):
        update = super().train(message, client)
        NOTED.append((client.id, message.masks, (update.shared or {"masks": message.masks})["masks"]))
        return update


@pytest.mark.slow
def test_masks_shrink_until_the_target_and_stay(federation):
    NOTED.clear()
    federation(Noting(density=0.6, step=0.2, min_score=0.0, last_step="full"), rounds=12)
    held = {}
    for client, before, after in NOTED:
        assert same(before, held.get(client, before))
        assert all(bool((after[name] <= mask).all()) for name, mask in before.items())
        assert density(before) > 0.6 or same(before, after)
        held[client] = after
    assert len(held) == 6
    assert all(0.45 < density(masks) <= 0.6 for masks in held.values())
