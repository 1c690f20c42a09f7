from __future__ import annotations

import pytest
import torch

from helpers.networks import Classifier
from lightning_sparsefl import Ditto, FedAvg
from lightning_sparsefl.callbacks import ProximalTerm
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean
from lightning_sparsefl.types import FitResult, Message

MESSAGE = Message(weights={"w": torch.tensor([1.0, 2.0])})
OWN = {"w": torch.tensor([5.0, 6.0])}
TRAINED = {"w": torch.tensor([3.0, 4.0])}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": -0.1}, r"`algorithm.lam` is -0.1; expected a number >= 0"),
        ({"lam": float("nan")}, r"`algorithm.lam` is nan; expected a number >= 0"),
        ({"lam": "1"}, r"`algorithm.lam` is '1'; expected a number"),
        ({"lams": (1.0, -1.0)}, r"`algorithm.lams` is \(1.0, -1.0\); expected numbers >= 0"),
        ({"lams": "1"}, r"`algorithm.lams` is '1'; expected a list of numbers"),
        ({"global_epochs": 0}, r"`algorithm.global_epochs` is 0; expected a whole number >= 1, or null"),
        ({"personal_epochs": 1.5}, r"`algorithm.personal_epochs` is 1.5; expected a whole number or null"),
    ],
)
def test_refuses_options_out_of_range(options, message):
    with pytest.raises(InvalidOption, match=message):
        Ditto(**options)


def test_the_first_participation_trains_the_received_and_the_initial_weights(client):
    someone, script = client(TRAINED)
    update = Ditto(lam=0.5).train(MESSAGE, someone)
    common, (weights, masks, trainable, (pull,)) = script.fits
    assert common == (MESSAGE.weights, {}, {}, [])
    assert (weights, masks, trainable) == ({}, {}, {})  # missing names take the run's initial values
    assert isinstance(pull, ProximalTerm)
    assert (pull.strength, pull.anchor) == (0.5, MESSAGE.weights)
    assert (update.weights, update.kind, update.weight, update.votes) == (TRAINED, "weights", 7, None)
    assert (update.memory, update.shared, update.extra) == ({"weights": TRAINED}, None, {})


def test_later_ones_go_on_with_the_personal_model(client):
    someone, script = client(TRAINED, memory={"weights": OWN})
    Ditto().train(MESSAGE, someone)
    assert [weights for weights, *_ in script.fits] == [MESSAGE.weights, OWN]


def test_each_model_has_its_epochs(client, monkeypatch):
    someone, script = client(TRAINED)
    seen, fit = [], script.fit

    def noted(*args, epochs=None, **rest):
        seen.append(epochs)
        return fit(*args, epochs=epochs, **rest)

    monkeypatch.setattr(script, "fit", noted)
    Ditto(global_epochs=2, personal_epochs=3).train(MESSAGE, someone)
    Ditto().train(MESSAGE, someone)
    assert seen == [2, 3, None, None]


@pytest.mark.parametrize(("metric", "best"), [("val_loss", 1.0), ("val_acc", 0.1)])
def test_of_several_strengths_the_best_on_validation_data_is_kept(client, monkeypatch, metric, best):
    someone, script = client(memory={"weights": OWN})

    def fit(client, weights, masks, trainable, callbacks, **rest):
        script.fits.append((weights, masks, trainable, callbacks))
        strength = callbacks[0].strength if callbacks else 0.0
        return FitResult(weights={"w": torch.tensor([strength])}, metrics={}, steps=1)

    def evaluate(client, weights, split):
        assert split == "val"
        return {metric: abs(weights["w"].item() - 0.9)}

    monkeypatch.setattr(script, "fit", fit)
    monkeypatch.setattr(script, "evaluate", evaluate, raising=False)
    update = Ditto(lams=(0.1, 1.0, 1.5), metric=metric).train(MESSAGE, someone)
    assert [weights for weights, *_ in script.fits] == [MESSAGE.weights, OWN, OWN, OWN]
    assert update.weights["w"].item() == 0.0
    assert update.memory["weights"]["w"].item() == pytest.approx(best)


def test_a_strength_that_makes_training_diverge_is_not_chosen(client, monkeypatch):
    someone, script = client()
    losses = iter([float("nan"), 0.5, 0.7, float("nan"), float("nan"), float("nan")])

    def fit(client, weights, masks, trainable, callbacks, **rest):
        strength = callbacks[0].strength if callbacks else 0.0
        return FitResult(weights={"w": torch.tensor([strength])}, metrics={}, steps=1)

    monkeypatch.setattr(script, "fit", fit)
    monkeypatch.setattr(script, "evaluate", lambda *_: {"val_loss": next(losses)}, raising=False)
    for expected in (2.0, 30.0):  # where all diverge, it is the first
        update = Ditto(lams=(30.0, 2.0, 1.0)).train(MESSAGE, someone)
        assert update.memory["weights"]["w"].item() == expected


def test_a_metric_that_the_module_does_not_log_is_named(federation):
    expected = (
        r"`algorithm.metric` is 'val_loss', which the module's `validation_step` does not log; expected .*val_acc"
    )
    with pytest.raises(InvalidOption, match=expected):
        federation(Ditto(lams=(0.1, 1.0)), rounds=1)


def test_a_client_is_scored_with_its_personal_model(client):
    assert Ditto().personalize(MESSAGE, client(memory={"weights": OWN})[0]) == OWN
    assert Ditto().personalize(MESSAGE, client()[0]) == MESSAGE.weights
    someone, _ = client(TRAINED)
    update = Ditto().train(MESSAGE, someone)
    assert Ditto().trained(MESSAGE, update) == TRAINED


def test_costs_are_those_of_both_models(facts):
    assert isinstance(Ditto().reducer(), CoverageMean)
    dense, both = FedAvg().costs(facts()), Ditto().costs(facts())
    assert (both.flops_paper, both.flops_analytic) == (2 * dense.flops_paper, 2 * dense.flops_analytic)
    assert (both.bytes_down_paper, both.bytes_up_paper) == (dense.bytes_down_paper, dense.bytes_up_paper)
    # two epochs of FedAvg, as one and one
    assert Ditto(global_epochs=1, personal_epochs=1).costs(facts()) == dense
    assert Ditto(global_epochs=1).costs(facts()).flops_paper == 1.5 * dense.flops_paper
    assert Ditto(lams=(0.1, 1, 2)).costs(facts()).flops_paper == 4 * dense.flops_paper


def test_the_global_model_is_that_of_fedavg(federation, last):
    states = []
    for algorithm in (FedAvg(), Ditto(lam=3.0), Ditto(lam=0.0, personal_epochs=1)):
        content = last(federation(algorithm, rounds=2, folder=repr(algorithm)))
        states.append(content["state_dict"])
    assert states[0] == states[1] == states[2]


class Tells(Classifier):
    """Logs the running mean that it is scored with."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_mean", self.net[1].running_mean.sum())


def test_the_personal_model_has_statistics_of_its_own(federation):
    """With `buffers: local` the engine keeps those of the global model, which the personal one must not take."""
    means = []
    for buffers in ("average", "local"):  # in the first round both start from the run's initial statistics
        torch.manual_seed(0)
        options = {"buffers": buffers, "unseen_clients": 2}  # the other four take part
        trainer = federation(Ditto(lam=0.0), rounds=1, folder=buffers, module=Tells(), federation=options)
        means.append(trainer.summary["personal/val_mean"])
    assert means[0] == means[1]
