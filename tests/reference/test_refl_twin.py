"""REFL against its slow twin: the draws, and runs with late clients."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from lightning_sparsefl import FedAvg
from lightning_sparsefl.cost import Availability, Devices
from lightning_sparsefl.federated import REFL, Candidates, Seen, ServerOptimizer
from reference import numpy_refl as slow
from reference.harness import HEAVY, SIZES, close, full_batches, moved
from reference.numpy_fedopt import FedOpt

DEVICES = Devices(flops_per_second=1e4, bytes_per_second=1e12)
CAPACITIES = [1.0, 0.1, 0.5, 0.3, 0.2, 0.6]


def handed(randoms):
    """Return a function that hands out the random numbers in order."""
    left = iter(randoms)
    return lambda count: np.fromiter(islice(left, count), float, count)


@pytest.mark.parametrize("target", ["adaptive", "half", "fixed"])
@pytest.mark.parametrize("trace", [False, True])
def test_cohorts_and_state_are_those_of_the_twin(target, trace):
    """Fifty rounds of 6 of 40 clients, the pending ones at random."""
    rng = np.random.default_rng(1)
    nights = Availability(intervals=[[[start, start + 60]] for start in range(40)], period=100)
    available = (lambda k, at: nights.next_time(nights.intervals[k], at) <= at) if trace else None
    sampler, twin = REFL(target=target), slow.Draws(target=target)
    state, now, sizes = sampler.start(), 0.0, set()
    for t in range(50):
        clients = [k for k in range(40) if available is None or available(k, now)]
        arrivals = {int(k): now + float(rng.uniform(0, 40)) for k in rng.choice(40, 5, replace=False)} if t else {}
        candidates = Candidates(t, clients, 6, lambda k: 1, lambda k: 1.0, now, arrivals, available)
        wanted = sampler.needed(state, candidates)
        assert wanted == twin.needed(6, now, arrivals)
        sizes.add(wanted)
        randoms = rng.random(200)
        drawn = sampler.choose(state, candidates, handed(randoms))
        assert drawn == twin.draw(t, clients, 6, now, arrivals, available, iter(randoms))
        seconds = {k: float(rng.uniform(5, 30)) for k in drawn}
        counted = sorted(drawn, key=seconds.__getitem__)[:4]
        state = sampler.learn(state, candidates, {k: Seen(1, k in counted, {}, seconds[k]) for k in drawn})
        duration = max(seconds[k] for k in counted)
        twin.learn(t, drawn, duration)
        turns = dict(zip(*(values.tolist() for values in state["turns"].values()), strict=True))
        assert (state["mean"], turns) == (pytest.approx(twin.mu, rel=1e-12), twin.turn)
        now += duration
    assert (len(sizes) > 1) == (target != "fixed")


class Twin(slow.Merge, FedOpt):
    """Steps of the server optimizer, where there is one."""

    def __init__(self, weights, seconds, needed, yogi, **options):
        FedOpt.__init__(self, weights, SIZES, HEAVY, "yogi", s=0.003, b1=0.9, tau=1e-8, raw_first=True)
        slow.Merge.__init__(self, weights, SIZES, HEAVY, seconds, needed, **options)
        self.yogi = yogi

    def step(self, change):
        (FedOpt if self.yogi else slow.Merge).step(self, change)


def seconds_of(record):
    """The time of a client-round of each client: its FLOPs over its speed; an upload takes no time to speak of."""
    rows = {k: row for done in record for k, row in done.rows.items() if row["flops_train"]}
    return {k: float(row["flops_train"]) / (CAPACITIES[k] * 1e4) for k, row in rows.items()}


def drawn_in(done):
    return [k for k, row in done.rows.items() if row["downlink_bytes"]]


@pytest.mark.slow_after_first
@pytest.mark.parametrize("case", ["plain", "yogi", "limit"])
def test_runs_with_late_clients(fit, case):
    yogi, limit = case == "yogi", 2 if case == "limit" else None
    sampler = REFL(over_select=4 / 3, target="fixed", rest=0, limit=limit)
    optimizer = ServerOptimizer(rule="yogi", lr=0.003, tau=1e-8, start="mean") if yogi else None
    options = {"devices": DEVICES, "capacities": CAPACITIES, "server_optimizer": optimizer}
    initial, record = fit(FedAvg(), HEAVY, rounds=10, sampler=sampler, **options)
    twin = Twin(initial, seconds_of(record), 3, yogi, beta=0.35, limit=limit)
    for done in record:
        twin.round(full_batches(drawn_in(done))[0])
        close(done.weights, twin.weights)
        assert done.losses["clients/arrived"] == len(twin.factors[-1])
        assert done.losses["time/clock"] == pytest.approx(twin.now, rel=1e-6)
    assert moved(record, initial)
    assert sum(map(len, twin.factors)) > 2
    assert any(f < 0.65 / 3 + 0.35 for found in twin.factors for f in found.values())


def test_without_late_clients_it_is_the_optimizer_of_the_mean(fit):
    optimizer = ServerOptimizer(rule="yogi", lr=0.003, tau=1e-8, start="mean")
    options = {"devices": DEVICES, "capacities": CAPACITIES, "server_optimizer": optimizer}
    initial, record = fit(FedAvg(), HEAVY, rounds=3, sampler=REFL(over_select=1.0), **options)
    twin = FedOpt(initial, SIZES, HEAVY, "yogi", s=0.003, b1=0.9, tau=1e-8, raw_first=True)
    for done in record:
        twin.round(full_batches(done.cohort)[0])
        close(done.weights, twin.weights)
        assert done.losses["clients/arrived"] == 0
    assert moved(record, initial)
