"""What a file asks for, before anything of it is loaded.

``torch.load(weights_only=True)`` executes nothing, but believes what a file says about sizes: a few bytes of pickle can
ask for any amount of memory, a compressed archive can too, and older versions read past the end of a record. So the
pickle is first walked through with stand-ins that only count: the few names that plain types and tensors need,
records as long as their tensors say, and no more bytes or objects than the length of the file justifies.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, BinaryIO, ClassVar

import torch

_OPCODES = (
    *("PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "GLOBAL", "REDUCE", "BINPERSID"),
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
)
"""What ``torch.save`` writes of plain types and tensors; none of these asks for memory by a number."""
_DTYPES = {
    **{
        f"torch {name}Storage": size
        for size, names in {
            1: ("Bool", "Byte", "Char"),
            2: ("Half", "BFloat16", "Short"),
            4: ("Float", "Int"),
            8: ("Double", "Long", "ComplexFloat"),
            16: ("ComplexDouble",),
        }.items()
        for name in names
    },
    "torch.storage UntypedStorage": 1,
    **{f"torch {name}": value.itemsize for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
"""Bytes of an element."""
_SPREAD = 64
"""Bytes of tensors that one byte of a file may stand for, by views and masks; and objects that a byte of pickle may."""


class NotPlain(ValueError):
    """Why a file is not loaded, as a clause."""


def require_plain(file: BinaryIO) -> None:
    """See that a file holds plain types and tensors, and is as large as it says.

    Args:
        file: Open; the place in it afterwards is any.

    Raises:
        NotPlain: If it is not.
    """
    length = file.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            _require_end(file, archive, length)
            sizes = _records(archive, length)
            name = next(name for name in archive.namelist() if name.partition("/")[2] == "data.pkl")
            data = archive.read(name)
        walk = _Walk(data, sizes, _SPREAD * length)
        _require_finite(walk.load(), _SPREAD * len(data))
    except NotPlain:
        raise
    except Exception as error:
        raise NotPlain(f"{type(error).__name__}") from error


def _require_end(file: BinaryIO, archive: zipfile.ZipFile, length: int) -> None:
    """See that the table of contents ends the file, so that every reader finds the same one."""
    file.seek(length - 22)
    mark, size, start, comment = struct.unpack("<4s8xLLH", file.read(22))
    file.seek(start + size)
    long = 76 if file.read(4) == b"PK\x06\x06" else 0
    if mark != b"PK\x05\x06" or comment or start != archive.start_dir or start + size + long + 22 != length:
        raise NotPlain("its table of contents is not at its end")


def _records(archive: zipfile.ZipFile, length: int) -> Mapping[str, int]:
    """The length of each record, by its name in the archive's folder."""
    entries = archive.infolist()
    sizes = {entry.filename.partition("/")[2]: entry.file_size for entry in entries}
    if any(entry.compress_type or entry.file_size != entry.compress_size for entry in entries):
        raise NotPlain("it is compressed")
    if len(sizes) < len(entries):
        raise NotPlain("two of its records have one name")
    if sum(sizes.values()) > length:
        raise NotPlain("its records are longer than the file")
    return sizes


class _Walk(pickle._Unpickler):
    """Walks through a pickle; storages become their lengths, and tensors nothing.

    Args:
        data: The pickle.
        sizes: Of the records.
        room: Bytes that the tensors may take together.
    """

    def _without_state(self) -> None:
        """What an object would be given besides its content has no use here."""
        self.stack.pop()  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Callable[..., Any]]] = {
        **{getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES},
        pickle.BUILD[0]: _without_state,
    }

    def __init__(self, data: bytes, sizes: Mapping[str, int], room: int) -> None:
        super().__init__(io.BytesIO(data))
        self._sizes, self._room = sizes, room
        self._names: dict[str, Callable[..., Any]] = {
            "collections OrderedDict": OrderedDict,
            "torch Size": tuple,
            "torch._utils _rebuild_tensor_v2": self._tensor,
            "torch._utils _rebuild_tensor_v3": self._tensor,
            "torch._utils _rebuild_parameter": _parameter,
        }

    def find_class(self, module: str, name: str) -> Any:
        """One of the few names, or the bytes of an element."""
        known = self._names.get(f"{module} {name}") or _DTYPES.get(f"{module} {name}")
        if known is None:
            raise NotPlain(f"it asks for {f'{module}.{name}'[:60]!r}")
        return known

    def persistent_load(self, pid: Any) -> tuple[int, int]:
        """A storage, whose record must be as long as it says."""
        kind, itemsize, key, _, count = pid
        if kind != "storage" or _whole(itemsize, count) * itemsize * count != self._sizes.get(f"data/{key}"):
            raise NotPlain("a tensor has another length than its record")
        return itemsize, itemsize * count

    def _tensor(
        self, storage: tuple[int, int], offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *rest: Any
    ) -> None:
        itemsize, length = storage
        itemsize = rest[2] if len(rest) > 2 and isinstance(rest[2], int) else itemsize  # of an untyped storage
        _whole(offset, *shape, *stride)
        positions = prod(shape)
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        self._room -= positions * itemsize
        if positions and (last + 1) * itemsize > length:
            raise NotPlain("a tensor reaches past its record")
        if self._room < 0:
            raise NotPlain("its tensors are much larger than the file")


def _parameter(*_: Any) -> None:
    """A parameter, whose tensor is counted already."""


def _whole(*numbers: Any) -> int:
    """1; only for whole numbers that are not negative."""
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise NotPlain("a tensor has a length that is none")
    return 1


def _require_finite(tree: Any, most: int) -> None:
    """See that nested values, each counted as often as it is found, are not many more than were written."""
    found, left = 0, [tree]
    while left:
        value = left.pop()
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        found += len(parts) + 1
        if found > most:
            raise NotPlain("its values contain themselves or each other many times")
        left.extend(parts)
