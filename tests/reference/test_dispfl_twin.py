"""FedSpa with `merge: count` and all clients in each round against a slow twin of DisPFL on the full graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from lightning_sparsefl import FedSpa
from reference import harness
from reference import numpy_dispfl as slow
from reference.harness import CLIENTS, HEAVY, PLAIN, ROUNDS, SIZES, close, full_batches, moved, seen_batches
from reference.test_fedspa_twin import first_masks

FULL = Path(__file__).parents[2] / "configs" / "paper" / "dispfl" / "full.yaml"
HELD = {"density": 0.8, "exchange": 0.0}
"""Somebody holds each weight in each round, since masks do not move; searches drop the same small weights."""


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("changed", "sgd", "batch_size"), [(HELD, PLAIN, 64), (HELD, HEAVY, 4), ({}, HEAVY, 4)])
def test_fedspa_of_the_whole_fleet_is_dispfl(fit, monkeypatch, changed, sgd, batch_size):
    """Weights that nobody holds are the departure: by the config's own density, the server remembers them."""
    monkeypatch.setattr(harness, "PER_ROUND", len(SIZES))
    method = FedSpa(**{**yaml.safe_load(FULL.read_text())["algorithm"]["init_args"], **changed})
    initial, record = fit(method, sgd, batch_size)
    first = first_masks(initial, method)
    twin = slow.DisPFL(initial, first, sgd, rounds=ROUNDS, exchange=method.exchange, remembered=not changed)
    for done in record:
        assert done.cohort == list(CLIENTS)
        twin.round(*(full_batches(done.cohort) if batch_size == 64 else seen_batches(done)))
        for k in CLIENTS:
            close(done.scored_with[k], twin.personal(k))
            assert all(np.array_equal(mask, twin.masks[k][name]) for name, mask in done.masks[k].items())
    assert (twin.unheld == 0) == bool(changed)
    assert moved(record, initial)
    assert any(not np.array_equal(twin.masks[0][name], first[0][name]) for name in initial) == (not changed)


def test_the_config_has_the_whole_fleet_in_each_round():
    content = yaml.safe_load(FULL.read_text())
    assert content["federation"]["clients_per_round"] == content["data"]["init_args"]["num_clients"]
    assert (content["algorithm"]["class_path"], content["algorithm"]["init_args"]["merge"]) == ("FedSpa", "count")
