"""Names of splits by all options that they depend on, so that two different splits never have the same name."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
"""Types whose `repr` determines the value."""


def split_name(kind: type, options: Mapping[str, Any], seed: int) -> str:
    """Return the name of a class with a digest of its file, the options, the seed and the working directory.

    The working directory is part of the digest because a path among the options may be relative.

    Args:
        kind: Class of the data module.
        options: Values of the options by name.
        seed: Random seed of the split.

    Raises:
        InvalidOption: If a value is not determined by numbers, strings, arrays, tensors, and containers and dataclasses
            of these.

    Example:
        >>> names = {split_name(dict, {"sizes": sizes}, seed=0) for sizes in ((1, 2), [1, 2], (1, 2.0), "(1, 2)")}
        >>> len(names)
        4
    """
    described = [(name, _described_option(name, options[name])) for name in sorted(options)]
    content = repr((_identity(kind), described, seed, os.getcwd()))
    return f"{kind.__name__}-{hashlib.sha256(content.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


class _Unknown(Exception):
    """A value whose content cannot be read; the argument is that value."""


def _described_option(name: str, value: Any) -> Any:
    try:
        return _described(value)
    except _Unknown as error:
        inner = type(error.args[0]).__name__
        within = "" if error.args[0] is value else f" with a {inner}"
        raise InvalidOption(
            f"`data.{name}` is a {type(value).__name__}{within}, from which `data.memory_map` cannot name its files; "
            "expected numbers, strings, arrays, tensors, or a dataclass whose fields hold these. Rename an attribute "
            "that does not change the split so that it begins with an underscore, or set `data.memory_map` to null."
        ) from None


def _described(value: Any) -> Any:
    """Return nested tuples of plain values that determine a value, the same in all processes.

    Raises:
        _Unknown: If the value, or one in it, has another type.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, PurePath):
        return "path", str(value)
    if type(value) is Tensor:
        return _described_tensor(value)
    if type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic):  # a subclass may have a mask
        return _described_array(value)
    if type(value) in (list, tuple):
        return type(value).__name__, tuple(_described(item) for item in value)
    if type(value) is dict:
        return "dict", tuple((_described(key), _described(item)) for key, item in value.items())
    if type(value) in (set, frozenset):
        return "set", tuple(sorted((_described(item) for item in value), key=repr))
    return _described_dataclass(value)


def _described_tensor(value: Tensor) -> tuple[Any, ...]:
    try:
        array = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError):  # such as a sparse, quantized or meta tensor
        raise _Unknown(value) from None
    return "tensor", str(value.dtype), tuple(value.shape), hashlib.sha256(array.data).hexdigest()


def _described_array(value: np.ndarray | np.generic) -> tuple[Any, ...]:
    array = np.ascontiguousarray(value)
    if array.dtype.hasobject:
        raise _Unknown(value)
    return "array", array.dtype.descr, np.shape(value), hashlib.sha256(array.tobytes()).hexdigest()


def _described_dataclass(value: Any) -> tuple[Any, ...]:
    """Return the class and the fields of a dataclass, which must hold its whole state."""
    if not is_dataclass(value) or isinstance(value, type):
        raise _Unknown(value)
    names = [field.name for field in fields(value)]
    if set(getattr(value, "__dict__", ())) - set(names):
        raise _Unknown(value)
    return "dataclass", _identity(type(value)), tuple((name, _described(getattr(value, name))) for name in names)


def _identity(kind: type) -> tuple[str, ...]:
    """Return the file and the name of a class; the module of a script has other names in other processes."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return (kind.__module__ if file is None else os.path.abspath(file), kind.__qualname__)
