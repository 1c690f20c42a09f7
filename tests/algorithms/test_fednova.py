"""FedNova without a federation: normalised changes, and the ratios of learning rates."""

from __future__ import annotations

import pytest
import torch

from helpers.quadratics import CURVES, Descent, path, rounds
from lightning_sparsefl import FedAvg, FedNova
from lightning_sparsefl.callbacks import ProximalTerm, StepMeter
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.local.round_lr import ScaleLearningRates
from lightning_sparsefl.types import Merged, Message, ServerState


def clients(*steps, lr=0.1, momentum=0.0):
    return [Descent(curve, count, lr, momentum) for curve, count in zip(CURVES, steps, strict=True)]


def test_two_quadratics_with_1_and_4_steps():
    states, _ = rounds(FedNova(), clients(1, 4), 400)
    assert path(states)[0] == pytest.approx(-0.11246875, abs=1e-7)
    assert path(states)[-1] == pytest.approx(-0.3102854, abs=1e-6)
    averaged, _ = rounds(FedAvg(), clients(1, 4), 400)
    assert path(averaged)[-1] == pytest.approx(-0.7674148, abs=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_equal_steps_it_is_fedavg(momentum):
    ours, _ = rounds(FedNova(), clients(3, 3, momentum=momentum), 5)
    theirs, _ = rounds(FedAvg(), clients(3, 3, momentum=momentum), 5)
    assert path(ours) == pytest.approx(path(theirs), abs=1e-6)


def test_a_change_is_divided_by_its_norm_and_buffers_are_not(client, fleet):
    weights = {"w": torch.zeros(1), "mean": torch.zeros(1)}
    server = FedNova().init(weights, fleet(buffers=["mean"]))
    message = FedNova().download(server, None)
    someone, script = client({"w": torch.tensor([2.6288]), "mean": torch.tensor([4.0])})
    before = script.fit

    def fit(*args, **kwargs):
        for _ in range(5):
            args[4][0].count({"lr": 0.1, "momentum": 0.9})
        return before(*args, **kwargs)

    script.fit = fit
    update = FedNova().train(message, someone)
    assert update.weights["w"].item() == pytest.approx(0.2, abs=1e-5)
    assert update.weights["mean"].item() == 4.0
    assert update.extra["nova"]["norm"].item() == pytest.approx(13.1441)
    assert list(update.extra["nova"]) == ["norm"]
    assert FedNova().trained(message, update)["w"].item() == pytest.approx(2.6288)
    merged = Merged(weights=update.weights, covered={}, kind="difference", extra=update.extra)
    assert FedNova().aggregate(server, merged).weights["w"].item() == pytest.approx(2.6288)
    assert FedNova().aggregate(server, merged).weights["mean"].item() == 4.0


def test_with_a_proximal_term_the_mean_is_of_steps(client):
    method = FedNova(mu=1.0)
    message = Message(weights={"w": torch.zeros(1)})
    someone, script = client({"w": torch.ones(1)})
    before = script.fit

    def fit(*args, **kwargs):
        args[4][1].count({"lr": 0.1})
        return before(*args, **kwargs)

    script.fit = fit
    update = method.train(message, someone)
    term, meter = script.fits[0][3]
    assert isinstance(term, ProximalTerm)
    assert isinstance(meter, StepMeter)
    assert (term.strength, meter.mu) == (1.0, 1.0)
    assert set(update.extra["nova"]) == {"norm", "steps"}
    server = method.init(message.weights, type("", (), {"buffers": (), "device": torch.device("cpu")})())
    extra = {"nova": {"norm": torch.tensor(2.71), "steps": torch.tensor(3.0)}}
    merged = Merged(weights={"w": torch.ones(1)}, covered={}, kind="difference", extra=extra)
    assert method.aggregate(server, merged).weights["w"].item() == 3.0


def test_a_client_without_a_step_sends_nothing(client):
    someone, _ = client({"w": torch.ones(1)})
    update = FedNova().train(Message(weights={"w": torch.ones(1)}), someone)
    assert (update.weights, update.extra, update.weight) == ({}, {}, 7)
    server = ServerState(round=0, weights={"w": torch.ones(1)}, extra={"buffers": {}})
    nobody = Merged(weights={"w": torch.zeros(1)}, covered={"w": torch.tensor([False])})
    assert FedNova().aggregate(server, nobody).weights["w"].item() == 1.0


def test_local_lr_scales_the_rates_by_the_mean_of_all_clients():
    method = FedNova(variant="local_lr", momentum=0.0)
    workers = clients(1, 4)
    states, _ = rounds(method, workers, 1)
    rates = states[0].extra["nova"]["rates"]
    assert rates.tolist() == [2.5, 0.625]
    ends = []
    for (curvature, lowest), steps, rate in zip(CURVES, (1, 4), rates.tolist(), strict=True):
        w = 0.0
        for _ in range(steps):
            w -= 0.1 * rate * curvature * (w - lowest)
        ends.append(w)
    assert path(states)[0] == pytest.approx(sum(ends) / 2)


def test_local_lr_by_the_published_formula():
    """a = (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho), for clients with 36 and 18 steps."""
    norms = [(tau - 0.9 * (1 - 0.9**tau) / 0.1) / 0.1 for tau in (36, 18)]
    states, _ = rounds(FedNova(variant="local_lr"), clients(36, 18), 1)
    expected = [sum(norms) / 2 / norm for norm in norms]
    assert states[0].extra["nova"]["rates"].tolist() == pytest.approx(expected, rel=1e-5)
    callback = FedNova(variant="local_lr").callbacks(
        Message(weights={}, extra={"nova": {"rate": torch.tensor(0.5)}}), None
    )
    assert isinstance(callback[0], ScaleLearningRates)
    assert callback[0].factor == 0.5


def test_costs(facts):
    ours, theirs = FedNova().costs(facts()), FedAvg().costs(facts())
    assert ours.bytes_up_paper == theirs.bytes_up_paper + 4
    assert (ours.bytes_down_paper, ours.flops_paper) == (theirs.bytes_down_paper, theirs.flops_paper)
    assert FedNova(mu=0.1).costs(facts()).bytes_up_paper == theirs.bytes_up_paper + 8  # a_k and the number of steps
    assert FedNova(variant="local_lr").costs(facts()) == theirs


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"variant": "x"}, "`algorithm.variant` is 'x'; expected one of 'normalized', 'local_lr'"),
        ({"mu": -1}, "`algorithm.mu` is -1; expected a number >= 0"),
        ({"mu": float("nan")}, "`algorithm.mu` is nan; expected a number >= 0"),
        ({"mu": 0.1, "variant": "local_lr"}, "`algorithm.mu` is 0.1; expected 0 with `algorithm.variant: local_lr`"),
        ({"momentum": 1.0}, r"`algorithm.momentum` is 1.0; expected a number in \[0, 1\)"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(options, said):
    with pytest.raises(InvalidOption, match=said):
        FedNova(**options)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("variant", ["normalized", "local_lr"])
def test_clients_with_different_epochs_through_the_wire(federation, last, variant):
    options = {"rounds": 2, "federation": {"local_epochs": [1, 3]}}
    counted = federation(FedNova(variant=variant), **options, folder="counted")
    options["federation"]["wire"] = "encode"
    encoded = federation(FedNova(variant=variant), **options, folder="encoded")
    plain = federation(FedAvg(), **options, folder="plain")
    assert last(encoded)["state_dict"] == last(counted)["state_dict"] != last(plain)["state_dict"]
