"""The bandit of FedLPS: against its slow twin, and in cases that can be worked out by hand."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
from pathlib import Path

import pytest
import torch

from lightning_sparsefl.algorithms import _pucbv as pucbv
from lightning_sparsefl.algorithms._pucbv import PUCBVOptions

_path = Path(__file__).parents[1] / "reference" / "numpy_pucbv.py"
_spec = importlib.util.spec_from_file_location("numpy_pucbv", _path)
slow = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(slow)

LEVELS = [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]
PUBLISHED = {"lowest": 0.5, "explore": "epsilon", "compare_with": "best"}


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def twin_choice(twin, seed):
    draw = rng(seed)
    return twin.choose(
        lambda n: int(torch.randint(n, (1,), generator=draw)),
        lambda: 1 - float(torch.rand((), dtype=torch.float64, generator=draw)),
    )


@pytest.mark.parametrize("rule", [{}, {"explore": "bonus"}, PUBLISHED], ids=["untried", "bonus", "published code"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_run_agrees_with_the_twin(seed, dynamic, rule):
    options = PUCBVOptions(arms=5 if seed % 2 else 3, xi=10.0 if seed % 3 else 40.0, **rule)
    state, twin = pucbv.start(options), slow.Bandit(options.arms, options.rho, options.xi, options.drop, **rule)
    draw, before = rng(seed), 0.1
    for t in range(40):
        capacity = LEVELS[int(torch.randint(5, (1,), generator=draw)) if dynamic else seed]
        chosen = pucbv.choose(state, rng(100 * seed + t), options)
        assert chosen == pytest.approx(twin_choice(twin, 100 * seed + t), abs=1e-12)
        assert options.lowest < chosen <= 1
        density = min(chosen, capacity)
        accuracy, seconds = float(torch.rand((), generator=draw)), 0.2 + density
        state = pucbv.learn(state, density, accuracy, before, seconds, options)
        twin.learn(density, accuracy, before, seconds)
        assert state["accuracy"] == twin.accuracy
        before = state["accuracy"]
        assert [(arm["low"], arm["high"]) for arm in state["arms"]] == [arm[:2] for arm in twin.arms]
        assert [arm["pulls"] for arm in state["arms"]] == [len(arm[2]) for arm in twin.arms]
        scores = [pucbv.score(arm, state, options) for arm in state["arms"]]
        assert scores == pytest.approx([twin.score(arm) for arm in twin.arms], abs=1e-9)
        assert state == json.loads(json.dumps(state))  # plain numbers and lists, as a checkpoint holds them
    below_all_arms = not dynamic and capacity <= options.lowest
    assert (edges(state) == edges(pucbv.start(options))) == below_all_arms


def learned(state, density, accuracy=0.5, before=0.4, seconds=1.0, options=None):
    return pucbv.learn(state, density, accuracy, before, seconds, options or PUCBVOptions())


def edges(state):
    return [(arm["low"], arm["high"]) for arm in state["arms"]]


def test_every_arm_is_tried_before_any_is_tried_again():
    state, seen = pucbv.start(PUCBVOptions()), set()
    for t in range(5):
        density = pucbv.choose(state, rng(t), PUCBVOptions())
        seen.add(math.ceil(density * 5 - 1e-12))
        state = learned(state, density)
    assert seen == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("capability", "share"), [(1, 0.0), (0.5, 0.5), (0.25, 0.75), (0.125, 0.875), (0.0625, 0.9375)]
)
def test_a_first_density_is_uniform_and_reset_where_it_exceeds_the_capability(capability, share):
    """E[min(U, z)] = z - z^2 / 2; a share 1 - z of the draws is reset, so weak clients train at z, not at z / 2."""
    used = [min(pucbv.choose(pucbv.start(PUCBVOptions()), rng(t), PUCBVOptions()), capability) for t in range(2000)]
    assert statistics.fmean(used) == pytest.approx(capability - capability**2 / 2, abs=0.02)
    assert sum(density == capability for density in used) / 2000 == pytest.approx(share, abs=0.03)


def test_the_reward_goes_to_the_arm_that_contains_the_reset_density():
    """A draw of .9 that is reset to 1/16 says nothing about .9."""
    state = learned(pucbv.start(PUCBVOptions()), 0.0625)
    assert edges(state)[:2] == [(0, 0.0625), (0.0625, 0.2)]
    assert [arm["pulls"] for arm in state["arms"]] == [1, 1, 0, 0, 0, 0]
    again = learned(state, 0.0625)
    assert edges(again) == edges(state)
    assert [arm["pulls"] for arm in again["arms"]] == [2, 1, 0, 0, 0, 0]


def test_an_arm_is_split_at_the_density_and_both_parts_keep_all_rewards():
    state = learned(learned(pucbv.start(PUCBVOptions()), 0.5, accuracy=0.5), 0.45, accuracy=0.7, before=0.5)
    assert edges(state) == [(0, 0.2), (0.2, 0.4), (0.4, 0.45), (0.45, 0.5), (0.5, 0.6), (0.6, 0.8), (0.8, 1)]
    assert [arm["pulls"] for arm in state["arms"]] == [0, 0, 2, 2, 1, 0, 0]


def test_a_part_without_width_is_not_made():
    state = learned(pucbv.start(PUCBVOptions()), 0.4)
    assert edges(state) == edges(pucbv.start(PUCBVOptions()))
    assert state["arms"][1]["pulls"] == 1


def test_densities_below_one_that_reduces_the_accuracy_are_eliminated():
    assert edges(learned(pucbv.start(PUCBVOptions()), 0.3, accuracy=0.34, before=0.4))[:2] == [(0, 0.2), (0.3, 0.4)]
    assert edges(learned(pucbv.start(PUCBVOptions()), 0.3, accuracy=0.36, before=0.4))[:2] == [(0, 0.2), (0.2, 0.3)]


def test_the_last_arm_is_never_eliminated():
    state = learned(pucbv.start(PUCBVOptions(arms=1)), 1.0, accuracy=0.0, before=0.9)
    assert edges(state) == [(0, 1)]
    assert edges(learned(pucbv.start(PUCBVOptions(arms=1)), 0.5, accuracy=0.0, before=0.9)) == [(0.5, 1)]


def test_a_density_outside_all_arms_earns_no_reward():
    state = pucbv.start(PUCBVOptions(lowest=0.5))
    assert edges(state) == [(0.5, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 1)]
    after = learned(state, 0.25, accuracy=0.3)
    assert (after["arms"], after["selections"], after["accuracy"]) == (state["arms"], 1, 0.3)


def test_the_bonus_fades_as_the_paper_has_it():
    """xi psi eps = 4, 1.39, .51 with 5, 6, 7 arms (R = 100 rounds of 10 clients); the bonus is 0 from then on."""
    state, products, bonuses = pucbv.start(PUCBVOptions()), [], []
    for density in (0.5, 0.45, 0.55):
        products.append(10 * 10 / len(state["arms"]) ** 2 * 0.5 ** state["selections"])
        bonuses.append(pucbv.score({"pulls": 1, "mean": 0.0, "squares": 0.0}, state, PUCBVOptions()))
        state = learned(state, density)
    assert products == pytest.approx([4, 1.39, 0.51], abs=0.005)
    assert bonuses == pytest.approx([math.sqrt(math.log(products[0]) / 8), math.sqrt(math.log(products[1]) / 8), 0])


def test_an_empty_mean_is_0_in_the_literal_reading():
    literal, state = PUCBVOptions(explore="bonus"), pucbv.start(PUCBVOptions())
    assert pucbv.score(state["arms"][0], state, PUCBVOptions()) == math.inf
    assert pucbv.score(state["arms"][0], state, literal) == pytest.approx(math.sqrt(0.5 * 2 * math.log(4) / 4))
    negative = learned(learned(learned(state, 0.1, 0.6), 0.3, 0.2, 0.6), 0.5, 0.2, 0.6)
    assert 0 < pucbv.choose(negative, rng(), literal) <= 0.2  # the only positive mean


def test_random_choices_fade_as_in_the_authors_program():
    """With one arm at the top, another one is drawn with probability 4/5 / max(m - 1, 1)."""
    options = PUCBVOptions(explore="epsilon")
    state = {**learned(pucbv.start(options), 0.2, accuracy=0.9, options=options)}
    for selections, others in ((0, 0.8), (1, 0.8), (2, 0.4), (8, 0.1)):
        state["selections"] = selections
        draws = [pucbv.choose(state, rng(t), options) for t in range(1000)]
        assert sum(density > 0.2 for density in draws) / 1000 == pytest.approx(others, abs=0.04)


def test_the_best_accuracy_so_far_can_be_the_reference():
    best = PUCBVOptions(compare_with="best")
    assert learned(pucbv.start(best), 0.3, accuracy=0.3, before=0.4, options=best)["accuracy"] == 0.4
    assert learned(pucbv.start(best), 0.3, accuracy=0.5, before=0.4, options=best)["accuracy"] == 0.5


def test_a_very_long_run_has_a_score():
    state = {**pucbv.start(PUCBVOptions()), "selections": 5000}
    assert pucbv.score({"pulls": 3, "mean": 0.25, "squares": 0.0}, state, PUCBVOptions()) == 0.25


def test_between_equal_arms_the_cheaper_one_wins():
    state = {"arms": [], "selections": 20}
    for low, high in ((0.0, 0.5), (0.5, 1.0)):
        state["arms"].append({"low": low, "high": high, "pulls": 1, "mean": 0.1 / high, "squares": 0.0})
    assert all(pucbv.choose(state, rng(t), PUCBVOptions()) <= 0.5 for t in range(10))
