"""FedPM against its slow twin."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_sparsefl import FedPM
from lightning_sparsefl.seeds import derive_key, derive_seed, generator
from reference import numpy_fedpm as slow
from reference.harness import CLIPPED, HEAVY, SEED, compare


def signs(initial):
    fans = {name.partition("t.")[2].rpartition(".")[0]: w.shape[1] for name, w in initial.items() if w.ndim > 1}
    fans = {name: fans[name.partition("t.")[2].rpartition(".")[0]] for name in initial}
    return {name: np.where(w >= 0, 1.0, -1.0) * math.e / math.sqrt(fans[name]) for name, w in initial.items()}


def first_scores(initial):
    rng = generator(SEED, "FedPM scores")
    return {n: torch.randn(w.shape, generator=rng).double().numpy() for n, w in initial.items()}


def client_key(client, round, purpose):
    return derive_key(SEED, "client", client), round, "train", purpose, 0


def twin_of(initial, sgd, **options):
    def draws(client, round):
        seed = derive_seed(*client_key(client, round, "masks"))
        return lambda step, name: uniform(initial[name].shape, generator(seed, step, "mask", name))

    def bits(client, round):
        rng = generator(*client_key(client, round, "bits"))
        return lambda name: uniform(initial[name].shape, rng)

    return slow.FedPM(signs(initial), first_scores(initial), sgd, draws, bits, **options)


def uniform(shape, rng):
    return torch.rand(shape, generator=rng, dtype=torch.float64).numpy()


def changed(twin, initial):
    before = twin_of(initial, {}).weights
    return sum(int((twin.weights[name] != value).sum()) for name, value in before.items())


@pytest.mark.slow_after_first
@pytest.mark.parametrize(("sgd", "batch_size"), [(CLIPPED, 4), (HEAVY, 64), ({"lr": 5.0}, 4)])
@pytest.mark.parametrize("options", [{}, {"least": 0.2}], ids=str)
def test_fedpm(fit, options, sgd, batch_size):
    initial, record = fit(FedPM(**options), sgd, batch_size)
    twin = twin_of(initial, sgd, **options)
    compare(record, twin, batch_size)
    assert changed(twin, initial) > 10


@pytest.mark.slow
def test_fedpm_over_the_wire_and_in_a_real_trainer(fit):
    initial, record = fit(FedPM(), CLIPPED, 4, 3, wire="encode", local_engine="trainer")
    compare(record, twin_of(initial, CLIPPED), 4)
