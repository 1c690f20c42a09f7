from __future__ import annotations

import torch

from lightning_sparsefl import Local
from lightning_sparsefl.types import Costs, Merged, Message, ServerState

COMMON = {"w": torch.tensor([1.0, 2.0])}
OWN = {"w": torch.tensor([5.0, 6.0])}
SERVER = ServerState(round=3, weights=COMMON)


def test_weights_are_sent_once(view):
    assert Local().download(SERVER, view()) == Message(weights=COMMON)
    assert Local().download(SERVER, view(shared={"started": True})) == Message(weights={})


def test_the_first_fit_starts_from_the_common_weights(client):
    someone, script = client(OWN)
    update = Local().train(Message(weights=COMMON), someone)
    assert script.fits == [(COMMON, {}, {}, [])]
    assert update.weights == {}
    assert update.memory == {"weights": OWN}
    assert (update.weight, update.shared, update.metrics) == (7, {"started": True}, {"train_loss": 0.5})


def test_later_fits_go_on_from_the_clients_own(client):
    someone, script = client(COMMON, memory={"weights": OWN})
    update = Local().train(Message(weights={}), someone)
    assert script.fits == [(OWN, {}, {}, [])]
    assert update.memory == {"weights": COMMON}


def test_a_client_is_scored_with_its_own_weights(client):
    assert Local().personalize(Message(weights={}), client(memory={"weights": OWN})[0]) == OWN
    assert Local().personalize(Message(weights=COMMON), client()[0]) == COMMON


def test_the_server_learns_nothing():
    nobody = Merged(weights={"w": torch.zeros(2)}, covered={"w": torch.zeros(2, dtype=torch.bool)})
    assert Local().aggregate(SERVER, nobody).weights["w"].tolist() == [1, 2]


def test_costs(facts):
    first = Local().costs(facts())
    assert first == Costs(flops_paper=1428, flops_analytic=1428, bytes_down_paper=0, bytes_up_paper=0)
    assert Local().costs(facts(message=Message(weights={}))) == first
