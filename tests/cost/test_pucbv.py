"""The bandit of FedLPS: against its slow twin, and in cases that can be worked out by hand."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from lightning_sparsefl.cost import pucbv
from lightning_sparsefl.cost.pucbv import Options

_path = Path(__file__).parents[1] / "reference" / "numpy_pucbv.py"
_spec = importlib.util.spec_from_file_location("numpy_pucbv", _path)
slow = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(slow)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def twin_choice(twin, capacity, seed):
    draw = rng(seed)
    return twin.choose(
        capacity,
        lambda n: int(torch.randint(n, (1,), generator=draw)),
        lambda: 1 - float(torch.rand((), dtype=torch.float64, generator=draw)),
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_run_agrees_with_the_twin(seed, dynamic):
    options = Options(arms=5 if seed % 2 else 3, xi=10.0 if seed % 3 else 40.0)
    state, twin = pucbv.start(options), slow.Bandit(options.arms, options.rho, options.xi, options.drop)
    levels, draw, before = [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16], rng(seed), 0.1
    for t in range(40):
        capacity = levels[int(torch.randint(5, (1,), generator=draw)) if dynamic else seed % 5]
        density = pucbv.choose(state, capacity, rng(100 * seed + t), options)
        assert density == pytest.approx(twin_choice(twin, capacity, 100 * seed + t), abs=1e-12)
        assert 0 < density <= capacity
        accuracy = float(torch.rand((), generator=draw))
        seconds = 0.2 + density
        state = pucbv.learn(state, capacity, density, accuracy, before, seconds, options)
        twin.learn(capacity, density, accuracy, before, seconds)
        before = accuracy
        assert [(arm["low"], arm["high"]) for arm in state["arms"]] == [arm[:2] for arm in twin.arms]
        assert [arm["pulls"] for arm in state["arms"]] == [len(arm[2]) for arm in twin.arms]
        scores = [pucbv.score(arm, state, options) for arm in state["arms"]]
        assert scores == pytest.approx([twin.score(arm) for arm in twin.arms], abs=1e-12)
        assert state == json.loads(json.dumps(state))  # plain numbers and lists, as a checkpoint holds them
    assert len(state["arms"]) > options.arms


def learned(state, density, accuracy=0.5, before=0.4, capacity=1.0, seconds=1.0):
    return pucbv.learn(state, capacity, density, accuracy, before, seconds, Options())


def edges(state):
    return [(arm["low"], arm["high"]) for arm in state["arms"]]


def test_every_candidate_is_tried_before_any_is_tried_again():
    state, seen = pucbv.start(Options()), set()
    for t in range(5):
        density = pucbv.choose(state, 1.0, rng(t), Options())
        seen.add(math.ceil(density * 5 - 1e-12))
        state = learned(state, density)
    assert seen == {1, 2, 3, 4, 5}


def test_an_arm_is_split_where_it_was_tried_and_both_parts_know_all_rewards():
    state = learned(learned(pucbv.start(Options()), 0.5, accuracy=0.5), 0.45, accuracy=0.7, before=0.5)
    assert edges(state) == [(0, 0.2), (0.2, 0.4), (0.4, 0.45), (0.45, 0.5), (0.5, 0.6), (0.6, 0.8), (0.8, 1)]
    assert [arm["pulls"] for arm in state["arms"]] == [0, 0, 2, 2, 1, 0, 0]


def test_a_part_without_width_is_not_made():
    state = learned(pucbv.start(Options()), 0.4)
    assert edges(state) == edges(pucbv.start(Options()))
    assert state["arms"][1]["pulls"] == 1


def test_densities_below_one_that_hurt_are_given_up():
    assert edges(learned(pucbv.start(Options()), 0.3, accuracy=0.34, before=0.4))[:2] == [(0, 0.2), (0.3, 0.4)]
    assert edges(learned(pucbv.start(Options()), 0.3, accuracy=0.36, before=0.4))[:2] == [(0, 0.2), (0.2, 0.3)]


def test_the_last_candidate_is_never_given_up():
    state = learned(pucbv.start(Options()), 0.0625, accuracy=0.0, before=0.9, capacity=0.0625)
    assert edges(state)[:2] == [(0, 0.0625), (0.0625, 0.2)]


def test_without_a_candidate_the_capacity_is_taken_and_nothing_split():
    state = {"arms": [{"low": 0.5, "high": 1.0, "pulls": 0, "mean": 0.0, "squares": 0.0}], "eps": 1.0}
    assert pucbv.choose(state, 0.25, rng(), Options()) == 0.25
    after = learned(state, 0.25, accuracy=0.3, capacity=0.25)
    assert (after["arms"], after["eps"], after["accuracy"]) == (state["arms"], 0.5, 0.3)


def test_the_bonus_fades_as_the_paper_has_it():
    """xi psi eps = 4, 1.39, .51 with 5, 6, 7 arms (R = 100 rounds of 10 clients)."""
    state, products = pucbv.start(Options()), []
    for density in (0.5, 0.45, 0.55):
        products.append(10 * 10 / len(state["arms"]) ** 2 * state["eps"])
        state = learned(state, density)
    assert products == pytest.approx([4, 1.39, 0.51], abs=0.005)


def test_between_equal_arms_the_cheaper_one_wins():
    state = {"arms": [], "eps": 2.0**-20}
    for low, high in ((0.0, 0.5), (0.5, 1.0)):
        state["arms"].append({"low": low, "high": high, "pulls": 1, "mean": 0.1 / high, "squares": 0.0})
    assert all(pucbv.choose(state, 1.0, rng(t), Options()) <= 0.5 for t in range(10))
