"""DisPFL against its slow twin, as is FedSpa with `merge: count` and all clients in each round, on the full graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from lightning_sparsefl import DisPFL, FedSpa
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.prune import random_masks
from lightning_sparsefl.types import ClientView
from reference import harness
from reference import numpy_dispfl as slow
from reference.harness import (
    CLIENTS,
    HEAVY,
    PLAIN,
    ROUNDS,
    SEED,
    SIZES,
    arrays,
    close,
    full_batches,
    moved,
    pool_of,
    seen_batches,
)
from reference.numpy_masks import kept_counts
from reference.numpy_network import train
from reference.test_fedspa_twin import first_masks

FULL = Path(__file__).parents[2] / "configs" / "paper" / "dispfl" / "full.yaml"
HELD = {"density": 0.8, "exchange": 0.0}
"""Somebody holds each weight in each round, since masks do not move; searches drop the same small weights."""


K = len(SIZES)
GRAPHS = {
    "full": lambda client, t: [other for other in CLIENTS if other != client],
    "ring": lambda client, t: sorted(((client - 1) % K, (client + 1) % K)),
    "random": lambda client, t: DisPFL(neighbours=2).neighbours_of(view(client, t), CLIENTS),
}
"""Neighbours of a client in a round; the random ones are those of the package, which other tests look at."""


def view(client, t):
    return ClientView(id=client, num_examples=SIZES[client], capacity=1.0, round=t, max_rounds=ROUNDS, seed=SEED)


def drawn(initial, method, capacities):
    """The package's seeded draws, of as many positions as the twin's own rule says."""
    masks = {}
    for k in CLIENTS:
        density = capacities[k] if method.density == "capacity" else method.density
        shapes = pool_of(initial, method.mask_pool)
        counts = kept_counts(shapes, density, method.layer_density)
        key = (SEED, k, "DisPFL mask") if method.mask_init == "different" else (SEED, "DisPFL mask")
        masks[k] = arrays(random_masks(shapes, counts, generator(*key)))
    return masks


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("method", "sgd", "batch_size", "per_round"),
    [
        (DisPFL(neighbours=2), HEAVY, 4, K),
        (DisPFL(topology="ring", exchange=0.8), PLAIN, 64, 3),
        (DisPFL(topology="ring", mask_pool="all", mask_init="same", density=0.7), HEAVY, 4, 4),
        (DisPFL(topology="full", density=0.3, layer_density="uniform"), HEAVY, 64, K),
        (DisPFL(neighbours=2, density="capacity"), HEAVY, 4, 5),
    ],
    ids=repr,
)
def test_dispfl_is_its_twin(fit, monkeypatch, method, sgd, batch_size, per_round):
    """Also where some clients have not trained yet, whose first models their neighbours receive."""
    monkeypatch.setattr(harness, "PER_ROUND", per_round)
    capacities = dict(zip(CLIENTS, (0.2, 0.4, 0.6, 0.8, 1.0, 0.2), strict=True))
    given = {"capacities": list(capacities.values())} if method.density == "capacity" else {}
    initial, record = fit(method, sgd, batch_size, **given)
    twin = slow.DisPFL(
        initial,
        drawn(initial, method, capacities),
        sgd,
        neighbours=GRAPHS[method.topology],
        rounds=ROUNDS,
        exchange=method.exchange,
    )
    trained = set()
    for done in record:
        assert len(done.cohort) == per_round
        trained |= set(done.cohort)
        twin.round(*(full_batches(done.cohort) if batch_size == 64 else seen_batches(done)))
        for k in CLIENTS:
            close(done.scored_with[k], twin.personal(k))
        assert set(done.masks) == trained
        for k, masks in done.masks.items():
            assert all(np.array_equal(mask, twin.masks[k][name]) for name, mask in masks.items())
    assert any(not np.array_equal(twin.masks[k][n], twin.shared[k][n]) for k in twin.shared for n in twin.shared[k])


def test_a_dense_ring_is_decentralized_sgd(fit, monkeypatch):
    """D-PSGD: every client trains the plain mean of its own model and those beside it."""
    monkeypatch.setattr(harness, "PER_ROUND", K)
    initial, record = fit(DisPFL(topology="ring", density=1.0, search="static"), PLAIN, 64)
    models = dict.fromkeys(CLIENTS, initial)
    for done in record:
        starts = {k: mean([models[k], *(models[j] for j in GRAPHS["ring"](k, 0))]) for k in CLIENTS}
        models = {k: train(starts[k], full_batches([k])[0][k], **PLAIN) for k in CLIENTS}
        for k in CLIENTS:
            close(done.scored_with[k], mean([models[k], *(models[j] for j in GRAPHS["ring"](k, 0))]))


def mean(trees):
    return {name: sum(tree[name] for tree in trees) / len(trees) for name in trees[0]}


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("changed", "sgd", "batch_size"), [(HELD, PLAIN, 64), (HELD, HEAVY, 4), ({}, HEAVY, 4)])
def test_fedspa_of_the_whole_fleet_is_dispfl(fit, monkeypatch, changed, sgd, batch_size):
    """Weights that nobody holds are the departure: by the config's own density, the server remembers them."""
    monkeypatch.setattr(harness, "PER_ROUND", len(SIZES))
    method = FedSpa(**{**yaml.safe_load(FULL.read_text())["algorithm"]["init_args"], **changed})
    initial, record = fit(method, sgd, batch_size)
    first = first_masks(initial, method)
    twin = slow.FullGraph(initial, first, sgd, rounds=ROUNDS, exchange=method.exchange, remembered=not changed)
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
