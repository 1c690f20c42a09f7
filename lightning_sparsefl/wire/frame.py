"""The bytes under the codec: numbers, strings, and bounds that hold against any input."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from lightning_sparsefl.errors import MalformedPayload

_VARINT_BYTES = 9
"""63 bits, all that a length can be."""


OBJECT = 1024
"""About the bytes of a tensor besides its values, which a few bytes of a payload can ask for."""


@dataclass(frozen=True)
class Size:
    """What a payload weighs, in bytes."""

    total: int
    """All of it."""
    masks: int
    """Of which say where things are: mask bits and positions, without names and flags."""


class Writer:
    """Collects a payload, or only its size.

    Args:
        keep: False adds up lengths and never makes the bytes of a tensor.
    """

    def __init__(self, *, keep: bool) -> None:
        self.total = self.masks = self.decoded = 0
        self._parts: list[bytes] | None = [] if keep else None

    def write(self, data: bytes) -> None:
        """Append bytes that are cheap to make."""
        self.total += len(data)
        if self._parts is not None:
            self._parts.append(data)

    def bulk(self, length: int, make: Callable[[], bytes], *, masks: bool = False) -> None:
        """Append `length` bytes that are made only if they are kept; `masks` = they say where things are."""
        self.total += length
        self.masks += length if masks else 0
        if self._parts is not None:
            self._parts.append(make())

    def claim(self, size: int) -> None:
        """Note that the receiver will need `size` bytes for what follows."""
        self.decoded += size

    def varint(self, value: int) -> None:
        """A number from 0 to 2**63 - 1, seven bits a byte, the low ones first."""
        data = bytearray()
        while value > 127:
            data.append(value & 127 | 128)
            value >>= 7
        data.append(value)
        self.write(bytes(data))

    def real(self, value: float) -> None:
        """A float64."""
        self.write(struct.pack("<d", value))

    def text(self, value: str) -> None:
        """A string, with its length in front."""
        data = value.encode("utf-8", "surrogatepass")
        self.varint(len(data))
        self.write(data)

    def size(self) -> Size:
        """The size so far."""
        return Size(total=self.total, masks=self.masks)

    def payload(self) -> bytes:
        """The bytes so far; empty if they are not kept."""
        return b"".join(self._parts or ())


class Reader:
    """Walks over a payload and never past its end.

    Args:
        payload: The bytes.
        room: Bytes that the decoded tensors may take together.
    """

    def __init__(self, payload: bytes | bytearray | memoryview, *, room: int) -> None:
        self._data = memoryview(payload).cast("B")
        self._at = 0
        self._room = room

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self._data) - self._at

    def take(self, length: int) -> memoryview:
        """The next `length` bytes."""
        if length > self.left:
            raise MalformedPayload(f"The payload ends at byte {len(self._data)}, expected {length - self.left} more.")
        self._at += length
        return self._data[self._at - length : self._at]

    def claim(self, size: int) -> None:
        """Ask for memory before it is allocated."""
        self._room -= size
        if self._room < 0:
            raise MalformedPayload(
                f"Before byte {self._at} the payload asks for {-self._room} bytes more than its model allows."
            )

    def byte(self, below: int) -> int:
        """The next byte, which must be less than `below`."""
        value = self.take(1)[0]
        if value >= below:
            raise MalformedPayload(f"Byte {self._at - 1} of the payload is {value}, expected less than {below}.")
        return value

    def varint(self, most: int) -> int:
        """A number from 0 to `most`."""
        value = 0
        for place in range(_VARINT_BYTES):
            byte = self.take(1)[0]
            value |= (byte & 127) << 7 * place
            if byte < 128:
                break
        else:
            raise MalformedPayload(f"The number that ends at byte {self._at} of the payload has no end.")
        if value > most:
            raise MalformedPayload(f"Before byte {self._at} the payload says {value}, expected at most {most}.")
        return value

    def real(self) -> float:
        """A float64."""
        return float(struct.unpack("<d", self.take(8))[0])

    def text(self) -> str:
        """A string."""
        data = self.take(self.varint(self.left))
        try:
            return str(data, "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise MalformedPayload(f"The string before byte {self._at} of the payload is no UTF-8.") from error

    def finish(self) -> None:
        """See that nothing is left."""
        if self.left:
            raise MalformedPayload(f"{self.left} bytes follow the end of the payload.")


def varint_size(value: int) -> int:
    """Bytes that :meth:`Writer.varint` takes.

    Example:
        >>> varint_size(127), varint_size(128)
        (1, 2)
    """
    return max(1, (value.bit_length() + 6) // 7)
