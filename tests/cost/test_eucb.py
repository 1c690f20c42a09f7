"""The bandit of FedMP: against its slow twin, and in cases that can be worked out by hand."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_sparsefl.cost import eucb
from lightning_sparsefl.cost.eucb import EUCBOptions

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def slow():
    spec = importlib.util.spec_from_file_location("numpy_fedmp", TESTS / "reference" / "numpy_fedmp.py")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(TESTS), *sys.path]):
        spec.loader.exec_module(module)
    return module


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("discount", "width"), [(0.98, 0.02), (0.5, 0.3), (1.0, 0.1)])
def test_a_run_agrees_with_the_twin(slow, seed, discount, width):
    options, draw = EUCBOptions(discount=discount, width=width), rng(seed)
    state, twin = eucb.start(), slow.Bandit(discount, width)
    for t in range(60):
        chosen = eucb.choose(state, rng(100 * seed + t), options)
        uniform = float(torch.rand((), dtype=torch.float64, generator=rng(100 * seed + t)))
        assert chosen == pytest.approx(twin.choose(uniform), abs=1e-12)
        assert 0 <= chosen < 1
        reward = float(torch.randn((), generator=draw))
        state = eucb.learn(state, chosen, reward, options)
        twin.learn(chosen, reward)
        assert state["edges"] == twin.edges
        assert eucb.bounds(state, options) == pytest.approx([twin.score(*leaf) for leaf in twin.leaves()], abs=1e-9)
        assert state == json.loads(json.dumps(state))  # plain numbers and lists, as a checkpoint holds them


def test_a_bound_by_hand():
    """Weights .25, .5 and 1: N = 1.25 and .5, n = 1.75."""
    state = {"edges": [0.0, 0.5, 1.0], "pulls": [[0.1, 2.0], [0.7, 4.0], [0.3, 1.0]]}
    low, high = eucb.bounds(state, EUCBOptions(discount=0.5))
    assert low == pytest.approx((0.25 * 2 + 1) / 1.25 + math.sqrt(2 * math.log(1.75) / 1.25))
    assert high == pytest.approx(4 + math.sqrt(2 * math.log(1.75) / 0.5))


def test_pulls_without_a_weight_are_left_out_and_change_no_bound():
    """0.5^1074 is the smallest number above zero."""
    options, draw, whole = EUCBOptions(discount=0.5, width=0.3), rng(), eucb.start()
    state = whole
    for _ in range(1100):
        value, reward = torch.rand(2, generator=draw).tolist()
        state = eucb.learn(state, value, reward, options)
        whole = {"edges": state["edges"], "pulls": [*whole["pulls"], [value, reward]]}
    assert state["pulls"] == whole["pulls"][-1075:]
    assert eucb.bounds(state, options) == eucb.bounds(whole, options)
    assert eucb.learn(whole, 0.5, 1.0, EUCBOptions(discount=1.0))["pulls"] == [*whole["pulls"], [0.5, 1.0]]


def test_leaves_are_split_down_to_a_width():
    options, state = EUCBOptions(width=0.2), eucb.start()
    for t in range(80):
        state = eucb.learn(state, eucb.choose(state, rng(t), options), 0.0, options)
    widths = [high - low for low, high in zip(state["edges"], state["edges"][1:], strict=False)]
    assert sum(widths) == pytest.approx(1.0)
    assert max(widths) <= 0.2
    settled = state["edges"]
    for t in range(20):
        state = eucb.learn(state, eucb.choose(state, rng(t), options), 0.0, options)
    assert state["edges"] == settled


def test_the_best_value_is_found_and_found_again_when_it_moves():
    """Rewards fall with the distance from .3, later from .8."""
    options, state = EUCBOptions(discount=0.98, width=0.1), eucb.start()
    late = {}
    for best in (0.3, 0.8):
        for t in range(300):
            value = eucb.choose(state, rng(t), options)
            state = eucb.learn(state, value, 50 * (1 - abs(value - best)), options)
        late[best] = [value for value, _ in state["pulls"][-100:]]
    for best, values in late.items():
        assert sum(abs(value - best) < 0.15 for value in values) > 50


def test_a_leaf_without_rewards_comes_first():
    state = {"edges": [0.0, 0.5, 1.0], "pulls": [[0.1, 1e9]]}
    assert eucb.bounds(state, EUCBOptions())[1] == math.inf
    assert all(eucb.choose(state, rng(seed), EUCBOptions()) >= 0.5 for seed in range(9))
