"""SCAFFOLD without a federation: rounds on two quadratics, what travels, and its edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.networks import Classifier
from helpers.quadratics import CURVES, Descent, path, rounds
from lightning_sparsefl import SCAFFOLD, FedAvg, FedNova
from lightning_sparsefl.callbacks import GradientOffset, StepMeter
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.types import Merged, Message


def clients(momentum=0.0):
    return [Descent(curve, 5, 0.1, momentum) for curve in CURVES]


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("momentum", "first"),
    [(0.0, [-0.21121, -0.3733769128, -0.4546854771]), (0.9, [-0.37456, -0.4563686363, -0.4893054525])],
)
def test_two_quadratics_end_at_the_minimum_of_their_mean(momentum, first):
    states, memories = rounds(SCAFFOLD(), clients(momentum), 200)
    assert path(states)[:3] == pytest.approx(first, abs=1e-9)
    assert path(states)[-1] == pytest.approx(-0.5, abs=1e-9)
    assert [memory["control"]["w"].item() for memory in memories] == pytest.approx([-1.5, 1.5])
    averaged, _ = rounds(FedAvg(), clients(), 200)
    assert path(averaged)[-1] == pytest.approx(-0.3402661, abs=1e-7)


def test_the_first_round_is_fedavg():
    ours, _ = rounds(SCAFFOLD(), clients(), 1)
    theirs, _ = rounds(FedAvg(), clients(), 1)
    assert path(ours) == path(theirs)


def test_the_servers_rate_scales_the_change():
    ours, _ = rounds(SCAFFOLD(lr=0.5), clients(), 1)
    assert path(ours)[0] == pytest.approx(-0.21121 / 2)


def test_control_variates_are_of_parameters_and_the_server_moves_by_the_share_of_the_fleet(fleet):
    weights = {"w": torch.zeros(2), "mean": torch.zeros(2)}
    server = SCAFFOLD(lr=0.5).init(weights, fleet(clients=8, buffers=["mean"]))
    assert list(server.extra["control"]) == ["w"]
    merged = Merged(
        weights={"w": torch.ones(2), "mean": torch.ones(2)},
        covered={},
        kind="difference",
        extra={"control": {"w": torch.full((2,), 4.0)}},
        reports={0: {}, 5: {}},
    )
    new = SCAFFOLD(lr=0.5).aggregate(server, merged)
    assert new.extra["control"]["w"].tolist() == [1.0, 1.0]
    assert new.weights["w"].tolist() == [0.5, 0.5]
    assert new.weights["mean"].tolist() == [1.0, 1.0]
    nobody = SCAFFOLD().aggregate(
        server, replace(merged, extra={}, kind="weights", covered={"w": torch.tensor([False])})
    )
    assert nobody.extra["control"]["w"].tolist() == [0.0, 0.0]


def test_clients_add_the_servers_control_variate_and_subtract_their_own(client):
    message = Message(weights={"w": torch.zeros(2)}, extra={"control": {"w": torch.tensor([1.0, 2.0])}})
    someone, script = client({"w": torch.ones(2)}, memory={"control": {"w": torch.tensor([0.5, 4.0])}})
    script.fit = counting(script.fit, steps=2)
    update = SCAFFOLD().train(message, someone)
    offset, meter = script.fits[0][3]
    assert isinstance(offset, GradientOffset)
    assert isinstance(meter, StepMeter)
    assert offset.offset["w"].tolist() == [0.5, -2.0]
    assert (update.weight, update.kind) == (1, "difference")
    change = update.extra["control"]["w"]  # -1 over a path of 2 x 0.25, less the server's
    assert change.tolist() == [-3.0, -4.0]
    assert torch.equal(update.memory["control"]["w"], change + torch.tensor([0.5, 4.0]))


def counting(fit, steps):
    """A fit whose meter counts steps at the learning rate 0.25."""

    def counted(client, weights, masks, trainable, callbacks, **options):
        for _ in range(steps):
            callbacks[1].count({"lr": 0.25})
        return fit(client, weights, masks, trainable, callbacks, **options)

    return counted


def test_a_client_without_a_step_keeps_its_control_variate(client):
    message = Message(weights={"w": torch.zeros(2)}, extra={"control": {"w": torch.ones(2)}})
    someone, _ = client({"w": torch.zeros(2)})
    update = SCAFFOLD().train(message, someone)
    assert (update.weights, update.extra, update.memory) == ({}, {}, None)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("method", [SCAFFOLD(), FedNova()], ids=repr)
def test_a_client_whose_batches_are_all_skipped_takes_no_part(federation, last, method):
    fits = []

    class Skips(Classifier):
        """Skips all batches of the second fit; has a hook for one client, so that each fit has its own start."""

        def on_before_backward(self, loss):
            pass

        def on_fit_start(self):
            fits.append(1)

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if len(fits) == 2 else loss

    content = last(federation(method, rounds=1, module=Skips()))
    assert len(fits) == 4
    if isinstance(method, SCAFFOLD):
        assert len(content["records"]["nodes"]) == 3


def test_scoring_needs_no_control_variate(fleet, view):
    server = SCAFFOLD().init({"w": torch.zeros(2)}, fleet())
    assert SCAFFOLD().download(server, view()).extra
    assert not SCAFFOLD().download_for(server, view(), "score").extra


def test_twice_the_bytes_of_fedavg(facts, federation):
    ours, theirs = SCAFFOLD().costs(facts()), FedAvg().costs(facts())
    assert ours.bytes_down_paper == 2 * theirs.bytes_down_paper
    assert ours.bytes_up_paper == 2 * theirs.bytes_up_paper
    assert ours.flops_paper == theirs.flops_paper
    wire, options = [], {"rounds": 1, "max_epochs": 1, "federation": {"buffers": "local"}}
    for algorithm in (SCAFFOLD(), FedAvg()):
        run = federation(algorithm, folder=type(algorithm).__name__, **options)
        wire.append(run.summary["comm/uplink_bytes_total"])
    assert abs(wire[0] - 2 * wire[1]) < 4 * 100  # headers of four clients; the first control variate down is zero


@pytest.mark.parametrize("lr", [0, -1.0, float("nan")])
def test_a_rate_of_0_or_less_is_refused(lr):
    with pytest.raises(InvalidOption, match=r"`algorithm.lr` is .*; expected a number above 0"):
        SCAFFOLD(lr=lr)
