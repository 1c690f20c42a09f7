"""Safe loading of files written by ``torch.save``: their content is validated before torch reads it.

``torch.load(weights_only=True)`` executes nothing, but trusts the sizes in a file: a few bytes of pickle can request
any amount of memory, so can a compressed archive, and older versions read past the end of a record. Therefore the
pickle is first interpreted with placeholders that only count. Accepted are the few globals that plain types and tensors
need, records as long as their tensors, and no more bytes or objects than the length of the file justifies.

The validation is effective only if torch then reads the same records. So only the layout of ``torch.save`` is accepted:
an archive that fills the file from its first byte to its last, with records of the known names in one folder. For a
legacy file followed by an archive, torch would read the legacy part, and torch's zip reader ignores the case of names.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch

from lightning_sparsefl.errors import CheckpointMismatch

_OPCODES = (
    *("PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "GLOBAL", "REDUCE", "BINPERSID"),
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
)
"""Opcodes that ``torch.save`` writes for plain types and tensors; none allocates memory by a number in the file."""
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
"""Bytes per element by storage type and dtype."""
_SPREAD = 64
"""Maximum bytes of tensors (through views and masks) per byte of the file, and objects per byte of the pickle."""
_NAME = re.compile(
    r"(?P<folder>[^/\0]+)/"
    r"(?P<leaf>data\.pkl|data/(0|[1-9][0-9]*)|byteorder|version|\.format_version|\.storage_alignment|\.data/serialization_id)"
)
"""Names of the records that ``torch.save`` writes."""
_LARGE = 0xFFFFFFFF
"""Value of a 32-bit field of an archive that refers to a 64-bit field elsewhere."""


class NotPlain(ValueError):
    """The content of a file is not allowed; the message is a clause with the reason."""


def load_plain(path: Path) -> Any:
    """Load a file of plain types and tensors on the CPU, without executing its content or trusting its sizes.

    Args:
        path: File written by :func:`~lightning_sparsefl.federated.storage.atomic_files.write_atomically`.

    Raises:
        CheckpointMismatch: If the file is missing, not readable or damaged, contains anything but plain types, or
            requests more memory than its own size justifies.
    """
    if not path.is_file():
        raise CheckpointMismatch(f"There is no checkpoint at {path}; expected a file (option `ckpt_path`).")
    try:
        with path.open("rb") as file:
            return load_checked(file)
    except PermissionError as error:
        raise CheckpointMismatch(
            f"{path} cannot be read ({error.strerror}); make it readable, or choose another `ckpt_path`."
        ) from error
    except Exception as error:
        reason = f" ({error})" if isinstance(error, NotPlain) else ""
        raise CheckpointMismatch(
            f"{path} is damaged or not a checkpoint of plain types{reason}; choose another `ckpt_path`."
        ) from error


def load_checked(file: BinaryIO) -> Any:
    """Validate a file, then load it on the CPU from the same handle, so that both steps read the same file.

    Args:
        file: File object opened for reading.

    Raises:
        NotPlain: If the file contains anything but plain types and tensors, or its stated sizes are wrong.
    """
    require_plain(file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def require_plain(file: BinaryIO) -> None:
    """Validate that a file contains only plain types and tensors, and that its stated sizes are right.

    Args:
        file: File object opened for reading; its position changes.

    Raises:
        NotPlain: If the validation fails.
    """
    length = file.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            _require_end(file, archive, length)
            records = _records(archive, length)
            sizes = {leaf: entry.file_size for leaf, entry in records.items()}
            data = archive.read(records["data.pkl"])
        walk = _Walk(data, sizes, _SPREAD * length)
        _require_finite(walk.load(), _SPREAD * len(data))
    except NotPlain:
        raise
    except Exception as error:
        raise NotPlain(f"{type(error).__name__}") from error


def _require_end(file: BinaryIO, archive: zipfile.ZipFile, length: int) -> None:
    """Check that the central directory is at the end of the file, so that every reader finds the same one.

    The file ends with: directory | 64-bit record, 56 bytes | its locator, 20 bytes | end record, 22 bytes. The 64-bit
    record and its locator are optional.
    """
    file.seek(max(length - 98, 0))
    end = file.read()
    mark, size, start, comment = struct.unpack("<4s8xLLH", end[-22:])
    rest = 22
    if end[-42:-38] == b"PK\x06\x07":
        short, (size, start), rest = (size, start), struct.unpack("<QQ", end[40:56]), 98
        located = (end[:4], *struct.unpack("<Q", end[64:72])) == (b"PK\x06\x06", start + size)
        if not located or short != (min(size, _LARGE), min(start, _LARGE)):
            raise NotPlain("it has two tables of contents")
    if mark != b"PK\x05\x06" or comment or start != archive.start_dir or start + size + rest != length:
        raise NotPlain("its table of contents is not at its end")


def _records(archive: zipfile.ZipFile, length: int) -> Mapping[str, zipfile.ZipInfo]:
    """Return the records by their names relative to the archive's folder."""
    entries = archive.infolist()
    named = [(entry, _NAME.fullmatch(entry.orig_filename)) for entry in entries]
    records = {match["leaf"]: entry for entry, match in named if match is not None}
    if len({match and match["folder"] for _, match in named}) != 1 or len(records) < len(entries):
        raise NotPlain("its records are not those that `torch.save` writes")
    if min(entry.header_offset for entry in entries) != 0:
        raise NotPlain("it does not begin with a record")
    if any(entry.compress_type or entry.file_size != entry.compress_size for entry in entries):
        raise NotPlain("it is compressed")
    if any(entry.extra and max(entry.file_size, entry.header_offset) < _LARGE for entry in entries):
        raise NotPlain("it gives a record two sizes")
    if sum(entry.file_size for entry in entries) > length:
        raise NotPlain("its records are longer than the file")
    return records


