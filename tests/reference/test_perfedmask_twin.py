"""PerFedMask against its slow twin; over a base, see the base's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_sparsefl import Federation, PerFedMask
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.types import ClientView
from reference import numpy_perfedmask as slow
from reference.freezing import BODY, HEAD, compare_freezing
from reference.harness import CLIENTS, CLIPPED, EPOCHS, HEAVY, ROUNDS, SEED, SIZES, tensors

CAPACITIES = [0.5, 0.55, 1.0]
"""Of two clients each; with the head frozen the first can train net.0, the second one of both, the third all."""


def plan_of(method, initial):
    """For each client the groups that it trains, as the method decided."""
    sizes = BODY if method.freeze_head else BODY | HEAD
    capacities = Federation(capacities=CAPACITIES).fleet_capacities(len(SIZES), SEED)
    views = [
        ClientView(id=k, num_examples=SIZES[k], capacity=capacities[k], round=0, max_rounds=ROUNDS, seed=SEED)
        for k in CLIENTS
    ]
    weights = {name: torch.from_numpy(value) for name, value in initial.items()}
    server = method.init(weights, Fleet(views, frozenset(), torch.device("cpu")))
    frozen = [set(method.download(server, view).trainable) for view in views]
    plan = [{j for j, group in enumerate(sizes) if f"{group}.weight" not in names} for names in frozen]
    budgets = [int(capacity * sum(sizes.values())) for capacity in capacities]
    return list(sizes), list(sizes.values()), budgets, plan


def check_plan(method, sizes, budgets, plan):
    """The plan is the twin's; among several optima it may be any."""
    if method.masking == "optimized":
        missing, least = slow.best_plan(sizes, budgets)
        assert missing == 0
        assert all(sum(sizes[j] for j in own) <= budget for own, budget in zip(plan, budgets, strict=True))
        assert slow.mask_problem(plan, sizes, budgets) == pytest.approx(least, rel=1e-12)
        return
    orders = [range(len(sizes))] * len(budgets)
    if method.masking == "random":
        rng = generator(SEED, "PerFedMask plan")
        orders = [torch.randperm(len(sizes), generator=rng).tolist() for _ in budgets]
    assert plan == [slow.first_fit(sizes, budget, order) for budget, order in zip(budgets, orders, strict=True)]


@pytest.mark.slow_after_first("sgd", "freeze_head")
@pytest.mark.parametrize(("sgd", "batch_size"), [(HEAVY, 64), (CLIPPED, 4)])
@pytest.mark.parametrize("freeze_head", [True, False], ids=["head", "no head"])
@pytest.mark.parametrize("masking", ["optimized", "random", "sequential"])
def test_perfedmask(fit, masking, freeze_head, sgd, batch_size):
    method = PerFedMask(masking=masking, freeze_head=freeze_head, finetune_epochs=EPOCHS)

    def twin_of(initial):
        groups, sizes, budgets, plan = plan_of(method, initial)
        check_plan(method, sizes, budgets, plan)
        assert len({tuple(sorted(own)) for own in plan}) > 1
        trains = [tensors(groups[j] for j in own) for own in plan]
        return slow.PerFedMask(initial, trains, SIZES, sgd)

    initial, record = compare_freezing(fit, method, twin_of, sgd, batch_size, capacities=CAPACITIES)
    heads = [all(np.array_equal(done.weights[name], initial[name]) for name in tensors(HEAD)) for done in record]
    assert all(heads) == freeze_head


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"local_engine": "trainer"}, {"wire": "encode"}], ids=["trainer", "encode"])
def test_perfedmask_whichever_way_the_engine_goes(fit, option):
    method = PerFedMask(masking="sequential", finetune_epochs=EPOCHS)
    _, first = fit(method, CLIPPED, 4, capacities=CAPACITIES)
    _, second = fit(method, CLIPPED, 4, capacities=CAPACITIES, **option)
    for one, other in zip(first, second, strict=True):
        assert all(np.array_equal(one.weights[name], other.weights[name]) for name in one.weights)
