"""DepthFL against its slow twin."""

from __future__ import annotations

import pytest

from lightning_sparsefl import DepthFL
from reference import exits, harness
from reference import numpy_depthfl as slow
from reference.harness import CLIPPED, HEAVY, PLAIN, SIZES, Net, compare, full_batches, moved
from reference.numpy_fedavg import FedAvg
from reference.numpy_network import loss as plain_loss

CAPACITIES = [0.3, 0.5, 1.0]
DEPTHS = [1, 1, 1, 1, 2, 2]
"""Of two blocks."""


@pytest.fixture(autouse=True)
def with_exits(monkeypatch):
    monkeypatch.setattr(harness, "Net", exits.TwoExits)
    monkeypatch.setattr(harness, "loss", exits.loss)


@pytest.mark.slow_after_first("sgd")
@pytest.mark.parametrize(("sgd", "batch_size"), [(PLAIN, 64), (HEAVY, 4), (CLIPPED, 4)])
@pytest.mark.parametrize(
    "options",
    [{"ramp": 3}, {"alpha": 0.5, "distill": False}, {"alpha": 0.0, "ramp": 1}],
    ids=["both", "no distillation", "no regularization"],
)
def test_depthfl(fit, options, sgd, batch_size):
    initial, record = fit(DepthFL(**options), sgd, batch_size, 7, capacities=CAPACITIES)
    compare(record, slow.DepthFL(initial, DEPTHS, len(SIZES), sgd, **options), batch_size)
    assert moved(record, initial)


def test_clients_of_one_depth_send_what_they_have(fit):
    """Nobody has the second block, which keeps its values."""
    initial, record = fit(DepthFL(ramp=2), HEAVY, 4, capacities=[0.5], wire="encode")
    compare(record, slow.DepthFL(initial, [1] * len(SIZES), len(SIZES), HEAVY, ramp=2), 4)
    assert (record[-1].weights["second.weight"] == initial["second.weight"]).all()


class OneExit(Net):
    """The harness' module, whose output is its only exit."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.exits, self.depth = {"net.3": "net.4"}, 1


def test_one_block_without_the_other_terms_is_the_plain_mean(fit, monkeypatch):
    monkeypatch.setattr(harness, "Net", OneExit)
    monkeypatch.setattr(harness, "loss", plain_loss)
    initial, record = fit(DepthFL(alpha=0.0, distill=False), HEAVY, 4)
    compare(record, FedAvg(initial, [1] * len(SIZES), HEAVY), 4)


def test_what_a_client_keeps_is_its_gradient(fit):
    initial, record = fit(DepthFL(), PLAIN, 64, capacities=CAPACITIES)
    twin = slow.DepthFL(initial, DEPTHS, len(SIZES), PLAIN)
    for done in record:
        twin.round(full_batches(done.cohort)[0])
    for client, memory in record[-1].memory.items():
        harness.close(
            {name: value.numpy() for name, value in memory["gradient"].items()},
            {name: twin.g[client][name] for name in memory["gradient"]},
        )
        assert set(memory["gradient"]) == set(twin.g[client])
