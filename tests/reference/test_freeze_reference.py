"""Freezing plans against their slow twins: the problem term by term, and brute force over all plans."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.sparse import freeze
from reference import numpy_perfedmask as slow

SHAPES = [(1, 4), (2, 3), (2, 5), (3, 3), (3, 4), (4, 3)]
"""Clients, groups."""


@pytest.fixture(params=range(12))
def problem(request):
    """Sizes and budgets with ties, clients that can do nothing, groups that nobody can train."""
    rng = torch.Generator().manual_seed(request.param)
    clients, groups = SHAPES[request.param % len(SHAPES)]
    sizes = torch.randint(1, 9, (groups,), generator=rng).tolist()
    return sizes, torch.randint(0, sum(sizes) + 1, (clients,), generator=rng).tolist()


def sets(plan):
    return [set(row.nonzero().flatten().tolist()) for row in plan]


def score(plan, sizes, budgets):
    own = sets(plan)
    wanted = {j for j, size in enumerate(sizes) if size <= max(budgets)}
    return len(wanted.difference(*own)), slow.mask_problem(own, sizes, budgets)


def test_the_closed_form_is_the_problem(problem):
    sizes, budgets = problem
    for plan in (freeze.random(sizes, budgets), freeze.cover(sizes, budgets), freeze.consensus(sizes, budgets)):
        missing, value = score(plan, sizes, budgets)
        assert freeze.objective(plan, sizes, budgets) == pytest.approx(value, abs=1e-9)
        assert len(freeze.uncovered(plan, sizes, budgets)) == missing
        slack = sum(budgets) - sum(sizes[j] for own in sets(plan) for j in own)
        assert freeze.bias(plan, sizes) == pytest.approx(value - slack, abs=1e-9)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "search"])
def test_the_optimum(problem, exact, monkeypatch):
    sizes, budgets = problem
    monkeypatch.setattr(freeze, "EXACT_SIZE", 0)
    found = freeze.exact(sizes, budgets) if exact else freeze.optimized(sizes, budgets, torch.Generator())
    assert freeze.within_budgets(found, sizes, budgets)
    assert score(found, sizes, budgets) == pytest.approx(slow.best_plan(sizes, budgets), abs=1e-9)


def test_first_fit(problem):
    sizes, budgets = problem
    assert sets(freeze.sequential(sizes, budgets)) == [slow.first_fit(sizes, b, range(len(sizes))) for b in budgets]
    orders = torch.Generator().manual_seed(1)
    expected = [slow.first_fit(sizes, b, torch.randperm(len(sizes), generator=orders).tolist()) for b in budgets]
    assert sets(freeze.random(sizes, budgets, torch.Generator().manual_seed(1))) == expected
