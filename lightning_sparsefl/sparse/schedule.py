"""Numbers that change over `total` steps (rounds, mostly), counted from 0; later steps stay at the end."""

from __future__ import annotations

import math

from lightning_sparsefl.errors import InvalidOption


def constant(initial: float, step: int, total: int) -> float:
    """Return `initial` at every step.

    Example:
        >>> constant(0.5, 7, 10)
        0.5
    """
    _progress(step, total)
    return initial


def linear(initial: float, step: int, total: int) -> float:
    """Decrease linearly from `initial` at step 0 to 0 at the last step; 0 if that is the only one.

    Example:
        >>> [linear(0.5, step, 3) for step in range(3)]
        [0.5, 0.25, 0.0]
    """
    return initial * (1 - _progress(step, total))


def cosine(initial: float, step: int, total: int) -> float:
    """Return ``0.5 * initial * (1 + cos(pi * step / (total - 1)))``: 0 at the last step, and if it is the only one.

    Example:
        >>> [round(cosine(0.5, step, 3), 3) for step in range(3)]
        [0.5, 0.25, 0.0]
    """
    return 0.5 * initial * (1 + math.cos(math.pi * _progress(step, total)))


def cubic(start: float, end: float, step: int, total: int) -> float:
    """Return ``end + (start - end) * (1 - step / total) ** 3`` (Zhu and Gupta, "To prune, or not to prune", 2017).

    It reaches `end` at step `total`, one past the last, so its first move can be that of step 1.

    Example:
        >>> [cubic(1.0, 0.0, step, 2) for step in range(3)]
        [1.0, 0.125, 0.0]
    """
    _progress(step, total)
    return end + (start - end) * (1 - min(step, total) / total) ** 3


def gradual(start: float, end: float, step: int, first: int, last: int) -> float:
    """Return `start` until step `first`, `end` from step `last` on, a cubic between (Zhu and Gupta 2017, eq. 1).

    Raises:
        InvalidOption: If `last` is not after `first`.

    Example:
        >>> [gradual(1.0, 0.0, step, 2, 4) for step in range(6)]
        [1.0, 1.0, 1.0, 0.125, 0.0, 0.0]
    """
    value = cubic(start, end, max(0, step - first), last - first)
    return start if step <= first else value  # exactly


def staircase(peak: float, stairs: int, step: int, total: int) -> float:
    """Return ``peak * i / stairs`` in the i-th of `stairs` equal parts, i from 0, so never `peak` (FedDIP, eq. 9).

    Raises:
        InvalidOption: If `stairs` is below 1.

    Example:
        >>> [staircase(1.0, 4, step, 8) for step in range(9)]
        [0.0, 0.0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 0.75]
    """
    _progress(step, total)
    if stairs < 1:
        raise InvalidOption(f"`stairs={stairs}`: expected at least 1.")
    return peak * min(step * stairs // total, stairs - 1) / stairs


def recurs(step: int, first: int, last: int, every: int) -> bool:
    """Return whether `step` is `first`, a multiple of `every` after it up to `last`, or `last`.

    Example:
        >>> [step for step in range(12) if recurs(step, 2, 9, 3)]
        [2, 5, 8, 9]
    """
    return first <= step <= last and ((step - first) % every == 0 or step == last)


def _progress(step: int, total: int) -> float:
    """Return the progress, from 0 at step 0 to 1 at step ``total - 1``."""
    if total < 1:
        raise InvalidOption(f"`total={total}`: expected at least 1 step.")
    if step < 0:
        raise InvalidOption(f"`step={step}`: expected at least 0.")
    return min(step / (total - 1), 1.0) if total > 1 else 1.0
