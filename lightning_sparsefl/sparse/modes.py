"""Modes of a module's parts, which the user may have set one by one, and random numbers, restored after a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


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


@contextmanager
def random_restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore torch's random numbers of the CPU and of the GPUs of some tensors at the end of the context.

    Args:
        tensors: Tensors of what is called in the context, such as parameters.

    Example:
        >>> before = torch.get_rng_state()
        >>> with random_restored([]):
        ...     _ = torch.rand(1)
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    devices = {tensor.device.index or 0 for tensor in tensors if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        yield


@contextmanager
def restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of tensors that are written into within the context.

    Args:
        tensors: The tensors.

    Example:
        >>> count = torch.zeros(2)
        >>> with restored([count]):
        ...     _ = count.add_(1)
        >>> count
        tensor([0., 0.])
    """
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                if not torch.equal(tensor, value):  # a tensor that repeats a row cannot be written, nor has it been
                    tensor.copy_(value)
