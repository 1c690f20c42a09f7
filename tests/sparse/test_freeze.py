"""Plans of who trains what: Table 6 and the optima that follow from the paper's model sizes."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse import freeze, plan_search

ONE = [1, 1, 1, 1]
SIZES = [1, 2, 3, 4]
TABLE_6 = [
    ("2a", [1, 1, 4], [{0}, {0}], 8 / 3),
    ("2a", [1, 1, 4], [{0}, {1}], 4),
    ("2b", [1, 2, 4], [{0}, {0, 1}], 10 / 3),
    ("2b", [1, 2, 4], [{0}, {1, 2}], 4),
    ("2c", [1, 3, 4], [{0}, {0, 1, 2}], 10 / 3),
    ("2c", [1, 3, 4], [{0}, {1, 2, 3}], 2),
    ("2d", [2, 2, 4], [{0, 1}, {0, 1}], 8 / 3),
    ("2d", [2, 2, 4], [{0, 1}, {1, 2}], 4),
    ("2d", [2, 2, 4], [{0, 1}, {2, 3}], 2),
    ("2e", [2, 3, 4], [{0, 1}, {0, 1, 2}], 10 / 3),
    ("2e", [2, 3, 4], [{0, 1}, {1, 2, 3}], 2),
    ("2f", [3, 3, 4], [{0, 1, 2}, {0, 1, 2}], 8 / 3),
    ("2f", [3, 3, 4], [{0, 1, 2}, {1, 2, 3}], 2),
    ("2g", [4, 4, 4], [{0, 1, 2, 3}, {0, 1, 2, 3}], 0),
]
"""Scenario, budgets, what the first two clients train (the third trains all), and the bias that the paper prints."""
MOBILENET = [928, 2528, 9152, 18048, 34688, 68864, 134912, *[268800] * 5, 531968, 1061888]
PRERESNET = [1728, 73984, 73984, 229760, 295424, 918272, 1180672, 3671552, 4720640, 1024]
OPTIMA = [
    (MOBILENET, 50, 1.623e6, 1_803_728, [0, 2, 3, 4, 5, 7]),
    (MOBILENET, 20, 2.597e6, 961_779.2, [0, 2, 3, 4, 5, 7]),
    (PRERESNET, 50, 7.157e6, 6_265_728, [0, 1, 2, 4, 5, 9]),
    (PRERESNET, 20, 11.451e6, 3_324_940.8, [0, 1, 2, 4, 5, 9]),
]
"""Groups, strong clients of 100, bias plus slack, mean of the trained parameters, what a weak client trains."""


def plan_of(*clients, groups=4):
    plan = torch.zeros(len(clients), groups, dtype=torch.bool)
    for row, own in zip(plan, clients, strict=True):
        row[sorted(own)] = True
    return plan


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def fleet(sizes, strong):
    dense = sum(sizes)
    return [dense // 8] * (100 - strong) + [dense] * strong


@pytest.mark.parametrize(("figure", "budgets", "weak", "value"), TABLE_6, ids=[str(i) for i in range(14)])
def test_table_6(figure, budgets, weak, value):
    plan = plan_of(*weak, range(4))
    assert freeze.within_budgets(plan, ONE, budgets)
    assert freeze.bias(plan, ONE) == pytest.approx(value, abs=1e-12)
    assert freeze.objective(plan, ONE, budgets) == freeze.bias(plan, ONE)  # every budget is spent


@pytest.mark.parametrize("solve", [freeze.optimized, freeze.exact], ids=["optimized", "exact"])
@pytest.mark.parametrize("figure", sorted({figure for figure, *_ in TABLE_6}))
def test_the_solver_finds_the_minimum_of_each_scenario(figure, solve):
    rows = [(budgets, value) for name, budgets, _, value in TABLE_6 if name == figure]
    budgets, least = rows[0][0], min(value for _, value in rows)
    plan = solve(ONE, budgets)
    assert freeze.bias(plan, ONE) == pytest.approx(least, abs=1e-9)
    assert freeze.trained(plan, ONE).tolist() == budgets


@pytest.mark.parametrize("heuristic", [True, False], ids=["search", "with the exact one"])
@pytest.mark.parametrize("figure", sorted({figure for figure, *_ in TABLE_6}))
def test_local_search_alone_finds_it_too(figure, heuristic, monkeypatch):
    monkeypatch.setattr(freeze, "EXACT_SIZE", 0 if heuristic else 24)
    rows = [(budgets, value) for name, budgets, _, value in TABLE_6 if name == figure]
    assert freeze.bias(freeze.optimized(ONE, rows[0][0], rng()), ONE) == pytest.approx(min(v for _, v in rows))


@pytest.mark.parametrize(("sizes", "strong", "value", "mean", "subset"), OPTIMA)
def test_one_subset_for_all_weak_clients_is_best(sizes, strong, value, mean, subset):
    budgets = fleet(sizes, strong)
    plan = freeze.optimized(sizes, budgets, rng())
    assert freeze.objective(plan, sizes, budgets) == pytest.approx(value, abs=500)
    assert freeze.trained(plan, sizes).double().mean().item() == pytest.approx(mean)
    assert all(own.nonzero().flatten().tolist() == subset for own in plan[: 100 - strong])
    assert plan[100 - strong :].all()
    assert freeze.uncovered(plan, sizes, budgets) == []


def test_the_starts_of_mobilenet_in_order_of_worth():
    budgets = fleet(MOBILENET, 50)
    worth = [
        freeze.objective(start(MOBILENET, budgets), MOBILENET, budgets)
        for start in (freeze.consensus, freeze.cover, freeze.sequential)
    ]
    assert worth == sorted(worth)
    chance = freeze.random(MOBILENET, budgets, rng())
    assert 3 * worth[0] < freeze.objective(chance, MOBILENET, budgets) < worth[2]


def test_search_never_makes_it_worse_and_stops_where_nothing_helps():
    for seed in range(5):
        budgets = torch.randint(900, sum(MOBILENET), (12,), generator=rng(seed)).tolist()
        start = freeze.random(MOBILENET, budgets, rng(seed))
        better = freeze.improve(start, MOBILENET, budgets)
        assert freeze.within_budgets(better, MOBILENET, budgets)
        assert freeze.objective(better, MOBILENET, budgets) < freeze.objective(start, MOBILENET, budgets)
        again = freeze.improve(better, MOBILENET, budgets)
        assert freeze.objective(again, MOBILENET, budgets) == pytest.approx(
            freeze.objective(better, MOBILENET, budgets), rel=1e-9
        )


def test_the_value_of_a_move_of_several_clients_is_the_objective_after_it():
    budgets = [5, 5, 5, 9]
    pool, sizing = (
        plan_search._Pool.of(plan_of({0}, {0}, {0}, {1, 2, 3}), budgets),
        plan_search._Sizing.of(SIZES, budgets),
    )
    for many in (1, 3):
        move = plan_search._best(pool, sizing, many)
        after = pool.after(move).plan(budgets)
        assert not freeze.uncovered(after, SIZES, budgets)
        assert move.many == many
        assert move.value == pytest.approx(freeze.objective(after, SIZES, budgets))


def test_of_groups_that_equally_many_clients_have_the_largest_is_covered_first():
    assert freeze.cover([1, 3, 2], [3, 3]).tolist() == [[False, True, False], [True, False, True]]


def test_the_same_arguments_give_the_same_plan():
    sizes, budgets = MOBILENET[:9], [300_000, 100_000, 700_000] * 5
    plans = [freeze.optimized(sizes, budgets, rng(seed)) for seed in (3, 3)]
    assert torch.equal(*plans)
    draws = [freeze.random(sizes, budgets, rng(seed)) for seed in (3, 3, 4)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_the_order_of_clients_does_not_matter():
    budgets = [3, 1, 2, 3, 1]
    plan = freeze.optimized([1, 1, 2], budgets, rng())
    turned = freeze.optimized([1, 1, 2], budgets[::-1], rng())
    assert freeze.objective(plan, [1, 1, 2], budgets) == pytest.approx(
        freeze.objective(turned, [1, 1, 2], budgets[::-1])
    )
    assert freeze.within_budgets(plan, [1, 1, 2], budgets)


def test_a_client_that_nothing_fits_trains_nothing_and_everybody_else_something():
    budgets = [0, 1, 5]
    for plan in (
        freeze.optimized([2, 1, 9], budgets, rng()),
        freeze.exact([2, 1, 9], budgets),
        freeze.random([2, 1, 9], budgets, rng()),
        freeze.sequential([2, 1, 9], budgets),
        freeze.cover([2, 1, 9], budgets),
    ):
        assert plan.any(1).tolist() == [False, True, True]
        assert not plan[:, 2].any()
        assert freeze.within_budgets(plan, [2, 1, 9], budgets)


def test_empty_masks_do_not_win():
    # Both train nothing: bias 0 and slack 2. One group each is no better: bias 2 * (1 + 1) - 2 and no slack.
    plan = freeze.optimized([1, 1], [1, 1], rng())
    assert plan.any(1).all()
    assert freeze.uncovered(plan, [1, 1], [1, 1]) == []


def test_where_budgets_cannot_cover_everything_as_few_groups_as_possible_are_left():
    plan = freeze.optimized([2, 2, 2], [2, 3], rng())
    assert len(freeze.uncovered(plan, [2, 2, 2], [2, 3])) == 1
    assert len(freeze.uncovered(freeze.exact([2, 2, 2], [2, 3]), [2, 2, 2], [2, 3])) == 1


def test_the_largest_subset_is_exact_for_large_sizes():
    sizes = [3_671_552, 1_180_672, 918_272, 295_424, 229_760, 73_984, 73_984, 1_728, 1_024]
    for budget in (1_000, 1_500_000, 2_222_222, 5_000_000):
        subsets = torch.tensor([[n >> j & 1 for j in range(9)] for n in range(512)]) @ torch.tensor(sizes)
        best = subsets[subsets <= budget].max()
        assert freeze.trained(freeze.consensus(sizes, [budget, sum(sizes)]), sizes)[0] == best


def test_a_plan_beyond_the_budgets_is_not_taken(monkeypatch):
    """The solver allows itself a tolerance."""
    monkeypatch.setattr(freeze, "exact", lambda sizes, budgets: torch.ones(2, 2, dtype=torch.bool))
    assert freeze.optimized([1, 1], [1, 1], rng()).sum(1).tolist() == [1, 1]


@pytest.mark.parametrize("solve", [freeze.optimized, freeze.exact, freeze.random, freeze.sequential, freeze.cover])
def test_refuses_what_is_no_problem(solve):
    with pytest.raises(InvalidOption, match="at least one group"):
        solve([], [1])
    with pytest.raises(InvalidOption, match="of 1 parameter or more"):
        solve([0, 1], [1])
    with pytest.raises(InvalidOption, match="one number >= 0 per client"):
        solve([1], [])
    with pytest.raises(InvalidOption, match="one number >= 0 per client"):
        solve([1], [-1])
