"""The private names of ``torch.func`` that the stacked engine needs, in one place.

``torch.vmap`` enters and leaves its level in one call, and has its own rules for every function. The stacked engine
keeps a level open around a step, and looks through the wrappers of batched tensors where it has a faster rule. The
public API offers neither. `tests/federated/local/stacked/test_functorch.py` is the contract of these functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._C import _functorch

_NAMES = (
    *("_add_batch_dim", "_unwrap_batched", "_vmap_decrement_nesting", "_vmap_increment_nesting"),
    *("is_batchedtensor", "pop_dynamic_layer_stack", "push_dynamic_layer_stack"),
)
LOOPS = "not yet implemented the batching rule"
"""Words of the warning of ``torch.vmap`` that it does a function in a loop."""


def missing_name() -> str | None:
    """Return the first of the private names that this version of torch lacks, or None."""
    return next((name for name in _NAMES if not hasattr(_functorch, name)), None)


@contextmanager
def vmap_level(size: int) -> Iterator[int]:
    """Open a level of ``torch.vmap``, where each member of the batch draws random numbers of its own.

    Args:
        size: Size of the batch dimension.

    Yields:
        Number of the level, for the other functions.
    """
    level: int = _functorch._vmap_increment_nesting(size, "different")
    try:
        yield level
    finally:
        _functorch._vmap_decrement_nesting()


class Outside:
    """Context outside of all levels, to compute with the plain tensors of all members.

    A class, since each layer of each step enters it, and a context manager of a generator takes as long as a small
    layer's kernel.
    """

    def __enter__(self) -> None:
        """Leave the levels."""
        self._stack = _functorch.pop_dynamic_layer_stack()

    def __exit__(self, *error: object) -> None:
        """Enter them again."""
        _functorch.push_dynamic_layer_stack(self._stack)


def is_batched(value: Any) -> bool:
    """Return whether a value is a tensor of all members of a level."""
    return isinstance(value, Tensor) and _functorch.is_batchedtensor(value)


def wrap(tensor: Tensor, dim: int, level: int) -> Tensor:
    """Return a plain tensor as one of all members.

    Args:
        tensor: Tensor with a dimension of the members.
        dim: Dimension of the members.
        level: Number of the level.
    """
    wrapped: Tensor = _functorch._add_batch_dim(tensor, dim, level)
    return wrapped


def unwrap(tensor: Tensor, level: int) -> tuple[Tensor, int | None]:
    """Return the plain tensor of all members, and the dimension of the members; None if it is the same for all.

    Args:
        tensor: Tensor within a level.
        level: Number of the level.
    """
    value, dim = _functorch._unwrap_batched(tensor, level)
    return value, dim
