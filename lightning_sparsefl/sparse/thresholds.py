"""Thresholds on the rows of weights (Kim et al., "SpaFL", arXiv:2406.00431): a row is the weights of an output unit."""

from __future__ import annotations

import torch
from torch import Tensor


def row_size(weight: Tensor) -> Tensor:
    """Return the mean magnitude of each row, shape ``(rows,)``.

    Example:
        >>> row_size(torch.tensor([[1.0, -3.0], [0.0, 1.0]]))
        tensor([2.0000, 0.5000])
    """
    return weight.flatten(1).abs().mean(dim=1)


def keep_rows(weight: Tensor, thresholds: Tensor) -> Tensor:
    """Return a weight whose rows are 0 unless their mean magnitude exceeds the threshold (eq. 4).

    Example:
        >>> keep_rows(torch.tensor([[1.0, -3.0], [0.0, 1.0]]), torch.tensor([1.0, 1.0]))
        tensor([[ 1., -3.],
                [ 0.,  0.]])
    """
    return torch.where(_as_column(row_size(weight) > thresholds, weight), weight, 0.0)


def live_share(weight: Tensor, thresholds: Tensor) -> float:
    """Return the share of the rows that exceed their threshold.

    Example:
        >>> live_share(torch.tensor([[1.0, -3.0], [0.0, 1.0]]), torch.tensor([1.0, 1.0]))
        0.5
    """
    return float((row_size(weight) > thresholds).double().mean())


def threshold_gradients(weight: Tensor, gradient: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of a weight and of its thresholds from that of the kept rows, straight through the step.

    With ``q_i`` the sum of row i times its gradient, that of the threshold is ``-q_i``, and row i gets
    ``sign(w) * q_i / n`` besides its own gradient, n being its length; an own gradient of 0 if the row is off.

    Args:
        weight: Weight of two or more dimensions.
        gradient: Gradient of :func:`keep_rows`, dense.
        thresholds: Thresholds of its rows.

    Example:
        >>> weight, gradient = torch.tensor([[1.0, -3.0], [0.0, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 2.0]])
        >>> threshold_gradients(weight, gradient, torch.tensor([1.0, 1.0]))
        (tensor([[0., 2.],
                [0., 1.]]), tensor([ 2., -2.]))
    """
    pull = (weight * gradient).flatten(1).sum(dim=1)
    own = torch.where(_as_column(row_size(weight) > thresholds, weight), gradient, 0.0)
    return own + weight.sign() * _as_column(pull / weight[0].numel(), weight), -pull


def follow(weight: Tensor, change: Tensor) -> Tensor:
    """Return a weight after a change of the common thresholds: rows shrink where these have grown (eq. 12).

    ``row_i - change_i * sign(sum of row_i) / k``, k being the number of places of a convolution's kernel, or the number
    of inputs of a linear layer.

    Args:
        weight: Weight of two or more dimensions.
        change: Change of the threshold of each row.

    Example:
        >>> follow(torch.tensor([[1.0, -3.0], [0.0, 1.0]]), torch.tensor([1.0, 2.0]))
        tensor([[ 1.5000, -2.5000],
                [-1.0000,  0.0000]])
    """
    places = weight[0, 0].numel() if weight.dim() > 2 else weight.shape[1]
    return weight - _as_column(change * weight.flatten(1).sum(dim=1).sign() / places, weight)


def follow_all(weight: Tensor, history: Tensor) -> Tensor:
    """Return a weight after all changes of the common thresholds, one after another.

    Args:
        weight: Weight of two or more dimensions.
        history: Common thresholds of several rounds, shape ``(rounds, rows)``.

    Example:
        >>> follow_all(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0], [1.0], [4.0]]))
        tensor([[-1., -1.]])
    """
    for change in history.diff(dim=0):
        weight = follow(weight, change)
    return weight


def _as_column(values: Tensor, weight: Tensor) -> Tensor:
    return values.view(-1, *[1] * (weight.dim() - 1))
