"""What reaches the server of a single client is declared, since secure sums decide by it."""

from unittest import mock

import pytest

from helpers.algorithms import every_algorithm
from lightning_sparsefl import FedAvg, FedSpa
from lightning_sparsefl.types import Update


def shared_uploads(algorithm, federation):
    """Whether each update of a short run has `shared`."""
    train, found = type(algorithm).train, []

    def watched(self, message, client):
        update = train(self, message, client)
        found.append(update.shared is not None)
        return update

    with mock.patch.object(type(algorithm), "train", watched):
        federation(algorithm, rounds=3)
    assert found
    return found


@every_algorithm
def test_shared_uploads_are_declared(algorithm, federation):
    assert any(shared_uploads(algorithm, federation)) <= algorithm.uploads_shared


@pytest.mark.parametrize(("search", "uploads"), [("dst", True), ("static", False)])
def test_fedspa_uploads_masks_if_it_searches(search, uploads, federation):
    assert FedSpa(search=search).uploads_shared is uploads
    assert any(shared_uploads(FedSpa(search=search), federation)) is uploads


def test_a_method_that_does_not_declare_it_is_found(federation, monkeypatch):
    def train(self, message, client):
        return Update(weights=message.weights, shared={"seen": True})

    monkeypatch.setattr(FedAvg, "train", train)
    assert all(shared_uploads(FedAvg(), federation))
