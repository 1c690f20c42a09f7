from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import APFL, FedAvg
from lightning_sparsefl.callbacks import PersonalMixture
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean
from lightning_sparsefl.types import Message

MESSAGE = Message(weights={"w": torch.tensor([1.0, 2.0]), "buffer": torch.tensor([0.5])})
TRAINED = {"w": torch.tensor([3.0, 4.0]), "buffer": torch.tensor([0.7])}
INITIAL = {"w": torch.tensor([5.0, 8.0]), "buffer": torch.tensor([0.0])}


@pytest.fixture
def drawn(client):
    """A client whose fit leaves its personal weights alone."""

    def make(memory=None):
        someone, script = client(TRAINED, memory=memory)
        script.initial = INITIAL

        def fit(client, weights, masks, trainable, callbacks, **rest):
            (mixture,) = callbacks
            mixture.personal = {"w": mixture.personal["w"]}  # a fit knows parameters only
            return type(script).fit(script, client, weights, masks, trainable, callbacks, **rest)

        script.fit = fit
        return someone, script

    return make


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, r"`algorithm.alpha` is 1.5; expected a number in \[0, 1\]"),
        ({"alpha": float("nan")}, r"`algorithm.alpha` is nan; expected a number in \[0, 1\]"),
        ({"alpha": None}, r"`algorithm.alpha` is None; expected a number"),
    ],
)
def test_refuses_options_out_of_range(options, message):
    with pytest.raises(InvalidOption, match=message):
        APFL(**options)


def test_personal_weights_start_from_those_of_the_run(drawn):
    someone, script = drawn()
    update = APFL(alpha=0.25, adaptive=True).train(MESSAGE, someone)
    ((weights, masks, trainable, (mixture,)),) = script.fits
    assert (weights, masks, trainable) == (MESSAGE.weights, {}, {})
    assert isinstance(mixture, PersonalMixture)
    assert (mixture.alpha, mixture.adaptive, mixture.personal["w"].tolist()) == (0.25, True, [5.0, 8.0])
    assert (update.weights, update.kind, update.weight, update.votes) == (TRAINED, "weights", 7, None)
    assert (update.shared, update.extra) == (None, {})
    # 1/4 of the personal weights, 3/4 of the trained ones, and the buffers of the latter
    assert update.memory["mixture"]["w"].tolist() == [3.5, 5.0]
    assert update.memory["mixture"]["buffer"] is TRAINED["buffer"]


def test_later_participations_go_on_with_the_clients_share(drawn):
    memory = {"alpha": 0.5, "personal": {"w": torch.tensor([1.0, 0.0])}, "mixture": {}}
    someone, script = drawn(memory)
    update = APFL(alpha=0.9).train(MESSAGE, someone)
    (mixture,) = script.fits[0][3]
    assert (mixture.alpha, mixture.personal["w"].tolist()) == (0.5, [1.0, 0.0])
    assert (update.memory["alpha"], update.memory["mixture"]["w"].tolist()) == (0.5, [2.0, 2.0])


def test_a_client_is_scored_with_its_mixture(drawn):
    method = APFL()
    someone, _ = drawn()
    update = method.train(MESSAGE, someone)
    assert method.trained(MESSAGE, update) is update.memory["mixture"]
    assert method.personalize(MESSAGE, drawn(update.memory)[0]) is update.memory["mixture"]
    assert method.personalize(MESSAGE, drawn()[0]) == MESSAGE.weights


def test_costs_are_those_of_two_gradients(facts):
    assert isinstance(APFL().reducer(), CoverageMean)
    dense, both = FedAvg().costs(facts()), APFL().costs(facts())
    assert (both.flops_paper, both.flops_analytic) == (2 * dense.flops_paper, 2 * dense.flops_analytic)
    assert (both.bytes_down_paper, both.bytes_up_paper) == (dense.bytes_down_paper, dense.bytes_up_paper)


def test_the_global_model_is_that_of_fedavg(federation, last):
    """With dropout and batch norm: the second gradient of a batch leaves no trace."""
    plain, fixed, adaptive = (
        last(federation(algorithm, rounds=2, folder=repr(algorithm)))["state_dict"]
        for algorithm in (FedAvg(), APFL(alpha=0.0), APFL(alpha=0.5, adaptive=True))
    )
    assert plain == fixed == adaptive


def test_shares_part_ways(federation, stored_records):
    trainer = federation(APFL(alpha=0.5, adaptive=True), rounds=3)
    nodes = stored_records(trainer.run_folder)["nodes"]
    shares = {versions[max(versions)]["memory"]["alpha"] for versions in nodes.values()}
    assert len(shares) > 2
    assert all(0 <= share <= 1 for share in shares)
