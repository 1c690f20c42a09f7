from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import FedAvg
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean
from lightning_sparsefl.types import Costs, Merged, Message, ServerState

WEIGHTS = {"w": torch.tensor([1.0, 2.0, 3.0])}
MASKS = {"w": torch.tensor([True, False, True])}


def test_it_has_no_options():
    with pytest.raises(TypeError):
        FedAvg(0.5)
    assert FedAvg() == FedAvg()


def test_the_server_starts_from_the_modules_weights(fleet):
    assert FedAvg().init(WEIGHTS, fleet()) == ServerState(round=0, weights=WEIGHTS)


def test_everybody_receives_and_is_scored_with_the_servers_weights(view, client):
    server = ServerState(round=2, weights=WEIGHTS)
    message = FedAvg().download(server, view())
    assert message == Message(weights=WEIGHTS) == FedAvg().download_for(server, view(), "score")
    assert FedAvg().personalize(message, client()[0]) == WEIGHTS
    assert FedAvg().finetune(message, client()[0]) is None


def test_global_masks_are_applied_and_sent(view, client):
    server = ServerState(round=2, weights=WEIGHTS, masks=MASKS)
    message = FedAvg().download(server, view())
    assert message.weights["w"].tolist() == [1, 0, 3]
    assert message.masks == MASKS
    assert FedAvg().personalize(message, client()[0])["w"].tolist() == [1, 0, 3]


def test_an_update_counts_by_its_samples(client):
    trained = {"w": torch.tensor([5.0, 5.0, 5.0])}
    someone, script = client(trained, num_examples=7)
    update = FedAvg().train(Message(weights=WEIGHTS, masks=MASKS), someone)
    assert script.fits == [(WEIGHTS, MASKS, {}, [])]
    assert (update.weights, update.kind, update.weight, update.votes) == (trained, "weights", 7, None)
    assert (update.shared, update.memory, update.metrics) == (None, None, {"train_loss": 0.5})
    assert isinstance(FedAvg().reducer(), CoverageMean)


def test_the_mean_is_adopted_where_somebody_voted():
    server = ServerState(round=2, weights=WEIGHTS, extra={"kept": WEIGHTS})
    mean = {"w": torch.tensor([10.0, 20.0, 0.0])}
    merged = Merged(weights=mean, covered={"w": torch.tensor([True, True, False])})
    assert FedAvg().aggregate(server, merged).weights["w"].tolist() == [10, 20, 3]
    assert FedAvg().aggregate(server, Merged(weights=mean, covered={})).weights["w"].tolist() == [10, 20, 0]
    assert FedAvg().aggregate(server, merged).extra == server.extra
    differences = Merged(weights=mean, covered={"w": torch.tensor([True, True, False])}, kind="difference")
    assert FedAvg().aggregate(server, differences).weights["w"].tolist() == [11, 22, 3]


def test_votes_are_for_what_is_held_and_may_change():
    trainable = {"w": torch.tensor([True, True, False]), "v": torch.tensor([False])}
    both = FedAvg().may_vote(Message(weights=WEIGHTS, masks=MASKS, trainable=trainable))
    assert {name: mask.tolist() for name, mask in both.items()} == {"w": [True, False, False], "v": [False]}
    assert FedAvg().may_vote(Message(weights=WEIGHTS, masks=MASKS)) == MASKS
    assert FedAvg().may_vote(Message(weights=WEIGHTS)) == {}


def test_costs_of_dense_training(facts):
    # 2 epochs * 7 samples * 3 passes * 34; 18 numbers of 4 bytes
    assert FedAvg().costs(facts()) == Costs(
        flops_paper=1428, flops_analytic=1428, bytes_down_paper=72, bytes_up_paper=72
    )


def test_costs_under_a_mask(facts):
    # layer a keeps 4 of 10: 2 * 10 * .4 + 2 + 12 = 22, and 14 * 3 * 22; 4 + 2 + 6 numbers
    masks = {"a.weight": torch.tensor([[True, True, False, False, False]] * 2)}
    assert FedAvg().costs(facts(masks)) == Costs(
        flops_paper=924, flops_analytic=924, bytes_down_paper=48, bytes_up_paper=48
    )


def test_costs_with_a_frozen_first_layer(facts):
    # forward 34, backward of layer b alone 2 * 12: 14 * 58; the paper's formula knows no freezing
    costs = FedAvg().costs(facts(trainable={"a.weight": torch.zeros(2, 5, dtype=torch.bool)}))
    assert (costs.flops_paper, costs.flops_analytic) == (1428, 812)
