"""Moments of the server's changes over rounds, and the steps that server optimizers make of them.

FedAvgM (Hsu et al., arXiv:1909.06335), FedAdagrad, FedAdam and FedYogi (Reddi et al., arXiv:2003.00295, algorithm 2),
and AdamW (arXiv:1711.05101) with bias correction.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Rule: TypeAlias = Literal["momentum", "adagrad", "adam", "yogi", "adamw"]
"""Name of a server optimizer."""


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 where its own type is narrower, in which the square of a small change is 0.

    Example:
        >>> wide(torch.tensor(1e-4, dtype=torch.float16)).square() > 0
        tensor(True)
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def first_moment(rule: Rule, moment: Tensor, change: Tensor, beta1: float) -> Tensor:
    """Return the next first moment: m = beta1 m + D with momentum, m = beta1 m + (1 - beta1) D else.

    Args:
        rule: Name of the server optimizer.
        moment: First moment before the round.
        change: Mean change D of the round.
        beta1: Decay of the moment.

    Example:
        >>> first_moment("momentum", torch.tensor(1.0), torch.tensor(-0.5), 0.9)
        tensor(0.4000)
    """
    return beta1 * moment + (change if rule == "momentum" else (1 - beta1) * change)


def second_moment(rule: Rule, moment: Tensor, change: Tensor, beta2: float) -> Tensor:
    """Return the next second moment v.

    Args:
        rule: Name of the server optimizer.
        moment: Second moment before the round.
        change: Mean change D of the round.
        beta2: Decay of the moment, which Adagrad does not have.

    Example:
        >>> before, change = torch.tensor(1.0), torch.tensor(2.0)
        >>> [float(second_moment(rule, before, change, 0.5)) for rule in ("adagrad", "adam", "yogi")]
        [5.0, 2.5, 3.0]
    """
    square = change.square()
    if rule == "adagrad":
        return moment + square
    if rule == "yogi":
        return moment - (1 - beta2) * square * torch.sign(moment - square)
    return beta2 * moment + (1 - beta2) * square


def unbiased(moment: Tensor, beta: float, steps: int | Tensor) -> Tensor:
    """Return a moment that started at 0, divided by the weight of the changes in it: 1 - beta^steps.

    Args:
        moment: First or second moment.
        beta: Decay of the moment.
        steps: Number of changes in the moment, above 0, or such a number for each coordinate.

    Example:
        >>> unbiased(torch.tensor([0.5, 0.75]), 0.5, torch.tensor([1, 2]))
        tensor([1., 1.])
    """
    if isinstance(steps, int):
        return moment / (1 - beta**steps)
    return moment / (1 - beta ** steps.double()).to(moment.dtype)


def adaptive_step(m: Tensor, v: Tensor, lr: float, tau: float) -> Tensor:
    """Return lr m / (sqrt(v) + tau).

    Args:
        m: First moment.
        v: Second moment.
        lr: Learning rate of the server.
        tau: Degree of adaptivity, above 0.

    Example:
        >>> adaptive_step(torch.tensor(1.0), torch.tensor(4.0), lr=0.5, tau=0.5)
        tensor(0.2000)
    """
    return lr * m / (v.sqrt() + tau)
