"""Batches and samples of clients, as the server knows them before a round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.federated.rounds.workload import Workload
from lightning_sparsefl.types import ClientView, Message

VIEW = ClientView(id=0, num_examples=21, capacity=1.0, round=0, max_rounds=1, seed=0)
OWN = ClientView(id=0, num_examples=21, capacity=1.0, round=0, max_rounds=1, seed=0, local_epochs=5)


@pytest.mark.parametrize(
    ("options", "view", "batches", "samples"),
    [
        ({}, VIEW, 2 * 3, 21),
        ({"drop_last": True}, VIEW, 2 * 2, 20),
        ({"max_batches": 1}, VIEW, 2, 10),
        ({"max_batches": 0.7}, VIEW, 2 * 2, 20),
        ({}, OWN, 5 * 3, 21),
    ],
    ids=str,
)
def test_batches_and_samples(options, view, batches, samples):
    workload = Workload(layers=None, epochs=2, batch_size=10, **options)
    assert workload.batches(view) == batches
    assert workload.facts(view, Message(weights={})).samples == samples
    asked = {"batches": workload.batches, "samples": workload.round_samples}
    fleet = Fleet([view], frozenset(), torch.device("cpu"), **asked)
    assert (fleet.batches(view), fleet.samples(view)) == (batches, (view.local_epochs or 2) * samples)


def test_batches_of_clients_with_sizes_of_their_own():
    workload = Workload(layers=None, epochs=1, batch_size=10, max_batches=1, own={1: (4, True)})
    facts = [workload.facts(replace(VIEW, id=client), Message(weights={})) for client in (0, 1)]
    assert [(each.samples, each.batch_size) for each in facts] == [(10, 10), (4, 4)]
    assert [workload.samples(client, 3) for client in (0, 1)] == [3, 0]
    assert workload.facts(VIEW, Message(weights={}), workload.batching(1)).samples == 4


def test_a_fleet_without_a_workload_says_so():
    with pytest.raises(RuntimeError, match="numbers of batches of clients are not known here"):
        Fleet([VIEW], frozenset(), torch.device("cpu")).batches(VIEW)
    with pytest.raises(RuntimeError, match="numbers of samples of clients' rounds are not known here"):
        Fleet([VIEW], frozenset(), torch.device("cpu")).samples(VIEW)
