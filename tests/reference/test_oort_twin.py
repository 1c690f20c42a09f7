"""Oort against its slow twin."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from lightning_sparsefl.federated import Candidates, Oort, Seen
from reference import numpy_oort as slow

CASES = {
    "defaults": ({}, {}),
    "a preferred time": ({"threshold": 30.0, "pacer_step": 3}, {"threshold": 30.0, "pacer": (3, 5.0)}),
    "other bounds": (
        {"clip": 0.5, "cut_off": 0.5, "penalty": 1.0, "exploration": 0.3},
        {"clip": 0.5, "cut": 0.5, "alpha": 1.0, "explore": 0.3},
    ),
}


def handed(randoms):
    """Return a function that hands out the random numbers in order."""
    left = iter(randoms)
    return lambda count: np.fromiter(islice(left, count), float, count)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss", ["noise", "falls", "jumps"])
def test_cohorts_and_state_are_those_of_the_twin(case, loss):
    """Sixty rounds of 6 of 40 clients; the losses make the pacer rise, fall or rest."""
    ours, theirs = CASES[case]
    rng = np.random.default_rng(0)
    samples, seconds = rng.integers(10, 200, 40).tolist(), rng.uniform(1, 30, 40).tolist()
    sampler = Oort(over_select=1.5, **ours)
    twin, state, thresholds = slow.Oort(samples, seconds, **theirs), sampler.start(), set()
    for t in range(1, 61):
        randoms = rng.random(100)
        candidates = Candidates(t - 1, range(40), 6, samples.__getitem__, seconds.__getitem__)
        drawn = sampler.choose(state, candidates, handed(randoms))
        assert drawn == twin.draw(t, 6, iter(randoms))
        scale = {"noise": 1.0, "falls": 0.8**t, "jumps": 100.0 if t > 35 else 0.01}[loss]
        squares = {client: float(scale * rng.uniform(0.5, 1.5)) for client in drawn[:4]}
        counted = {c: Seen(samples[c], True, {"train_loss_sq": square}, seconds[c]) for c, square in squares.items()}
        late = {client: Seen(samples[client], False, {}, seconds[client]) for client in drawn[4:]}
        state = sampler.learn(state, candidates, counted | late)
        twin.learn(t, squares, drawn[4:])
        known = {name: values.tolist() for name, values in state["known"].items()}
        assert dict(zip(known["client"], known["utility"], strict=True)) == pytest.approx(twin.utility, rel=1e-12)
        assert dict(zip(known["client"], known["last"], strict=True)) == twin.success
        assert state["threshold"] == twin.threshold
        thresholds.add(twin.threshold)
    assert len(known["client"]) == 40
    assert twin.epsilon == 0
    if case == "a preferred time":
        assert len(thresholds) > 1
