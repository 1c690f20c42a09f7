"""Numbers in the tensors and arrays of a module's attributes, which the work of a client may write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_sparsefl.callbacks.object_states import has_numbers, is_plain

_LARGE = 2**24
"""Number of elements from which on a tensor is not copied, as it costs memory for the whole run."""
_LARGE_ARRAY = 2**16
"""Number of elements from which on an array is not copied, since all of them are compared after each client."""
_COMPARED = 2**12
"""Number of elements below which a tensor on a CPU is compared, since writes into its `data` are not counted."""
_MOST = 1000
"""Largest number of tensors and arrays that are covered: a container with more is taken for data."""
_copies = WeakTensorKeyDictionary()
"""A copy of each tensor with its version, which serves for all clients as long as they do not write into it."""


class _Kept(NamedTuple):
    value: Any
    version: int
    content: Any
    """Copy of the numbers; None for a tensor that is too large."""
    name: str


class TensorContents:
    """Snapshot of the numbers in tensors and arrays.

    Tensors with a graph, with a sparse or another layout than rows and columns, and those of inference mode are not
    covered.

    Example:
        >>> centre = torch.zeros(2)
        >>> contents = TensorContents()
        >>> contents.add(centre, "Net.centre")
        >>> _ = centre.add_(1)
        >>> contents.restore([])
        (['Net.centre'], [])
        >>> centre
        tensor([0., 0.])
    """

    def __init__(self) -> None:
        self._before: dict[int, _Kept] = {}

    def add(self, value: Tensor | np.ndarray[Any, Any], name: str) -> None:
        """Take a snapshot of a tensor or an array.

        Args:
            value: The tensor or array.
            name: Name of the attribute that has it.
        """
        if id(value) in self._before or len(self._before) >= _MOST:
            return
        if isinstance(value, Tensor):
            if is_plain(value) and not value.is_inference() and value.grad_fn is None:
                self._before[id(value)] = _Kept(value, value._version, _copy_of(value), name)
        elif value.size < _LARGE_ARRAY and value.dtype != object:
            self._before[id(value)] = _Kept(value, 0, value.copy(), name)

    def restore(self, own: Iterable[Tensor]) -> tuple[list[str], list[str]]:
        """Restore the numbers.

        Args:
            own: Parameters and buffers of the module, whose memory is left alone: it has what a client has learned.

        Returns:
            Names of the attributes whose numbers were restored, and of those that are too large for it.
        """
        changed = [kept for kept in self._before.values() if _has_changed(kept)]
        if not changed:
            return [], []
        learned = {tensor.untyped_storage().data_ptr() for tensor in own if is_plain(tensor)}
        restored, large = set[str](), set[str]()
        for kept in changed:
            if isinstance(kept.value, Tensor) and kept.value.untyped_storage().data_ptr() in learned:
                continue
            (large if kept.content is None else restored).add(kept.name)
            if kept.content is not None:
                _write(kept.value, kept.content)
        return sorted(restored), sorted(large)


def _copy_of(value: Tensor) -> Tensor | None:
    """Return a copy of a tensor, which is the last one if nothing has written into the tensor since."""
    if value.numel() >= _LARGE:
        return None
    version, copy = _copies.get(value, (None, None))
    if version != value._version or (_is_compared(value) and not has_numbers(value, copy)):
        copy = value.detach().clone()
        _copies[value] = (value._version, copy)
    return cast(Tensor, copy)


def _is_compared(value: Tensor) -> bool:
    return value.numel() < _COMPARED and value.device.type == "cpu"


def _has_changed(kept: _Kept) -> bool:
    if not isinstance(kept.value, Tensor):
        return not np.array_equal(kept.value, kept.content)
    return kept.value._version != kept.version or (
        _is_compared(kept.value) and not has_numbers(kept.value, kept.content)
    )


@torch.no_grad()
def _write(value: Any, content: Any) -> None:
    """Give a tensor or an array its numbers, and a tensor its shape."""
    if not isinstance(value, Tensor):
        value[...] = content
        return
    if value.shape != content.shape:
        value.data = content.clone()
    else:
        value.copy_(content)
    _copies[value] = (value._version, content)
