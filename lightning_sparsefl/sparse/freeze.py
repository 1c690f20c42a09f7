"""Assignment of layers to clients: freezing masks under a budget per client, and the problem P^mask.

Setayesh, Li, Wong, "PerFedMask: Personalized Federated Learning with Optimized Masking Vectors", ICLR 2023, section 5
and appendix F. A *plan* is a bool tensor of shape (clients, groups), True = the client trains that group of layers;
`sizes` are the groups' parameters, d in sum, `budgets` the most parameters that each client may train.

With c_j the number of clients that train group j, and gamma_n the largest 1 / c_j of what client n trains, it is ::

    minimize  d * sum gamma_n - (parameters of the groups that some client trains) + sum (budget_n - trained_n)

The first two terms are the paper's bias in closed form, since the weights m_nj / c_j of a trained group add up to 1;
the last is its slack. The paper leaves out what keeps empty masks from winning: here a client whose budget fits some
group trains at least one, and a group that fits some client is trained by one (where budgets allow it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd, inf
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.plan_search import improve

EXACT_SIZE = 24
"""Clients times groups up to which :func:`optimized` also solves the problem exactly."""
_BLOCKS = 16
"""Parts that the clients of one budget are divided into where their rows may differ."""
_RANDOM_BLOCKS = 4
"""The same in a random start, whose search takes time in proportion to the rows that differ."""
_RANDOM_STARTS = 4
"""Random starts of :func:`optimized`, besides the deterministic ones."""


def bias(plan: Tensor, sizes: Sequence[int]) -> float:
    """Compute the plan's term in the convergence bound (remark 1): ``d * sum gamma_n - covered parameters``.

    Args:
        plan: Bool tensor, shape (clients, groups).
        sizes: Number of parameters of each group.

    Example:
        >>> plan = torch.tensor([[True, False], [True, True]])
        >>> bias(plan, [1, 1])  # gamma 1/2 and 1
        1.0
    """
    size, counts = torch.tensor(sizes, dtype=torch.float64), plan.sum(0)
    shares = torch.where(counts > 0, 1 / counts.double(), 0)
    gammas = (plan * shares).amax(1)
    return float(size.sum() * gammas.sum() - size[counts > 0].sum())


def objective(plan: Tensor, sizes: Sequence[int], budgets: Sequence[int]) -> float:
    """Compute bias plus slack, the objective of P^mask.

    Args:
        plan: Bool tensor, shape (clients, groups).
        sizes: Number of parameters of each group.
        budgets: Number of parameters that each client may train.

    Example:
        >>> objective(torch.tensor([[True, False], [True, True]]), [1, 1], [1, 2])
        1.0
    """
    return bias(plan, sizes) + float(sum(budgets) - trained(plan, sizes).sum())


def trained(plan: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the number of parameters that each client trains: int64, shape (clients,).

    Example:
        >>> trained(torch.tensor([[True, False], [True, True]]), [3, 4])
        tensor([3, 7])
    """
    return (plan * torch.tensor(sizes)).sum(1)


def within_budgets(plan: Tensor, sizes: Sequence[int], budgets: Sequence[int]) -> bool:
    """Return whether every client is within its budget, and trains some group if one fits.

    Example:
        >>> plan = torch.tensor([[True, False], [True, True]])
        >>> within_budgets(plan, [3, 4], [3, 7]), within_budgets(plan, [3, 4], [3, 6])
        (True, False)
    """
    limit = torch.tensor(budgets)
    idle = ~plan.any(1) & (limit >= min(sizes))
    return not bool((trained(plan, sizes) > limit).any() | idle.any())


def uncovered(plan: Tensor, sizes: Sequence[int], budgets: Sequence[int]) -> list[int]:
    """Return the groups that fit some client's budget and that no client trains.

    Example:
        >>> uncovered(torch.tensor([[True, False, False]]), [1, 1, 9], [2])
        [1]
    """
    fits = torch.tensor(sizes) <= max(budgets)
    return torch.nonzero(fits & ~plan.any(0)).flatten().tolist()


def sequential(sizes: Sequence[int], budgets: Sequence[int]) -> Tensor:
    """Assign every client the first groups, in order, that still fit its budget.

    Returns:
        The plan.

    Raises:
        InvalidOption: If a size or a budget is out of its range.

    Example:
        >>> sequential([2, 3, 1], [3, 6]).int().tolist()
        [[1, 0, 1], [1, 1, 1]]
    """
    _check(sizes, budgets)
    return _per_budget(budgets, lambda budget: _first_fit(sizes, budget, range(len(sizes))), len(sizes))


