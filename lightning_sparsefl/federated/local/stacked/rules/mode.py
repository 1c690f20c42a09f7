"""The mode that sends functions of layers to their rules, within a level of ``vmap`` over clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_sparsefl.federated.exchange.failures import in_brief, is_out_of_memory
from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.rules.copies import RESHAPING, KernelCopies
from lightning_sparsefl.federated.local.stacked.rules.gradients import Gradients

Rule = Callable[..., Any]
"""Function of :class:`LayerRules` and of the arguments of the function that it replaces; may return NotImplemented."""

RULES: dict[Any, Rule] = {}
"""Rules of all functions that have one."""


def rule_for(*functions: Any) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a function as the rule of others.

    Args:
        *functions: Functions of torch, or others that call :func:`torch.overrides.handle_torch_function`, whose rule
            never returns NotImplemented.
    """

    def register(rule: Rule) -> Rule:
        for function in functions:
            RULES[function] = rule
        return rule

    return register


@contextmanager
def failing_alone(name: str) -> Iterator[None]:
    """Raise :class:`NotStackable` in the place of an error in the call of a function for one of the clients.

    The user's code may catch the error, and then go on for this client alone.

    Args:
        name: Name of the function.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise NotStackable(f"calls `{name}`, which fails for a client ({in_brief(error)})") from error


class LayerRules(TorchFunctionMode):
    """Mode that sends the functions of layers to their rules, within a level of ``vmap`` over clients.

    Args:
        size: Number of clients.
        level: Number of the level.
        own: Identities of the module's own tensors, which no client has.
        gradients: Gradients of the weights; None where they cannot be seen.
        copies: Receiver of the copies of convolution kernels that are made; None without such kernels.
    """

    def __init__(
        self,
        size: int,
        level: int,
        own: Set[int] = frozenset(),
        gradients: Gradients | None = None,
        copies: KernelCopies | None = None,
    ) -> None:
        super().__init__()
        self.size, self.level, self._own, self.gradients, self._copies = size, level, own, gradients, copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the rule of a function, or the function itself."""
        try:
            return self._call(func, args, kwargs or {})
        except Exception as error:
            if not isinstance(error, NotStackable):  # which notes itself
                NotStackable.note(error)
            raise

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        require_others(args, self._own)
        rule, output = RULES.get(func), NotImplemented
        if rule is not None:
            with functorch.Outside():
                output = rule(self, *args, **kwargs)
        if output is NotImplemented:
            output = func(*args, **kwargs)
        if self._copies is not None and func in RESHAPING:
            self._copies.note(self._plain(args[0]), self._plain(output))
        return output

    def _plain(self, tensor: Tensor) -> Tensor:
        return functorch.unwrap(tensor, self.level)[0] if functorch.is_batched(tensor) else tensor

    def open(self, value: Any, dim: int = 0) -> Tensor | None:
        """Return the plain tensor of all clients; None if the value is the same for all.

        Args:
            value: Argument of a function.
            dim: Dimension in which the clients are to be.
        """
        if not functorch.is_batched(value):
            return None
        tensor, at = functorch.unwrap(value, self.level)
        return None if at is None else tensor if at == dim else tensor.movedim(at, dim)

    def open_all(self, *values: Any) -> list[Tensor | None] | None:
        """Return the plain tensors of arguments, None for those that are None; None if one is the same for all."""
        tensors = [None if value is None else self.open(value) for value in values]
        same = any(value is not None and tensor is None for value, tensor in zip(values, tensors, strict=True))
        return None if same else tensors

    def every(self, value: Any) -> Tensor | None:
        """Return the plain tensor of all clients, which repeats a value that is the same for all; None for None."""
        opened: Tensor | None = self.open(value)
        return value.expand(self.size, *value.shape) if opened is None and value is not None else opened

    def batch(self, value: Any, *weights: Any) -> Tensor | None:
        """Return the samples of all clients as one batch, if the weights are the same for all; else None."""
        tensor = None if any(map(functorch.is_batched, weights)) else self.open(value)
        return None if tensor is None else tensor.flatten(0, 1)

    def close_batch(self, tensor: Tensor) -> Tensor:
        """Return the samples of all clients, which were one batch, as those of each client."""
        return self.close(tensor.unflatten(0, (self.size, -1)))

    def close(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return a plain tensor as one of all clients.

        Args:
            tensor: Tensor with a dimension of the clients.
            dim: Dimension of the clients.
        """
        return functorch.wrap(tensor, dim, self.level)

    def image(self, value: Any, alone: bool = False) -> Tensor | None:
        """Return images of shape (B, C, H, W) as one tensor of shape (B, S * C, H, W); None if they are others.

        Args:
            value: The images.
            alone: Whether the value is one image of shape (C, H, W).
        """
        tensor = self.open(value, 0 if alone else 1)
        if alone and tensor is not None:
            tensor = tensor.unsqueeze(0)
        if tensor is None or tensor.dim() != 5:
            return None
        return channels_last(tensor.flatten(1, 2))

    def close_image(self, tensor: Tensor) -> Tensor:
        """Return images of shape (B, S * C, H, W) as those of all clients."""
        return self.close(tensor.unflatten(1, (self.size, -1)), 1)


READS_NUMBER = "reads a number out of a tensor (`.item()`, `float()`, `int()`)"
"""Clause of a step that needs a number of Python, of which each client has its own."""
LEAVES_TORCH = "leaves torch (`.numpy()`)"
"""Clause of a step that goes on with the numbers in another library."""
REMOVES_GRADIENT = "removes a gradient, or gives one to a weight without, so that steps differ"
"""Clause of a hook that decides which weights a step changes."""
KEPT_ELSEWHERE = "computes with parameters that it keeps elsewhere than in the module"
"""Clause of a step that reads the module's own tensors, which no client has."""


def require_others(args: Sequence[Any], own: Set[int], clause: str = KEPT_ELSEWHERE) -> None:
    """Check that a function is not one of a module's own tensors.

    Args:
        args: Arguments of the function.
        own: Identities of these tensors.
        clause: Clause of the error.

    Raises:
        NotStackable: If it is.
    """
    for arg in args:
        if id(arg) in own or (isinstance(arg, (list, tuple)) and any(id(item) in own for item in arg)):
            raise NotStackable(clause)


class OtherTensors(TorchFunctionMode):
    """Mode in which a module's own tensors cannot be read, outside of a level: of one client, or of schedulers.

    Args:
        own: Identities of the tensors.
        clause: Clause of the error.
    """

    def __init__(self, own: Set[int], clause: str = KEPT_ELSEWHERE) -> None:
        super().__init__()
        self._own, self._clause = own, clause

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, unless it is one of these tensors."""
        require_others(args, self._own, self._clause)
        return func(*args, **(kwargs or {}))


class FlatViews(TorchFunctionMode):
    """Mode for one client, whose images have the layout of kernels in a stack, which ``view`` cannot flatten.

    Args:
        copies: Receiver of the copies of convolution kernels that are made.
    """

    def __init__(self, copies: KernelCopies) -> None:
        super().__init__()
        self._copies = copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and ``reshape`` for a ``view`` of images."""
        if func is Tensor.view and args[0].dim() == 4 and not args[0].is_contiguous():
            func = Tensor.reshape
        output = func(*args, **(kwargs or {}))
        if func in RESHAPING:
            self._copies.note(args[0], output)
        return output


def channels_last(images: Tensor) -> Tensor:
    """Return images of shape (B, C, H, W) in the layout ``channels_last``, with the strides that this layout has.

    The stride of a dimension of size 1 is free, and torch's convolution on a CPU computes wrong gradients of the kernel
    where that of B is another one (2.15).
    """
    if len(images) == 1:
        return images.clone(memory_format=torch.channels_last)
    return images.contiguous(memory_format=torch.channels_last)
