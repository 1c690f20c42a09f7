from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lightning_sparsefl import FedAvg, PFedMe
from lightning_sparsefl.callbacks import MoreauEnvelope
from lightning_sparsefl.errors import InvalidOption, SparseFLError
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean
from lightning_sparsefl.types import Merged, Message, Update

WEIGHTS = {"w": torch.tensor([1.0, 2.0]), "buffer": torch.tensor([0.5])}
MESSAGE = Message(weights=WEIGHTS)
TRAINED = {"w": torch.tensor([3.0, 4.0]), "buffer": torch.tensor([0.7])}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": 0}, r"`algorithm.lam` is 0; expected a number above 0"),
        ({"personal_lr": -1}, r"`algorithm.personal_lr` is -1; expected a number above 0"),
        ({"beta": 0}, r"`algorithm.beta` is 0; expected a number above 0"),
        ({"steps": 0}, r"`algorithm.steps` is 0; expected a whole number >= 1"),
        ({"steps": 2.5}, r"`algorithm.steps` is 2.5; expected a whole number"),
        ({"decay": -0.1}, r"`algorithm.decay` is -0.1; expected a number >= 0"),
    ],
)
def test_refuses_options_out_of_range(options, message):
    with pytest.raises(InvalidOption, match=message):
        PFedMe(**options)


def test_a_client_keeps_its_personal_weights(client):
    someone, script = client(TRAINED)
    personal = {"w": torch.tensor([9.0, 9.0])}

    def fit(client, weights, masks, trainable, callbacks, **rest):
        callbacks[0].personal = personal
        return type(script).fit(script, client, weights, masks, trainable, callbacks, **rest)

    script.fit = fit
    method = PFedMe(lam=2.0, personal_lr=0.3, steps=4, decay=0.1)
    update = method.train(MESSAGE, someone)
    ((weights, masks, trainable, (envelope,)),) = script.fits
    assert (weights, masks, trainable) == (WEIGHTS, {}, {})
    assert isinstance(envelope, MoreauEnvelope)
    assert (envelope.strength, envelope.lr, envelope.steps, envelope.decay) == (2.0, 0.3, 4, 0.1)
    assert (update.weights, update.kind, update.weight, update.votes) == (TRAINED, "weights", 7, None)
    assert update.memory == {"weights": {"w": personal["w"], "buffer": TRAINED["buffer"]}}
    assert method.trained(MESSAGE, update) == update.memory["weights"]
    assert method.personalize(MESSAGE, client(memory=update.memory)[0]) == update.memory["weights"]
    assert method.personalize(MESSAGE, client()[0]) == WEIGHTS


@pytest.mark.parametrize(("beta", "expected"), [(1.0, [3.0, 4.0]), (2.0, [5.0, 6.0]), (0.5, [2.0, 3.0])])
def test_the_server_moves_by_a_multiple_of_the_mean_change(fleet, beta, expected):
    method = PFedMe(beta=beta)
    server = method.init(WEIGHTS, fleet(buffers=("buffer",)))
    state = method.aggregate(server, Merged(weights=TRAINED, covered={}))
    assert state.weights["w"].tolist() == expected
    assert state.weights["buffer"].tolist() == TRAINED["buffer"].tolist()
    assert isinstance(method.reducer(), CoverageMean)


def test_buffers_are_marked_where_that_matters(fleet):
    assert PFedMe().init(WEIGHTS, fleet(buffers=("buffer",))).extra == {}
    assert PFedMe(beta=2).init(WEIGHTS, fleet()).extra == {}
    assert set(PFedMe(beta=2).init(WEIGHTS, fleet(buffers=("buffer",))).extra["buffers"]) == {"buffer"}


def test_costs_are_those_of_all_steps(facts):
    dense, all_steps = FedAvg().costs(facts()), PFedMe(steps=5).costs(facts())
    assert (all_steps.flops_paper, all_steps.flops_analytic) == (5 * dense.flops_paper, 5 * dense.flops_analytic)
    assert (all_steps.bytes_down_paper, all_steps.bytes_up_paper) == (dense.bytes_down_paper, dense.bytes_up_paper)


def test_a_learning_rate_beyond_the_envelope_is_refused_in_one_sentence(federation):
    expected = (
        r"`MoreauEnvelope\(strength=15.0\)`, the `lam` of PFedMe, times the optimizer's learning rate is 1.5; "
        r"expected a product below 1"
    )
    with pytest.raises(InvalidOption, match=expected):
        federation(PFedMe(), rounds=1)


def test_running_variances_stay_positive_beyond_the_mean(federation):
    module = federation.module()
    federation(PFedMe(lam=2.0, beta=2.0), rounds=3, module=module)
    assert bool((module.net[1].running_var > 0).all())


@dataclass(frozen=True, kw_only=True)
class Masked(FedAvg):
    """Trains by an envelope under a mask, under which theta would not be."""

    def download(self, server, view):
        masks = {name: weight > 0 for name, weight in server.weights.items() if weight.dim() > 1}
        return Message(weights=server.weights, masks=masks)

    def train(self, message, client):
        envelope = MoreauEnvelope(strength=2.0, lr=0.1)
        return Update(client.fit(message.weights, message.masks, callbacks=[envelope]).weights)


@pytest.mark.parametrize("engine", ["fast", "stacked"])
def test_an_envelope_under_masks_is_refused(engine, federation):
    with pytest.raises(SparseFLError, match=r"`MoreauEnvelope` passes .* which `StaticMask` does not mask"):
        federation(Masked(), federation={"local_engine": engine})
