"""Batch norm's running statistics, averaged, kept or fixed, against a loop in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from lightning_sparsefl import FedAvg, FedSpa
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.density import erk, kept_counts
from lightning_sparsefl.sparse.prune import random_masks
from reference.harness import CLIENTS, EPOCHS, SEED, SIZES, ClientData, Net, arrays

RATE = 0.2


def run(fit, method, buffers):
    return fit(method, {"lr": RATE}, norm=True, buffers=buffers)


def trained(state, client, masks):
    """A client's state after its epochs of full-batch SGD, its masks held."""
    net = Net(RATE, norm=True).double()
    net.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    own = ClientData(client, 64)
    x, y = (torch.from_numpy(values[: SIZES[client]]) for values in (own.x, own.y))
    parameters = dict(net.named_parameters())
    held = {name: torch.from_numpy(mask) for name, mask in masks.items()}
    for _ in range(EPOCHS):
        with torch.no_grad():
            for name, mask in held.items():
                parameters[name] *= mask
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter -= RATE * parameter.grad * held.get(name, 1.0)
    return arrays(net.state_dict())


def statistics(state):
    return {name: value for name, value in state.items() if "running" in name}


def close(ours, expected):
    for name, value in expected.items():
        assert np.abs(ours[name] - value).max() < 1e-9, name


def first_mask(method, server):
    """The one that all clients of a FedSpa start from, drawn as the package draws it."""
    if not isinstance(method, FedSpa):
        return {}
    everything = {n: v.shape for n, v in server.items() if "running" not in n and "tracked" not in n}
    shapes = {n: s for n, s in everything.items() if method.mask_pool == "all" or len(s) >= 2}
    counts = kept_counts(shapes, erk(shapes, method.density))
    return arrays(random_masks(shapes, counts, generator(SEED, "FedSpa mask")))


def expected_rounds(method, buffers, initial, rounds):
    """The statistics that each round should leave at the server, and at every client where they are `local`.

    Weights and masks are taken from the run; the NumPy twins compare those.
    """
    server, own = initial, {}
    masks = dict.fromkeys(CLIENTS, first_mask(method, server))
    for done in rounds:
        cohort = done.cohort
        results = {k: statistics(trained({**server, **own.get(k, {})}, k, masks[k])) for k in cohort}
        expected = statistics(server)
        if buffers == "local":
            own = {**own, **results}
        if buffers == "average":
            total = sum(SIZES[k] for k in cohort)
            expected = {name: sum(SIZES[k] * results[k][name] for k in cohort) / total for name in expected}
        yield expected, own
        server, masks = done.weights, {**masks, **{k: mask for k, mask in done.masks.items() if mask}}


METHODS = {"fedavg": FedAvg(), "fedspa": FedSpa(), "fedspa count all": FedSpa(merge="count", mask_pool="all")}


@pytest.mark.slow_after_first("method")
@pytest.mark.parametrize("buffers", ["average", "local", "server"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_servers_statistics(fit, method, buffers):
    initial, rounds = run(fit, method, buffers)
    for done, (expected, _) in zip(rounds, expected_rounds(method, buffers, initial, rounds), strict=True):
        close(done.weights, expected)
        close(done.scored_with["global"], expected)
        assert done.weights["net.1.num_batches_tracked"] == 0  # a counter stays the server's
        if buffers != "local":
            for client in CLIENTS:
                close(done.scored_with[client], expected)
    same = all(np.array_equal(rounds[-1].weights[name], value) for name, value in statistics(initial).items())
    assert same == (buffers != "average")


@pytest.mark.slow_after_first
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_client_goes_on_from_its_own_statistics(fit, method):
    initial, rounds = run(fit, method, "local")
    kept = [own for _, own in expected_rounds(method, "local", initial, rounds)]
    drawn = [client for done in rounds for client in done.cohort]
    assert len(set(drawn)) < len(drawn)  # somebody came back
    for done, own in zip(rounds, kept, strict=True):
        assert set(done.buffers) == set(own)
        for client, expected in own.items():
            close(done.buffers[client], expected)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_client_is_scored_with_its_own_statistics(fit, method):
    initial, rounds = run(fit, method, "local")
    for done, (expected, own) in zip(rounds, expected_rounds(method, "local", initial, rounds), strict=True):
        for client in CLIENTS:
            close(done.scored_with[client], own.get(client, expected))
