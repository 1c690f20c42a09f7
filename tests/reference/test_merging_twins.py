"""Robust reducers, clipping and the accountant against their slow twins."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_sparsefl.federated import CoverageMedian, Privacy, TrimmedMean
from lightning_sparsefl.federated.aggregation.clipping import clipped
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.types import Message, Update
from reference import numpy_merging as slow

SHAPES = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (2, 3)}
ROBUST = {
    "median": (CoverageMedian(), slow.middle),
    "trimmed": (TrimmedMean(fraction=0.2), lambda votes: slow.trimmed(votes, 0.2)),
    "a third": (TrimmedMean(fraction=1 / 3), lambda votes: slow.trimmed(votes, 1 / 3)),
    "mean": (TrimmedMean(fraction=0.0), lambda votes: slow.trimmed(votes, 0.0)),
}


def layout(dtype=torch.float32):
    buffers = {"n.running_mean": torch.zeros(3, dtype=dtype)}
    return Layout({name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}, buffers)


def tree(rng, model, scale=1.0):
    return {
        name: torch.from_numpy(scale * rng.standard_normal(shape)).to(model.dtype)
        for name, shape in model.shapes.items()
    }


def cohort(rng, model, clients, kind):
    """Updates that vote on some coordinates, and leave out some tensors."""
    updates = []
    for client in range(clients):
        weights = tree(rng, model)
        if client % 3 == 1:
            del weights["b.weight"]
        votes = {name: torch.from_numpy(rng.random(SHAPES[name]) < 0.5) for name in SHAPES if name != "a.bias"}
        updates.append(Update(weights=weights, kind=kind, weight=client + 1, votes=None if client % 4 == 3 else votes))
    return updates


@pytest.mark.parametrize("clients", [1, 2, 5, 10])
@pytest.mark.parametrize("kind", ["weights", "difference"])
@pytest.mark.parametrize(("reducer", "centre"), ROBUST.values(), ids=ROBUST)
def test_robust_reducers(reducer, centre, kind, clients):
    rng, model = np.random.default_rng(clients), layout()
    server, frozen = tree(rng, model), {"a.weight": torch.from_numpy(rng.random((3, 4)) < 0.5)}
    message, updates = Message(weights=server, trainable=frozen), cohort(rng, model, clients, kind)
    accumulator = reducer.start(model, server, 1000)
    for update in updates:
        accumulator.add(update, message, 7)
    accumulator.collect(lambda own: [own])
    merged = accumulator.result({})
    for name, old in server.items():
        nothing = np.zeros(old.shape, dtype=bool)
        votes = [frozen if update.votes is None else update.votes for update in updates]
        given = [
            (update.weights[name].numpy(), vote[name].numpy() if name in vote else ~nothing)
            if name in update.weights
            else (np.zeros(old.shape), nothing)
            for update, vote in zip(updates, votes, strict=True)
        ]
        expected, covered = slow.by_coordinate(given, centre)
        np.testing.assert_allclose(merged.weights[name].numpy(), expected, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(merged.covered.get(name, torch.ones(old.shape, dtype=torch.bool)), covered)
    assert merged.kind == kind


@pytest.mark.parametrize("limit", [0.5, 3.0, 1e3])
@pytest.mark.parametrize("kind", ["weights", "difference"])
def test_clipping(kind, limit):
    rng, model = np.random.default_rng(0), layout()
    message = Message(weights=tree(rng, model))
    for update in cohort(rng, model, 6, kind):
        result = clipped(update, message, limit, model)
        moved = {n: w - message.weights[n] if kind == "weights" else w for n, w in update.weights.items()}
        parameters = {n: w.double().numpy() for n, w in moved.items() if n in SHAPES}
        everywhere = {n: np.ones(w.shape, dtype=bool) for n, w in parameters.items()}
        votes = everywhere | {n: v.numpy() for n, v in (update.votes or {}).items() if n in parameters}
        expected, norm = slow.clipped(parameters, votes, limit)
        for name, value in expected.items():
            np.testing.assert_allclose(result.weights[name].numpy(), value, rtol=1e-5, atol=1e-7)
        assert torch.equal(result.weights["n.running_mean"], moved["n.running_mean"])
        assert result.metrics["update_norm"] == pytest.approx(norm)
        assert result.kind == "difference"
        assert result.weights.keys() == update.weights.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_does_not_exceed_the_limit(dtype):
    rng, model = np.random.default_rng(1), layout(dtype)
    message = Message(weights={name: torch.zeros_like(w) for name, w in tree(rng, model).items()})
    for scale in np.logspace(0, 3, 50):
        update = clipped(Update(weights=tree(rng, model, scale)), message, 0.7, model)
        squares = sum(float((update.weights[name].double() ** 2).sum()) for name in SHAPES)
        assert squares**0.5 <= 0.7


def test_what_rounding_takes_beyond_the_limit_is_scaled_by_no_more_than_that():
    """11 steps of float16 become 6, which rounding takes beyond the limit of 5.55; 5 are within it."""
    model, step = Layout({"a": torch.zeros(4, dtype=torch.float16)}, {}), 2.0**-24
    update = Update(weights={"a": torch.full((4,), 11 * step, dtype=torch.float16)}, kind="difference")
    moved = clipped(update, Message(weights={}), 2 * 5.55 * step, model).weights["a"]
    assert (moved.double() / step).tolist() == [5.0] * 4


# ---- the accountant

NOISE = [(0.6, 1e-5), (2.0, 1e-3), (8.0, 1e-6)]


@pytest.fixture(scope="module")
def accountant():
    pytest.importorskip("dp_accounting")


@pytest.mark.usefixtures("accountant")
@pytest.mark.parametrize(("z", "delta"), NOISE)
@pytest.mark.parametrize("rounds", [1, 40])
def test_epsilon_when_every_client_is_drawn(z, delta, rounds):
    """Rounds of the Gaussian mechanism are one with less noise, whose epsilon is known exactly."""
    epsilon = Privacy(noise_multiplier=z, delta=delta).epsilon(rounds, cohort=50, clients=50)
    orders = 1 + np.logspace(-1.5, 3, 1000)
    renyi = slow.epsilon_of({a: rounds * slow.gaussian_divergence(a, z) for a in orders}, delta)
    assert epsilon == pytest.approx(renyi, rel=0.02)
    assert slow.gaussian_delta(epsilon, z, rounds) <= delta < slow.gaussian_delta(0.7 * epsilon, z, rounds)


@pytest.mark.usefixtures("accountant")
@pytest.mark.parametrize(("z", "delta"), NOISE)
@pytest.mark.parametrize("clients", [20, 1000])
def test_epsilon_when_few_clients_are_drawn(z, delta, clients):
    """It lies between what two concrete federations show and the theorem in its general form."""
    epsilon = Privacy(noise_multiplier=z, delta=delta).epsilon(1, cohort=10, clients=clients)
    q = 10 / clients
    assert max(slow.sampled_delta(epsilon, z, q, others) for others in (-1.0, 0.0, 1.0)) <= delta
    general = slow.epsilon_of({a: slow.sampled_divergence(a, z, q) for a in range(2, 20)}, delta)
    assert epsilon <= general * (1 + 1e-9)
    more = Privacy(noise_multiplier=z, delta=delta).epsilon(100, cohort=10, clients=clients)
    assert epsilon < more <= 100 * epsilon


@pytest.mark.usefixtures("accountant")
def test_half_the_noise_would_not_be_enough():
    """The test above can fail: with the deviation over the norm of one update, not of their change, epsilon is low."""
    delta, z = 1e-5, 2.0
    careless = Privacy(noise_multiplier=2 * z, delta=delta).epsilon(1, cohort=10, clients=20)
    assert slow.sampled_delta(careless, z, 0.5, -1.0) > delta


@pytest.mark.usefixtures("accountant")
def test_epsilon_of_no_rounds_is_none():
    assert Privacy(noise_multiplier=1.0, delta=1e-5).epsilon(0, cohort=10, clients=1000) == 0


@pytest.mark.usefixtures("accountant")
def test_the_documented_table():
    text = (Path(__file__).parents[2] / "docs" / "merging.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == 5
    for clients, cohort, noise, rounds, delta, epsilon in rows:
        privacy = Privacy(noise_multiplier=float(noise), delta=float(delta))
        assert f"{privacy.epsilon(int(rounds), int(cohort), int(clients)):.2f}" == epsilon
