"""Numbers in the tensors and arrays of a module's attributes, which the work of a client may write."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from itertools import chain
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
    stride: tuple[int, ...] = ()
    """Strides of a tensor."""
    grad: Tensor | None = None
    """Gradient of a tensor that a step trains itself."""
    requires_grad: bool = False
    """Whether a tensor without a history requires a gradient."""


class TensorContents:
    """Snapshot of the numbers in tensors and arrays.

    Tensors of other classes or layouts, those of inference mode and those with a graph are not covered, and neither are
    arrays of objects or of other classes, nor what shares its memory with the module's parameters and buffers before or
    after the work: it has what a client learns.

    Args:
        module: Module whose parameters and buffers are left out.

    Example:
        >>> centre = torch.zeros(2)
        >>> contents = TensorContents(nn.Module())
        >>> contents.add([centre], "Net.centre")
        >>> _ = centre.add_(1)
        >>> contents.restore()
        (['Net.centre'], [])
        >>> centre
        tensor([0., 0.])
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: dict[int, _Kept] = {}

    @cached_property
    def _learned(self) -> set[int]:
        """Addresses of the memory of parameters and buffers before the work."""
        return self._memories()

    def _memories(self) -> set[int]:
        own = chain(self._module.parameters(), self._module.buffers())
        return set(map(_memory_of, filter(is_plain, own))) - {0}  # of tensors without numbers

    def add(self, values: Iterable[Any], name: str) -> None:
        """Take a snapshot of the tensors and arrays of an attribute that are covered.

        Args:
            values: The attribute, with all that is in it.
            name: Name of the attribute.
        """
        numbers = [value for value in values if isinstance(value, NUMBERS)]
        for value in numbers if len(numbers) <= _MOST else ():
            if id(value) not in self._before:
                self._add(value, name)

    def add_module(self, module: nn.Module, name: str) -> None:
        """Take a snapshot of the parameters and buffers of a module that is in an attribute.

        Args:
            module: The module; one of 2^24 numbers is not copied, so that a change is told and not undone.
            name: Name of the attribute.
        """
        tensors = list(filter(is_plain, chain(module.parameters(), module.buffers())))
        is_large = sum(tensor.numel() for tensor in tensors) >= _LARGE
        for tensor in tensors:
            if id(tensor) not in self._before:
                self._add(tensor, name, is_large)

    def _add(self, value: Any, name: str, is_large: bool = False) -> None:
        if type(value) in (Tensor, nn.Parameter):
            if _is_covered(value) and _memory_of(value) not in self._learned:
                grad = value.grad if value.is_leaf else None
                place, flag = (value.data_ptr(), value._version, value.stride()), value.requires_grad
                content = None if is_large else _copy_of(value)
                self._before[id(value)] = _Kept(value, content, name, *place, grad, flag)
        elif type(value) is np.ndarray and value.size < _COMPARED and value.flags.writeable and _is_of_numpy(value):
            self._before[id(value)] = _Kept(value, value.copy(), name)

    def restore(self) -> tuple[list[str], list[str]]:
        """Restore the numbers.

        Returns:
            Names of the attributes whose numbers were restored, and of those for which it was not possible.
        """
        changed = [kept for kept in self._before.values() if _has_changed(kept)]
        if not changed:
            self._restore_gradients()
            return [], []
        learned = self._memories()
        restored, left = set[str](), set[str]()
        for kept in changed:
            if _is_in_place(kept) and _memory_of(kept.value) in learned:  # parameters have become views of it
                continue
            done = False
            with suppress(Exception):  # so that an odd tensor is reported, and all else is restored
                done = self._write(kept)
            (restored if done else left).add(kept.name)
        self._restore_gradients()
        return sorted(restored), sorted(left)

    def _restore_gradients(self) -> None:
        for kept in self._before.values():
            if isinstance(kept.value, Tensor) and kept.value.is_leaf:
                with suppress(RuntimeError):  # of one whose shape could not be restored
                    _restore_gradient(kept)

    @torch.no_grad()
    def _write(self, kept: _Kept) -> bool:
        """Give a tensor or an array its numbers, its shape and its type; return whether there is a copy of them."""
        value, content = kept.value, kept.content
        if content is None:
            return False
        if isinstance(value, np.ndarray):
            if value.shape != content.shape:
                value.resize(content.shape, refcheck=False)
            value[...] = content
            return True
        moved = (value.shape, value.stride()) != (content.shape, kept.stride)
        if not _is_in_place(kept) or value.dtype != content.dtype or (moved and value.grad_fn is not None):
            value.data = content.clone()  # and not into a memory that it has from elsewhere
        elif value.grad_fn is None:
            if moved:
                value.as_strided_(content.shape, kept.stride)
            value.copy_(content)
        else:
            value.data.copy_(content)
            if not value._is_view() and not self._has_views(value):  # or they would be views of a leaf
                value.detach_()  # or the next client would pass backward through this one's graph
        _copies[value] = (value._version, content)
        return True

    def _has_views(self, value: Tensor) -> bool:
        tensors = (kept.value for kept in self._before.values() if isinstance(kept.value, Tensor))
        return any(each._is_view() and each._base is value for each in tensors)


def _restore_gradient(kept: _Kept) -> None:
    value = kept.value
    if value.requires_grad is not kept.requires_grad and value.is_leaf:
        value.requires_grad_(kept.requires_grad)
    if value.grad is not kept.grad:
        value.grad = kept.grad


def _is_covered(value: Tensor) -> bool:
    has_graph = value.grad_fn is not None and value not in _copies  # of a view that was written, it stays
    return is_plain(value) and not value.is_inference() and not has_graph


def _memory_of(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _is_in_place(kept: _Kept) -> bool:
    """Return whether a tensor has its numbers where it had them."""
    return isinstance(kept.value, Tensor) and kept.value.data_ptr() == kept.place


def _is_of_numpy(value: np.ndarray[Any, Any]) -> bool:
    """Return whether an array's items are in a memory of NumPy's, unlike objects, texts of any length and tensors."""
    base = value
    while isinstance(base.base, np.ndarray):
        base = base.base
    return base.base is None and not value.dtype.hasobject and value.dtype.kind != "T"


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
    if value._version != kept.version or not _is_in_place(kept) or value.grad_fn is not None:
        return True
    return content is not None and not _is_same(value, content)
