"""LG-FedAvg: the body stays with its client."""

from __future__ import annotations

import pytest

from helpers.freezing import BUFFERS, HEAD, WEIGHTS, B, started, views
from lightning_sparsefl import FedAvg, LGFedAvg, Local
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.types import Message
from lightning_sparsefl.wire import Codec

TRAINED = {name: value + 1 for name, value in WEIGHTS.items()}


@pytest.mark.filterwarnings("ignore:Clients keep the whole model")
@pytest.mark.parametrize(
    ("layers", "shared"), [(0, set()), (1, HEAD), (2, HEAD | B | {"b.mean"}), (3, set(WEIGHTS) - {"positions"})]
)
def test_the_last_layers_travel_with_their_buffers(layers, shared, client):
    method, (person,) = LGFedAvg(layers_shared=layers), views(1.0)
    message = method.download(started(method, [person]), person)
    assert set(message.weights) == shared
    update = method.train(message, client(TRAINED, initial=WEIGHTS, buffers=BUFFERS)[0])
    codec = Codec(WEIGHTS)
    assert set(codec.decode_update(codec.encode_update(update, message), message).weights) == shared
    assert set(update.memory["own"]) == set(WEIGHTS) - shared
    assert update.weight == 1


def test_refuses_more_layers_than_the_model_has():
    with pytest.raises(InvalidOption, match=r"`algorithm.layers_shared` is 4; expected at most 3, the layers"):
        started(LGFedAvg(layers_shared=4), views(1.0))
    with pytest.raises(InvalidOption, match=r"`algorithm.layers_shared` is -1; expected a whole number >= 0"):
        LGFedAvg(layers_shared=-1)


def test_costs_are_those_of_the_shared_layers(facts):
    message = Message(weights={"b.weight": facts().message.weights["b.weight"]})
    costs = LGFedAvg(layers_shared=1).costs(facts(message=message))
    assert costs.flops_paper == FedAvg().costs(facts()).flops_paper
    assert costs.bytes_down_paper == costs.bytes_up_paper == 4 * 6


def test_a_model_of_which_all_layers_are_shared_is_told(fleet):
    weights = {name: TRAINED[name] for name in HEAD}
    with pytest.warns(UserWarning, match="Clients keep no layer of the model and share all of it, as with `FedAvg`"):
        LGFedAvg(layers_shared=1).init(weights, fleet())


@pytest.mark.filterwarnings("ignore:Clients keep the whole model")
def test_without_shared_layers_it_is_local_training(federation):
    runs = [federation(each, folder=type(each).__name__) for each in (LGFedAvg(layers_shared=0), Local())]
    ours, theirs = ({k: v for k, v in run.summary.items() if k.startswith("personal/")} for run in runs)
    assert ours == theirs
    assert ours


def test_a_trained_module_is_where_clients_start(client):
    someone, script = client(TRAINED, initial=WEIGHTS, buffers=BUFFERS)
    LGFedAvg(layers_shared=1).train(Message(weights={name: TRAINED[name] for name in HEAD}), someone)
    ((start, *_),) = script.fits
    assert {name: start[name] for name in HEAD} == {name: TRAINED[name] for name in HEAD}
    assert all(start[name] is WEIGHTS[name] for name in WEIGHTS.keys() - HEAD)
