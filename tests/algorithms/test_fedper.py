"""FedPer: the head stays with its client."""

from __future__ import annotations

import pytest
import torch

from helpers.freezing import BUFFERS, HEAD, WEIGHTS, started, views
from lightning_sparsefl import FedAvg, FedPer, Local
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.testing.contents import comparable
from lightning_sparsefl.types import Message
from lightning_sparsefl.wire import Codec

SHARED = set(WEIGHTS) - HEAD
TRAINED = {name: value + 1 for name, value in WEIGHTS.items()}
OWN = {name: value + 5 for name, value in WEIGHTS.items() if name in HEAD}


@pytest.fixture
def sent():
    (person,) = views(1.0)
    return FedPer().download(started(FedPer(), [person]), person)


def test_refuses_a_layer_that_the_model_does_not_have():
    with pytest.raises(InvalidOption, match=r"`algorithm\.own` has the pattern 'fc9', which matches no tensor"):
        started(FedPer(own=("head", "fc9")), views(1.0))


def test_a_model_of_which_nothing_is_shared_is_named():
    with pytest.warns(UserWarning, match=r"Clients keep the whole model \(.*\) and share nothing"):
        started(FedPer(own=("*",)), views(1.0))


def test_own_layers_are_in_no_message_and_no_update(sent, client):
    someone, _ = client(TRAINED, initial=WEIGHTS, buffers=BUFFERS)
    codec = Codec(WEIGHTS)
    update = FedPer().train(sent, someone)
    assert set(codec.decode_message(codec.encode_message(sent)).weights) == SHARED
    assert set(codec.decode_update(codec.encode_update(update, sent), sent).weights) == SHARED
    assert set(update.memory["own"]) == HEAD
    assert (update.weight, update.kind, update.votes) == (7, "weights", None)


def test_a_client_starts_from_the_initial_layers_and_then_from_its_own(sent, client):
    moved = Message(weights={name: value + 2 for name, value in sent.weights.items()})
    for memory, own in (({}, WEIGHTS), ({"own": OWN}, OWN)):
        someone, script = client(TRAINED, memory=memory, initial=WEIGHTS, buffers=BUFFERS)
        update = FedPer().train(moved, someone)
        ((start, masks, trainable, callbacks),) = script.fits
        assert (masks, trainable, callbacks) == ({}, {}, [])
        expected = {name: own[name] if name in HEAD else WEIGHTS[name] + 2 for name in WEIGHTS}
        assert comparable(start) == comparable(expected) == comparable(FedPer().personalize(moved, someone))
        assert comparable(FedPer().trained(moved, update)) == comparable(
            {name: TRAINED[name] for name in [*moved.weights, *update.memory["own"]]}
        )


def test_costs_are_those_of_the_shared_layers(facts):
    message = Message(weights={"a.weight": torch.ones(2, 5), "a.bias": torch.ones(2)})
    costs = FedPer().costs(facts(message=message))
    assert costs.flops_paper == costs.flops_analytic == FedAvg().costs(facts()).flops_paper == 14 * 3 * 34
    assert costs.bytes_down_paper == costs.bytes_up_paper == 4 * 12


def scores(trainer, kind):
    return {key: value for key, value in trainer.summary.items() if key.startswith(f"{kind}/")}


def test_without_own_layers_it_is_fedavg(federation, last):
    runs = [federation(method, folder=type(method).__name__) for method in (FedPer(own=()), FedAvg())]
    own, plain = (last(run) for run in runs)
    assert own["state_dict"] == plain["state_dict"]
    assert scores(runs[0], "personal") == scores(runs[1], "personal")


@pytest.mark.filterwarnings("ignore:Clients keep the whole model")
def test_without_shared_layers_it_is_local_training(federation, last):
    runs = [federation(method, folder=type(method).__name__) for method in (FedPer(own=("*",)), Local())]
    own, local = (
        {client: record["memory"] for client, record in last(run)["records"]["nodes"].items()} for run in runs
    )
    assert {client: memory["own"] for client, memory in own.items()} == {
        client: memory["weights"] for client, memory in local.items()
    }
    assert scores(runs[0], "personal") == scores(runs[1], "personal")


@pytest.mark.parametrize("buffers", ["average", "local", "server"])
def test_the_servers_own_layers_stay_as_they_were(federation, last, buffers):
    weights = last(federation(FedPer(), federation={"buffers": buffers}))["state_dict"]
    untrained = last(federation(FedPer(), rounds=1, federation={"buffers": buffers}))["state_dict"]
    assert weights["net.4.weight"] == untrained["net.4.weight"]
    assert weights["net.0.weight"] != untrained["net.0.weight"]
