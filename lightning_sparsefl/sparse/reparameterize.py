"""Weights that are a function of other numbers theta, and what their gradients become for theta."""

from __future__ import annotations

import torch
from torch import Tensor


def power(theta: Tensor, exponent: float) -> Tensor:
    """Return ``sign(theta) * |theta| ** exponent`` (Schwarz et al., "Powerpropagation", arXiv:2110.00296, eq. 1).

    Example:
        >>> power(torch.tensor([0.25, -0.25, 0.0]), 1.25)
        tensor([ 0.1768, -0.1768,  0.0000])
    """
    return theta if exponent == 1 else theta.sign() * theta.abs().pow(exponent)


def power_slope(theta: Tensor, exponent: float) -> Tensor:
    """Return the derivative of :func:`power`: ``exponent * |theta| ** (exponent - 1)``; 0 at 0 above exponent 1.

    Example:
        >>> power_slope(torch.tensor([0.25, 0.0]), 1.25)
        tensor([0.8839, 0.0000])
    """
    return exponent * theta.abs().pow(exponent - 1)


def root(weights: Tensor, exponent: float) -> Tensor:
    """Return the theta whose :func:`power` the weights are.

    Example:
        >>> root(torch.tensor([0.25, -1.0, 0.0]), 2.0)
        tensor([ 0.5000, -1.0000,  0.0000])
    """
    return power(weights, 1 / exponent)


def gate(theta: Tensor, threshold: float) -> Tensor:
    """Return where magnitudes reach a threshold.

    Example:
        >>> gate(torch.tensor([0.5, -2.0]), 1.0)
        tensor([False,  True])
    """
    return theta.abs() >= threshold


def gate_slope(theta: Tensor, threshold: float) -> Tensor:
    """Return the factor ``1 + 2 t |w| / (|w| + t)^2`` of the gradients of weights behind a gate of threshold t.

    It is the derivative of ``w * gate`` where the gate is treated as a smooth function of the magnitude (Wu et al.,
    "FIARSE", arXiv:2407.19389, section 3.2): 1.5 at the threshold, towards 1 far above it, and 1 for t = 0.

    Example:
        >>> gate_slope(torch.tensor([1.0, -2.0, 10.0]), 1.0)
        tensor([1.5000, 1.4444, 1.1653])
    """
    if threshold == 0:
        return torch.ones_like(theta)
    size = theta.abs()
    return 1 + 2 * threshold * size / (size + threshold) ** 2