def random(sizes: Sequence[int], budgets: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
    """Assign every client the groups that still fit its budget, tried in a random order of its own.

    Args:
        sizes: Number of parameters of each group.
        budgets: Number of parameters that each client may train.
        generator: CPU generator to draw from.

    Returns:
        The plan.

    Raises:
        InvalidOption: If a size or a budget is out of its range.

    Example:
        >>> plan = random([2, 3, 1], [3, 6], torch.Generator().manual_seed(0))
        >>> plan.shape, within_budgets(plan, [2, 3, 1], [3, 6])
        (torch.Size([2, 3]), True)
    """
    _check(sizes, budgets)
    orders = [torch.randperm(len(sizes), generator=generator).tolist() for _ in budgets]
    return _plan(len(sizes), [_first_fit(sizes, b, order) for b, order in zip(budgets, orders, strict=True)])


def consensus(sizes: Sequence[int], budgets: Sequence[int]) -> Tensor:
    """Assign every client the largest subset that fits its budget, the same one to all clients of a budget.

    Where some group is too large for every weak client this solves P^mask: the weak ones gain most by agreeing.

    Returns:
        The plan; of groups of one size the first are taken.

    Raises:
        InvalidOption: If a size or a budget is out of its range.

    Example:
        >>> consensus([4, 3, 2, 2], [5, 11]).int().tolist()
        [[0, 1, 1, 0], [1, 1, 1, 1]]
    """
    _check(sizes, budgets)
    return _per_budget(budgets, lambda budget: _knapsack(sizes, budget), len(sizes))


def cover(sizes: Sequence[int], budgets: Sequence[int]) -> Tensor:
    """Assign clients in turn, the smallest budgets first, the groups that the fewest clients have so far.

    Of groups that equally many clients have, the largest is first.

    Returns:
        The plan.

    Raises:
        InvalidOption: If a size or a budget is out of its range.

    Example:
        >>> cover([1, 1, 1, 1], [2, 2, 4]).int().tolist()
        [[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]]
    """
    _check(sizes, budgets)
    plan, counts = torch.zeros(len(budgets), len(sizes), dtype=torch.bool), [0] * len(sizes)
    for members in _blocks(budgets, _BLOCKS):
        order = sorted(range(len(sizes)), key=lambda group: (counts[group], -sizes[group]))
        for group in _first_fit(sizes, budgets[members[0]], order):
            plan[members, group] = True
            counts[group] += len(members)
    return plan


def exact(sizes: Sequence[int], budgets: Sequence[int]) -> Tensor:
    """Compute the optimum by a mixed-integer linear program; for a few clients and groups only.

    One binary variable z_jt says that t clients train group j; then 1 / c_j = sum z_jt / t is linear, and
    gamma_n >= 1 / c_j - (1 - m_nj).

    Returns:
        The plan.

    Raises:
        InvalidOption: If a size or a budget is out of its range.

    Example:
        >>> objective(exact([1, 1, 1, 1], [2, 3, 4]), [1, 1, 1, 1], [2, 3, 4])
        2.0
    """
    _check(sizes, budgets)
    from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import, and needed by this function only

    program = _program(sizes, budgets)
    found = milp(
        program.cost,
        constraints=LinearConstraint(program.rows, program.low, program.high),
        integrality=program.whole,
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise InvalidOption(f"No plan was found for {len(budgets)} clients and {len(sizes)} groups: {found.message}")
    marks = torch.tensor(found.x[: len(budgets) * len(sizes)]).reshape(len(budgets), len(sizes))
    return marks > 0.5


def optimized(sizes: Sequence[int], budgets: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
    """Return the best plan that local search finds from several starts, or the exact one where that is cheap.

    The starts are :func:`consensus`, :func:`cover`, :func:`sequential` and some random ones. Clients of one budget are
    interchangeable, so the time depends on the number of different budgets, not of clients.

    Args:
        sizes: Number of parameters of each group.
        budgets: Number of parameters that each client may train.
        generator: CPU generator to draw the random starts from.

    Returns:
        The plan; the same for equal arguments.

    Raises:
        InvalidOption: If a size or a budget is out of its range.

    Example:
        >>> plan = optimized([1, 1, 1, 1], [2, 2, 4], torch.Generator().manual_seed(0))
        >>> bias(plan, [1, 1, 1, 1]), plan[:2].sum(0).tolist()  # the two weak clients share the work
        (2.0, [1, 1, 1, 1])
    """
    starts = [consensus(sizes, budgets), cover(sizes, budgets), sequential(sizes, budgets)]
    starts += [_random_blocks(sizes, budgets, generator) for _ in range(_RANDOM_STARTS)]
    plans = [improve(start, sizes, budgets) for start in starts]
    if len(sizes) * len(budgets) <= EXACT_SIZE:
        plans.append(exact(sizes, budgets))
    plans = [plan for plan in plans if within_budgets(plan, sizes, budgets)]  # HiGHS allows itself a tolerance
    return min(plans, key=lambda plan: (len(uncovered(plan, sizes, budgets)), objective(plan, sizes, budgets)))


def _check(sizes: Sequence[int], budgets: Sequence[int]) -> None:
    if not sizes or min(sizes) < 1:
        raise InvalidOption(f"`sizes={list(sizes)}`: expected at least one group, each of 1 parameter or more.")
    if not budgets or min(budgets) < 0:
        raise InvalidOption(f"`budgets={list(budgets)}`: expected one number >= 0 per client.")


# ---- starts


def _first_fit(sizes: Sequence[int], budget: int, order: Sequence[int]) -> list[int]:
    chosen = []
    for group in order:
        if sizes[group] <= budget:
            chosen.append(group)
            budget -= sizes[group]
    return chosen


def _knapsack(sizes: Sequence[int], budget: int) -> list[int]:
    """Return the subset of the largest sum within a budget; of several the first in the order of groups.

    Bit s of ``sums[j]`` says whether some of the last j groups have s units together; a unit divides all sizes.
    """
    unit = gcd(*sizes)
    sizes, budget = [size // unit for size in sizes], min(budget, sum(sizes)) // unit
    fitting, sums = (1 << (budget + 1)) - 1, [1]
    for size in reversed(sizes):
        sums.append((sums[-1] | sums[-1] << size) & fitting)
    left, chosen = sums[-1].bit_length() - 1, []
    for group, (size, rest) in enumerate(zip(sizes, reversed(sums[:-1]), strict=True)):
        if left >= size and rest >> (left - size) & 1:
            chosen.append(group)
            left -= size
    return chosen


def _per_budget(budgets: Sequence[int], choose: Callable[[int], list[int]], groups: int) -> Tensor:
    """Return a plan with the same row for all clients of a budget."""
    values, places = torch.tensor(budgets).unique(return_inverse=True)
    return _plan(groups, [choose(budget) for budget in values.tolist()])[places]


def _plan(groups: int, chosen: Sequence[Sequence[int]]) -> Tensor:
    plan = torch.zeros(len(chosen), groups, dtype=torch.bool)
    for row, mine in zip(plan, chosen, strict=True):
        row[list(mine)] = True
    return plan


def _blocks(budgets: Sequence[int], most: int) -> list[list[int]]:
    """Split the clients of each budget into at most `most` parts, the smallest budgets first."""
    owners: dict[int, list[int]] = {}
    for client, budget in enumerate(budgets):
        owners.setdefault(budget, []).append(client)
    blocks = []
    for _, members in sorted(owners.items()):
        size = -(-len(members) // most)
        blocks += [members[start : start + size] for start in range(0, len(members), size)]
    return blocks


def _random_blocks(sizes: Sequence[int], budgets: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Draw one random row for each block of clients, since many different rows make the search slow."""
    blocks = _blocks(budgets, _RANDOM_BLOCKS)
    rows = random(sizes, [budgets[block[0]] for block in blocks], generator)
    plan = torch.zeros(len(budgets), len(sizes), dtype=torch.bool)
    for block, row in zip(blocks, rows, strict=True):
        plan[block] = row
    return plan


# ---- the exact program


class _Program(NamedTuple):
    """``min cost x`` where ``low <= rows x <= high`` and 0 <= x <= 1; `whole` marks the x that are integers."""

    cost: list[float]
    whole: list[int]
    rows: list[list[float]]
    low: list[float]
    high: list[float]


def _program(sizes: Sequence[int], budgets: Sequence[int]) -> _Program:
    """Build the program with the variables m_nj, z_jt for t = 0..N, gamma_n; parameters are in units of d."""
    clients, groups, dense = len(budgets), len(sizes), sum(sizes)
    share = [size / dense for size in sizes]
    marks, numbers = clients * groups, groups * (clients + 1)
    width = marks + numbers + clients
    rows: list[list[float]] = []
    low: list[float] = []
    high: list[float] = []

    def require(terms: dict[int, float], at_least: float, at_most: float) -> None:
        row = [0.0] * width
        for place, factor in terms.items():
            row[place] = factor
        rows.append(row)
        low.append(at_least)
        high.append(at_most)

    def mark(client: int, group: int) -> int:
        return client * groups + group

    def times(group: int, number: int) -> int:
        return marks + group * (clients + 1) + number

    for j in range(groups):
        z = {times(j, t): float(t) for t in range(clients + 1)}
        require(dict.fromkeys(z, 1.0), 1, 1)
        require(z | {mark(n, j): -1.0 for n in range(clients)}, 0, 0)  # sum_t t z_jt = c_j
        for n in range(clients):
            inverse = {times(j, t): 1 / t for t in range(1, clients + 1)}
            require(inverse | {mark(n, j): 1.0, marks + numbers + n: -1.0}, -inf, 1)  # gamma_n >= 1/c_j - (1 - m_nj)
    for n, budget in enumerate(budgets):
        own = {mark(n, j): share[j] for j in range(groups)}
        require(own, 0, (budget + 0.5) / dense)
        require(dict.fromkeys(own, 1.0), float(budget >= min(sizes)), inf)
    cost = [-share[place % groups] for place in range(marks)]
    for size, part in zip(sizes, share, strict=True):
        cost += [4.0 * clients if size <= max(budgets) else 0.0] + [-part] * clients
    return _Program(cost + [1.0] * clients, [1] * (marks + numbers) + [0] * clients, rows, low, high)
