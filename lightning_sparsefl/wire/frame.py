"""Reading and writing of numbers and strings, with bounds that hold for any input."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from lightning_sparsefl.errors import InvalidOption, MalformedPayload

_VARINT_BYTES = 9
"""Longest encoding of a number, which has up to 63 bits."""

_SHOWN = 50
"""Number of characters of a string that an error shows."""

OBJECT = 1024
"""Approximate memory of a tensor object besides its values, in bytes; a few bytes of a payload can create one."""


@dataclass(frozen=True)
class Size:
    """Size of a payload in bytes."""

    total: int
    """Whole payload."""
    masks: int
    """Part of the payload that encodes masks: bits and positions, without names and flags."""


class Writer:
    """Writer of a payload, or of its size alone.

    Args:
        keep: Whether to keep the bytes; False only adds up lengths and never encodes a tensor.
    """

    def __init__(self, *, keep: bool) -> None:
        self.total = self.masks = self.decoded = 0
        self._parts: list[bytes] | None = [] if keep else None

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self.total += len(data)
        if self._parts is not None:
            self._parts.append(data)

    def bulk(self, length: int, make: Callable[[], bytes], *, masks: bool = False) -> None:
        """Append bytes that are only made if they are kept.

        Args:
            length: Number of bytes.
            make: Function that returns the bytes.
            masks: Whether the bytes encode a mask and count towards :attr:`Size.masks`.
        """
        self.total += length
        self.masks += length if masks else 0
        if self._parts is not None:
            self._parts.append(make())

    def claim(self, size: int) -> None:
        """Add to the memory that the receiver needs for decoding, in bytes."""
        self.decoded += size

    def varint(self, value: int) -> None:
        """Append a number from 0 to 2**63 - 1 with seven bits per byte, lowest first."""
        data = bytearray()
        while value > 127:
            data.append(value & 127 | 128)
            value >>= 7
        data.append(value)
        self.write(bytes(data))

    def real(self, value: float) -> None:
        """Append a float64."""
        self.write(struct.pack("<d", value))

    def text(self, value: str) -> None:
        """Append the length of a string, then the string as UTF-8.

        Raises:
            InvalidOption: If the string holds a surrogate, half of a character, which could not be printed or stored.
        """
        try:
            data = value.encode()
        except UnicodeEncodeError:
            raise InvalidOption(
                f"A message holds the string {value[:_SHOWN]!r}, with a surrogate; expected text that UTF-8 can hold."
            ) from None
        self.varint(len(data))
        self.write(data)

    def size(self) -> Size:
        """Return the size of what was written."""
        return Size(total=self.total, masks=self.masks)

    def payload(self) -> bytes:
        """Return the bytes that were written; empty if they are not kept."""
        return b"".join(self._parts or ())


class Reader:
    """Reader of a payload that checks every length against what is left.

    Args:
        payload: Bytes to read.
        room: Limit on the memory of all decoded tensors together, in bytes.
    """

    def __init__(self, payload: bytes | bytearray | memoryview, *, room: int) -> None:
        self._data = memoryview(payload).cast("B")
        self._at = 0
        self._room = room

    @property
    def left(self) -> int:
        """Number of bytes that were not read yet."""
        return len(self._data) - self._at

    def take(self, length: int) -> memoryview:
        """Read `length` bytes."""
        if length > self.left:
            raise MalformedPayload(f"The payload ends at byte {len(self._data)}; expected {length - self.left} more.")
        self._at += length
        return self._data[self._at - length : self._at]

    def claim(self, size: int) -> None:
        """Count memory against the limit before it is allocated."""
        self._room -= size
        if self._room < 0:
            raise MalformedPayload(
                f"At byte {self._at} the payload needs {-self._room} bytes of memory beyond the limit for this model."
            )

    def byte(self, below: int) -> int:
        """Read a byte, which must be less than `below`."""
        value = self.take(1)[0]
        if value >= below:
            raise MalformedPayload(f"Byte {self._at - 1} of the payload is {value}; expected less than {below}.")
        return value

    def varint(self, most: int) -> int:
        """Read a number from 0 to `most`."""
        value = 0
        for place in range(_VARINT_BYTES):
            byte = self.take(1)[0]
            value |= (byte & 127) << 7 * place
            if byte < 128:
                break
        else:
            raise MalformedPayload(
                f"The number before byte {self._at} of the payload has more than {_VARINT_BYTES} bytes."
            )
        if value > most:
            raise MalformedPayload(
                f"The number before byte {self._at} of the payload is {value}; expected at most {most}."
            )
        return value

    def real(self) -> float:
        """Read a float64."""
        return float(struct.unpack("<d", self.take(8))[0])

    def text(self) -> str:
        """Read a string, which holds no surrogates since these are not valid UTF-8."""
        data = self.take(self.varint(self.left))
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise MalformedPayload(f"The string before byte {self._at} of the payload is not valid UTF-8.") from error

    def finish(self) -> None:
        """Check that the whole payload was read."""
        if self.left:
            raise MalformedPayload(f"{self.left} bytes follow after the end of the payload; expected none.")


def varint_size(value: int) -> int:
    """Return the number of bytes that :meth:`Writer.varint` writes.

    Example:
        >>> varint_size(127), varint_size(128)
        (1, 2)
    """
    return max(1, (value.bit_length() + 6) // 7)
