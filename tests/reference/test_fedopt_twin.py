"""FedOpt, and the same optimizers as an option of the federation, against their slow twin."""

from __future__ import annotations

import pytest

from lightning_sparsefl import FedAvg, FedOpt
from lightning_sparsefl.federated import ServerOptimizer
from reference import numpy_fedopt as slow
from reference.harness import HEAVY, SIZES, close, compare, full_batches, moved

CASES = {
    "adam": ({"lr": 0.05}, {"s": 0.05, "b1": 0.9}),
    "momentum": ({"beta1": 0.7}, {"s": 1.0, "b1": 0.7}),
    "adagrad": ({"tau": 0.01}, {"s": 0.1, "b1": 0.0, "tau": 0.01}),
    "yogi": ({"start": "mean", "beta2": 0.9}, {"s": 0.1, "b1": 0.9, "b2": 0.9, "raw_first": True}),
    "adamw": ({"lr": 0.02}, {"s": 0.02, "b1": 0.9, "b2": 0.999, "tau": 1e-8, "decay": 0.01}),
}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("rule", CASES)
def test_fedopt(fit, rule):
    options, twins = CASES[rule]
    initial, record = fit(FedOpt(rule=rule, **options), HEAVY)
    compare(record, slow.FedOpt(initial, SIZES, HEAVY, rule, **twins), 64)
    assert moved(record, initial)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("rule", CASES)
def test_the_option_of_the_federation(fit, rule):
    options, twins = CASES[rule]
    initial, record = fit(FedAvg(), HEAVY, rounds=3, server_optimizer=ServerOptimizer(rule=rule, **options))
    twin = slow.FedOpt(initial, SIZES, HEAVY, rule, **twins)
    for done in record:
        twin.round(full_batches(done.cohort)[0])
        close(done.weights, twin.weights)
