"""Byte strings over a Unix socket, between the process that Flower starts for a message and the node's daemon."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

_COUNT, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")
_MOST_PARTS = 2**16
MOST_BYTES = 2**34
"""Most bytes of one request or reply."""
_POLL = 0.5


def send(connection: socket.socket, parts: Sequence[bytes]) -> None:
    """Send byte strings.

    Args:
        connection: Connected socket.
        parts: Byte strings.
    """
    connection.sendall(_COUNT.pack(len(parts)) + b"".join(_LENGTH.pack(len(part)) for part in parts))
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket, most: int = MOST_BYTES) -> list[bytes]:
    """Receive byte strings.

    Args:
        connection: Connected socket.
        most: Most bytes that are accepted.

    Raises:
        ConnectionError: If the other end has closed the connection, or states more bytes.
    """
    (count,) = _COUNT.unpack(_exactly(connection, _COUNT.size))
    if count > _MOST_PARTS:
        raise ConnectionError(f"the other end announces {count} parts; expected at most {_MOST_PARTS}")
    lengths = [_LENGTH.unpack(_exactly(connection, _LENGTH.size))[0] for _ in range(count)]
    if sum(lengths) > most:
        raise ConnectionError(f"the other end announces {sum(lengths)} bytes; expected at most {most}")
    return [_exactly(connection, length) for length in lengths]


def _exactly(connection: socket.socket, length: int) -> bytes:
    """Receive so many bytes; memory grows with what has arrived, not with what was announced."""
    received = bytearray()
    while len(received) < length:
        piece = connection.recv(min(length - len(received), 2**20))
        if not piece:
            raise ConnectionError(f"the connection was closed after {len(received)} of {length} bytes")
        received += piece
    return bytes(received)


def ask(path: Path, parts: Sequence[bytes], patience: float = 60.0) -> list[bytes]:
    """Send a request to a daemon, and return its reply.

    Args:
        path: Path of the daemon's socket.
        parts: Byte strings of the request.
        patience: Seconds to wait for a daemon that is being started.

    Raises:
        ConnectionError: If no daemon listens, or it ends before it has replied.
    """
    with _connected(path, time.monotonic() + patience) as connection:
        send(connection, parts)
        return receive(connection)


def _connected(path: Path, until: float) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError) as error:
            connection.close()
            if time.monotonic() > until:
                raise ConnectionError(f"no daemon listens at {path} ({error}); start `sparsefl-node`") from error
            time.sleep(_POLL)
        else:
            return connection
