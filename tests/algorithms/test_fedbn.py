"""FedBN: norms and their statistics stay with the client."""

from __future__ import annotations

import pytest
import torch

from helpers.networks import Classifier
from lightning_sparsefl import FedAvg, FedBN
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.models import MLP
from lightning_sparsefl.sparse.parts import norms_of

NORM = {"net.1.weight", "net.1.bias", "net.1.running_mean", "net.1.running_var"}
BUFFERS = frozenset({"net.1.running_mean", "net.1.running_var"})


class Model:
    """What a fleet asks of the object that holds the model."""

    def __init__(self, module):
        self.norms, self.units = norms_of(module), ()


def begin(view):
    module = Classifier()
    weights = {**dict(module.named_parameters()), **{n: b for n, b in module.named_buffers() if n in BUFFERS}}
    fleet = Fleet([view()], BUFFERS, torch.device("cpu"), Model(module))
    return weights, FedBN().init(weights, fleet)


def test_refuses_another_mean():
    with pytest.raises(InvalidOption, match=r"`algorithm.mean` is 'median'; expected one of 'uniform', 'samples'"):
        FedBN(mean="median")


def test_norms_are_in_no_message_and_no_update(view, client):
    weights, server = begin(view)
    message = FedBN().download(server, view())
    assert set(message.weights) == set(weights) - NORM
    update = FedBN().train(message, client(weights, initial=weights, buffers=BUFFERS)[0])
    assert set(update.weights) == set(weights) - NORM
    assert set(update.memory["own"]) == NORM
    assert update.weight == 1
    assert FedBN(mean="samples").train(message, client(weights, initial=weights)[0]).weight == 7


def test_costs_are_those_of_the_other_layers(facts):
    assert FedBN().costs(facts()) == FedAvg().costs(facts())


@pytest.mark.parametrize("buffers", ["average", "local", "server"])
def test_statistics_stay_with_the_client(federation, last, buffers):
    content = last(federation(FedBN(), federation={"buffers": buffers}))
    first = last(federation(FedBN(), rounds=1, federation={"buffers": buffers}))
    assert {name: content["state_dict"][name] for name in NORM} == {name: first["state_dict"][name] for name in NORM}
    records = content["records"]["nodes"]
    for record in records.values():  # the engine keeps local statistics, the method the others
        kept = record["buffers"] if buffers == "local" else record["memory"]["own"]
        assert (kept.keys() >= BUFFERS) == (buffers != "server")
        assert record["memory"]["own"].keys() >= NORM - BUFFERS
    norms = [record["memory"]["own"]["net.1.weight"] for record in records.values()]
    assert all(one != other for place, one in enumerate(norms) for other in norms[:place])


def test_a_model_without_norms_is_fedavg(federation, last):
    states = []
    for method in (FedBN(mean="samples"), FedAvg()):
        torch.manual_seed(0)
        module = MLP(num_classes=4, sample_shape=(1, 1, 8), hidden=(16,))
        states.append(last(federation(method, folder=type(method).__name__, module=module))["state_dict"])
    assert states[0] == states[1]