class _Walk(pickle._Unpickler):
    """Interpreter of a pickle that replaces storages by their lengths and tensors by None.

    Args:
        data: Bytes of the pickle.
        sizes: Length of each record in bytes.
        room: Maximum total size of the tensors in bytes.
    """

    def _without_state(self) -> None:
        """Discard the state that would be assigned to an object."""
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
        """Return the placeholder of an allowed name, or the bytes per element of a dtype.

        Args:
            module: Module of the name.
            name: Name within the module.

        Raises:
            NotPlain: If the name is not allowed.
        """
        known = self._names.get(f"{module} {name}") or _DTYPES.get(f"{module} {name}")
        if known is None:
            raise NotPlain(f"it asks for {f'{module}.{name}'[:60]!r}")
        return known

    def persistent_load(self, pid: Any) -> tuple[int, int]:
        """Return the itemsize and the length in bytes of a storage.

        Args:
            pid: Identifier of the storage.

        Raises:
            NotPlain: If the length of its record differs.
        """
        kind, itemsize, key, _, count = pid
        if kind != "storage" or _require_whole(itemsize, count) * itemsize * count != self._sizes.get(f"data/{key}"):
            raise NotPlain("a tensor has another length than its record")
        return itemsize, itemsize * count

    def _tensor(
        self, storage: tuple[int, int], offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *rest: Any
    ) -> None:
        itemsize, length = storage
        itemsize = rest[2] if len(rest) > 2 and isinstance(rest[2], int) else itemsize  # of an untyped storage
        _require_whole(offset, *shape, *stride)
        positions = prod(shape)
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        self._room -= positions * itemsize
        if positions and (last + 1) * itemsize > length:
            raise NotPlain("a tensor reaches past its record")
        if self._room < 0:
            raise NotPlain("its tensors are much larger than the file")


def _parameter(*_: Any) -> None:
    """Return the placeholder of a parameter, whose tensor is counted already."""


def _require_whole(*numbers: Any) -> int:
    """Return 1 if all numbers are integers >= 0, else raise `NotPlain`."""
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise NotPlain("a tensor has a size or an offset that is not a whole number >= 0")
    return 1


def _require_finite(tree: Any, most: int) -> None:
    """Check that nested values, counted with repetition, are at most `most`, so that they cannot contain themselves."""
    found, left = 0, [tree]
    while left:
        value = left.pop()
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        found += len(parts) + 1
        if found > most:
            raise NotPlain("its values contain themselves or each other many times")
        left.extend(parts)
