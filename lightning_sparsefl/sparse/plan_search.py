"""Local search for freezing masks: one client's groups at a time, or those of all clients that are alike.

What is searched is :func:`lightning_sparsefl.sparse.freeze.objective`. Clients with the same budget and the same groups
are one row with a number, so the time depends on how many rows differ, not on how many clients there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 256
"""Moves that are scored at once."""
_ROUNDING = 1e-9
"""Relative gain below which a move is rounding error."""


def improve(plan: Tensor, sizes: Sequence[int], budgets: Sequence[int]) -> Tensor:
    """Improve a plan by local search: make the best of all single moves, until no move helps.

    A move adds a group to a client, drops one, or swaps two, for one client or for all that have the same budget and
    the same groups. The result is within the budgets if `plan` is, and leaves no more groups uncovered.

    Args:
        plan: Plan to start from, bool, shape (clients, groups).
        sizes: Number of parameters of each group.
        budgets: Number of parameters that each client may train.

    Returns:
        A plan of the same shape; clients of one budget are interchangeable, and may have changed places.

    Example:
        >>> improve(torch.tensor([[True, False, False], [True, True, False]]), [2, 1, 3], [3, 6]).int().tolist()
        [[1, 1, 0], [1, 1, 1]]
    """
    sizing = _Sizing.of(sizes, budgets)
    pool = _Pool.of(plan, budgets)
    value = float(_scores(pool, sizing, torch.zeros(1, len(sizes)), 1)[0, 0])  # of the move that changes nothing
    while True:
        move = min((_best(pool, sizing, many) for many in pool.amounts()), key=lambda move: move.value)
        if move.value >= value - _ROUNDING * max(1.0, value):
            return pool.plan(budgets)
        pool, value = pool.after(move), move.value


class _Sizing(NamedTuple):
    """Constants of the search, float64, so that sums of parameters are exact."""

    sizes: Tensor
    """Shape (groups,)."""
    wanted: Tensor
    """Bool: the groups that fit some client."""
    moves: Tensor
    """Shape (moves, groups): what a move adds to a row, -1, 0 or 1."""

    @staticmethod
    def of(sizes: Sequence[int], budgets: Sequence[int]) -> _Sizing:
        one = torch.eye(len(sizes), dtype=torch.float64)
        swaps = (one[:, None] - one[None]).flatten(0, 1)
        size = torch.tensor(sizes, dtype=torch.float64)
        return _Sizing(size, size <= max(budgets), torch.cat([one, -one, swaps[swaps.any(1)]]))


class _Move(NamedTuple):
    """Some clients of one row change it."""

    value: float
    row: int
    change: Tensor
    many: int


class _Pool(NamedTuple):
    """Clients with the same budget and the same groups, counted."""

    budgets: Tensor
    """Float64, shape (rows,)."""
    rows: Tensor
    """0 or 1, shape (rows, groups)."""
    number: Tensor
    """Clients of each row."""

    @staticmethod
    def of(plan: Tensor, budgets: Sequence[int]) -> _Pool:
        return _Pool.merged(
            torch.tensor(budgets, dtype=torch.float64), plan.double(), torch.ones(len(budgets), dtype=torch.int64)
        )

    @staticmethod
    def merged(budgets: Tensor, rows: Tensor, number: Tensor) -> _Pool:
        """Merge equal rows; their order follows from their contents alone."""
        keys, places = torch.unique(torch.cat([budgets[:, None], 1 - rows], 1), dim=0, return_inverse=True)
        total = torch.zeros(len(keys), dtype=torch.int64).index_add_(0, places, number)
        some = total > 0
        return _Pool(keys[some, 0], 1 - keys[some, 1:], total[some])

    def amounts(self) -> list[int]:
        """Return how many clients a move may take: one, or all of some row."""
        return sorted({1, *self.number.tolist()})

    def after(self, move: _Move) -> _Pool:
        """Return the pool after a move."""
        number = self.number.clone()
        number[move.row] -= move.many
        return _Pool.merged(
            torch.cat([self.budgets, self.budgets[move.row, None]]),
            torch.cat([self.rows, (self.rows[move.row] + move.change)[None]]),
            torch.cat([number, torch.tensor([move.many])]),
        )

    def plan(self, budgets: Sequence[int]) -> Tensor:
        """Return the plan: the rows, given to the clients of their budgets in the order of both."""
        plan = torch.zeros(len(budgets), self.rows.shape[1], dtype=torch.bool)
        plan[torch.tensor(budgets).argsort(stable=True)] = self.rows.bool().repeat_interleave(self.number, 0)
        return plan


def _best(pool: _Pool, sizing: _Sizing, many: int) -> _Move:
    """Return the best move of `many` clients at once; of equal ones the first."""
    scores = torch.cat(
        [
            torch.where(_possible(pool, sizing, part, many), _scores(pool, sizing, part, many), torch.inf)
            for part in sizing.moves.split(_CHUNK)
        ]
    )
    change, row = divmod(int(scores.argmin()), len(pool.rows))
    return _Move(float(scores[change, row]), row, sizing.moves[change], many)


def _possible(pool: _Pool, sizing: _Sizing, changes: Tensor, many: int) -> Tensor:
    """Return whether `many` clients of a row may change it so: bool, shape (changes, rows)."""
    changed = pool.rows + changes[:, None]
    whole = ((changed == 0) | (changed == 1)).all(2) & (changed.amax(2) == 1)
    return whole & (changed @ sizing.sizes <= pool.budgets) & (pool.number >= many)


def _scores(pool: _Pool, sizing: _Sizing, changes: Tensor, many: int) -> Tensor:
    """Compute the objective once `many` clients of a row have changed it: shape (changes, rows).

    A group that no client trains although it fits one costs more than all else together.
    """
    number, size = pool.number.double(), sizing.sizes
    counts = number @ pool.rows + many * changes  # (changes, groups)
    shares = torch.where(counts > 0, 1 / counts, 0)[:, None]
    before = (pool.rows * shares).amax(2)  # (changes, rows)
    after = ((pool.rows + changes[:, None]) * shares).amax(2)
    gammas = (before @ number)[:, None] + many * (after - before)
    covered, dense = counts > 0, size.sum()
    slack = number @ pool.budgets - counts @ size
    missing = (sizing.wanted & ~covered).sum(1) * 4 * dense * number.sum()
    return dense * gammas + (slack - covered.double() @ size + missing)[:, None]
