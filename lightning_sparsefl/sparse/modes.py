"""Modes of a module's parts, training or evaluation, which the user may have set one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def modes_restored(module: nn.Module) -> Iterator[None]:
    """Restore each mode at the end of the context, since the user may keep some submodules in evaluation mode.

    Args:
        module: Module of the user.

    Example:
        >>> net = nn.Dropout()
        >>> with modes_restored(net):
        ...     _ = net.eval()
        >>> net.training
        True
    """
    modes = {child: child.training for child in module.modules()}
    try:
        yield
    finally:
        for child, mode in modes.items():
            child.training = mode


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, without gradients, until the end of the context.

    Args:
        module: Module of the user.

    Example:
        >>> net = nn.Dropout()
        >>> with evaluating(net):
        ...     net.training, torch.is_grad_enabled()
        (False, False)
    """
    with modes_restored(module), torch.no_grad():
        module.eval()
        yield
