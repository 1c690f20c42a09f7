"""Numbers in the tensors and arrays of a module's attributes, which the work of a client may write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_sparsefl.callbacks.object_states import has_numbers, is_plain

NUMBERS = (Tensor, np.ndarray)
"""Types of values that :class:`TensorContents` may cover."""
_LARGE = 2**24
"""Number of elements from which on a tensor is not copied, as it costs memory for the whole run."""
_COMPARED = 2**16
"""Number of elements below which an array, and a tensor on a CPU, is compared, since not all writes are counted."""
_MOST = 1000
"""Largest number of tensors and arrays of an attribute that are covered: a container with more is taken for data."""
_copies = WeakTensorKeyDictionary()
"""A copy of each tensor with its version, which serves for all clients as long as they do not write into it."""


def forget_copies() -> None:
    """Let tensors be copied anew, since a user may have written into their `data` since the last run."""
    _copies.clear()


class _Kept(NamedTuple):
    value: Any
    content: Any
    """Copy of the numbers; None for a tensor that is too large."""
    name: str
    place: int = 0
    """Address of a tensor's numbers."""
    version: int = 0
    """Version of a tensor."""


class TensorContents:
    """Snapshot of the numbers in tensors and arrays.

    Tensors of other classes or layouts, those of inference mode and those with a graph are not covered, and neither are
    arrays of objects or of other classes, nor what shares its memory with the module's parameters and buffers: it has
    what a client learns.

    Args:
        own: Parameters and buffers of the module.

    Example:
        >>> centre = torch.zeros(2)
        >>> contents = TensorContents([])
        >>> contents.add([centre], "Net.centre")
        >>> _ = centre.add_(1)
        >>> contents.restore()
        (['Net.centre'], [])
        >>> centre
        tensor([0., 0.])
    """

    def __init__(self, own: Iterable[Tensor]) -> None:
        self._own = own
        self._before: dict[int, _Kept] = {}

    @cached_property
    def _learned(self) -> set[int]:
        """Addresses of the memory of parameters and buffers."""
        return {tensor.untyped_storage().data_ptr() for tensor in self._own if is_plain(tensor)}

    def add(self, values: Iterable[Any], name: str) -> None:
        """Take a snapshot of the tensors and arrays of an attribute that are covered.

        Args:
            values: The items of the attribute, or the attribute itself.
            name: Name of the attribute.
        """
        numbers = [value for value in values if isinstance(value, NUMBERS)]
        for value in numbers if len(numbers) <= _MOST else ():
            if id(value) not in self._before:
                self._add(value, name)

    def _add(self, value: Any, name: str) -> None:
        if type(value) in (Tensor, nn.Parameter):
            plain = is_plain(value) and not value.is_inference() and value.grad_fn is None
            if plain and value.untyped_storage().data_ptr() not in self._learned:
                self._before[id(value)] = _Kept(value, _copy_of(value), name, value.data_ptr(), value._version)
        elif type(value) is np.ndarray and value.size < _COMPARED and value.flags.writeable and _has_bytes(value):
            self._before[id(value)] = _Kept(value, value.copy(), name)

    def restore(self) -> tuple[list[str], list[str]]:
        """Restore the numbers.

        Returns:
            Names of the attributes whose numbers were restored, and of those for which it was not possible.
        """
        restored, left = set[str](), set[str]()
        for kept in self._changed():
            done = False
            with suppress(Exception):  # so that an odd tensor is reported, and all else is restored
                done = _write(kept.value, kept.content)
            (restored if done else left).add(kept.name)
        return sorted(restored), sorted(left)

    def _changed(self) -> Iterator[_Kept]:
        return (kept for kept in self._before.values() if _has_changed(kept))


def _has_bytes(value: np.ndarray[Any, Any]) -> bool:
    """Return whether an array holds its items itself, unlike objects and strings of any length."""
    return not value.dtype.hasobject and value.dtype.kind != "T"


def _copy_of(value: Tensor) -> Tensor | None:
    """Return a copy of a tensor, which is the last one if nothing has written into the tensor since."""
    if value.numel() >= _LARGE:
        return None
    version, copy = _copies.get(value, (None, None))
    if version != value._version or not _is_same(value, copy):
        copy = value.detach().clone()
        _copies[value] = (value._version, copy)
    return cast(Tensor, copy)


def _is_same(value: Tensor, copy: Tensor) -> bool:
    """Return whether a tensor without a counted write has the type, the shape and, if small, the numbers of a copy."""
    if value.shape != copy.shape or value.dtype != copy.dtype:
        return False
    compared = value.numel() < _COMPARED and value.device.type == "cpu" and value.dtype != torch.complex32
    return not compared or has_numbers(value, copy)


def _has_changed(kept: _Kept) -> bool:
    value, content = kept.value, kept.content
    if isinstance(value, np.ndarray):
        same = value.shape == content.shape and value.dtype == content.dtype
        return not same or bool(value.tobytes() != content.tobytes())
    if value._version != kept.version or value.data_ptr() != kept.place or value.grad_fn is not None:
        return True
    return content is not None and not _is_same(value, content)


@torch.no_grad()
def _write(value: Any, content: Any) -> bool:
    """Give a tensor or an array its numbers, its shape and its type; return whether there is a copy of them."""
    if content is None:
        return False
    if isinstance(value, np.ndarray):
        if value.shape != content.shape:
            value.resize(content.shape, refcheck=False)
        value[...] = content
        return True
    if value.grad_fn is not None:  # of a write that had one, which the next client would pass backward through
        value.detach_()
    if value.shape != content.shape or value.dtype != content.dtype:
        value.data = content.clone()
    else:
        value.copy_(content)
    _copies[value] = (value._version, content)
    return True
