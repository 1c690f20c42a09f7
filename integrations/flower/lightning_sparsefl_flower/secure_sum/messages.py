"""What parties and server send in a sum, as bytes: fields of fixed size, so that a length says what is inside."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_sparsefl_flower.secure_sum.errors import SecureSumRefused
from lightning_sparsefl_flower.secure_sum.masks import KEY_BYTES
from lightning_sparsefl_flower.secure_sum.shamir import PRIME, SHARE_BYTES

_NUMBER = struct.Struct("<I")
_ADVERT = struct.Struct(f"<I{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}sIH")
_MOST_FACTS = 2**20
BOX_BYTES = 2 * SHARE_BYTES + 16
"""Bytes of two encrypted shares, with the tag of ChaCha20-Poly1305."""


@dataclass(frozen=True)
class Advert:
    """A client's public keys of one sum."""

    client: int
    """Number of the client."""
    box_key: bytes
    """Key under which others encrypt shares for the client."""
    mask_key: bytes
    """Key from which the masks of its pairs follow."""
    commitment: bytes
    """SHA-256 of the seed of its own mask."""
    facts: bytes = b""
    """What else the server needs of the client before the sum."""
    signature: bytes = b""
    """Signature by the node's long-term key; empty without one."""

    def signed(self, context: bytes) -> bytes:
        """Return what the signature is of.

        Args:
            context: Bytes that no other sum has.
        """
        return b"advert" + digest(context) + self._fields(b"")

    def encode(self) -> bytes:
        """Return the advert as bytes."""
        return self._fields(self.signature)

    def _fields(self, signature: bytes) -> bytes:
        sizes = (len(self.facts), len(signature))
        fixed = _ADVERT.pack(self.client, self.box_key, self.mask_key, self.commitment, *sizes)
        return fixed + self.facts + signature


def decode_adverts(payload: bytes) -> list[Advert]:
    """Decode adverts that follow each other.

    Args:
        payload: Encoded adverts.

    Raises:
        SecureSumRefused: If the payload is not a sequence of adverts.
    """
    found, place = list[Advert](), 0
    while place < len(payload):
        if place + _ADVERT.size > len(payload):
            raise SecureSumRefused(f"An advert of a secure sum is cut off after {len(payload) - place} bytes.")
        client, box_key, mask_key, commitment, facts, signature = _ADVERT.unpack_from(payload, place)
        begin = place + _ADVERT.size
        place = begin + facts + signature
        if facts > _MOST_FACTS or place > len(payload):
            raise SecureSumRefused(f"The advert of client {client} states {facts} bytes of facts, and lacks them.")
        middle = begin + facts
        found.append(Advert(client, box_key, mask_key, commitment, payload[begin:middle], payload[middle:place]))
    return found


def encode_boxes(boxes: Iterable[tuple[int, bytes]]) -> bytes:
    """Encode encrypted shares, each with the number of its receiver, or of its sender once they are delivered.

    Args:
        boxes: Numbers of clients, and boxes of `BOX_BYTES`.
    """
    return b"".join(_NUMBER.pack(client) + box for client, box in boxes)


def decode_boxes(payload: bytes) -> dict[int, bytes]:
    """Decode encrypted shares by the client's number.

    Args:
        payload: Bytes from :func:`encode_boxes`.

    Raises:
        SecureSumRefused: If the payload has another length, or a client twice.
    """
    size = _NUMBER.size + BOX_BYTES
    if len(payload) % size:
        raise SecureSumRefused(f"The boxes of a secure sum have {len(payload)} bytes; expected a multiple of {size}.")
    pairs = [(_NUMBER.unpack_from(part)[0], part[_NUMBER.size :]) for part in _cut(payload, size)]
    found = dict(pairs)
    if len(found) < len(pairs):
        raise SecureSumRefused("The boxes of a secure sum name a client twice.")
    return found


def encode_clients(clients: Iterable[int]) -> bytes:
    """Encode numbers of clients.

    Args:
        clients: Numbers of clients.
    """
    return b"".join(map(_NUMBER.pack, clients))


def decode_clients(payload: bytes) -> list[int]:
    """Decode numbers of clients, which must ascend.

    Args:
        payload: Bytes from :func:`encode_clients`.

    Raises:
        SecureSumRefused: If the length is wrong, or the numbers do not ascend.
    """
    if len(payload) % _NUMBER.size:
        raise SecureSumRefused(f"A list of clients has {len(payload)} bytes; expected a multiple of {_NUMBER.size}.")
    found = [client for (client,) in _NUMBER.iter_unpack(payload)]
    if found != sorted(set(found)):
        raise SecureSumRefused(f"The clients {found} of a secure sum do not ascend.")
    return found


def encode_signatures(signatures: Iterable[tuple[int, bytes]]) -> bytes:
    """Encode the clients' signatures of the survivors.

    Args:
        signatures: Numbers of clients, and their signatures.
    """
    return b"".join(_NUMBER.pack(client) + _NUMBER.pack(len(each)) + each for client, each in signatures)


def decode_signatures(payload: bytes) -> dict[int, bytes]:
    """Decode the clients' signatures of the survivors.

    Args:
        payload: Bytes from :func:`encode_signatures`.

    Raises:
        SecureSumRefused: If the payload is cut off.
    """
    found, place = dict[int, bytes](), 0
    while place < len(payload):
        begin = place + 2 * _NUMBER.size
        end = begin + (_NUMBER.unpack_from(payload, place + _NUMBER.size)[0] if begin <= len(payload) else 0)
        if max(begin, end) > len(payload):
            raise SecureSumRefused(f"The signatures of a secure sum are cut off after {len(payload)} bytes.")
        found[_NUMBER.unpack_from(payload, place)[0]] = payload[begin:end]
        place = end
    return found


def encode_shares(shares: Iterable[int]) -> bytes:
    """Encode shares in an order that both sides know.

    Args:
        shares: Elements of the field.
    """
    return b"".join(share.to_bytes(SHARE_BYTES, "little") for share in shares)


def decode_shares(payload: bytes, count: int) -> list[int]:
    """Decode shares.

    Args:
        payload: Bytes from :func:`encode_shares`.
        count: Number of shares.

    Raises:
        SecureSumRefused: If there are more or fewer, or one is not an element of the field.
    """
    if len(payload) != count * SHARE_BYTES:
        raise SecureSumRefused(f"Shares of a secure sum have {len(payload)} bytes; expected {count * SHARE_BYTES}.")
    found = [int.from_bytes(part, "little") for part in _cut(payload, SHARE_BYTES)]
    if any(share >= PRIME for share in found):
        raise SecureSumRefused("A share of a secure sum is not an element of the field.")
    return found


def join(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """Return a JSON header and bytes after it.

    Args:
        header: Plain values.
        body: Bytes.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    return _NUMBER.pack(len(text)) + text + body


def parts(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Split what :func:`join` made.

    Args:
        payload: Header and bytes after it.

    Raises:
        SecureSumRefused: If there is no header.
    """
    size = _NUMBER.unpack_from(payload)[0] if len(payload) >= _NUMBER.size else _MOST_FACTS + 1
    end = _NUMBER.size + size
    try:
        header = json.loads(payload[_NUMBER.size : end]) if size <= _MOST_FACTS else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise SecureSumRefused(f"A message of a secure sum has {len(payload)} bytes without a JSON header.")
    return header, payload[end:]


def _cut(payload: bytes, size: int) -> Iterator[bytes]:
    return (payload[place : place + size] for place in range(0, len(payload), size))


def roster_digest(context: bytes, adverts: Sequence[Advert]) -> bytes:
    """Return a digest of a sum and of all keys in it, which every derived key depends on.

    So parties that were shown different keys agree on no masks.

    Args:
        context: Bytes that no other sum has.
        adverts: Adverts of all clients, by number.
    """
    return digest(digest(context) + b"".join(advert.encode() for advert in adverts))


def digest(content: bytes) -> bytes:
    """Return the SHA-256 of bytes.

    Args:
        content: Any bytes.
    """
    return hashlib.sha256(content).digest()


def survivors_signed(roster: bytes, dealers: Sequence[int], survivors: Sequence[int]) -> bytes:
    """Return what clients sign before they reveal shares.

    Args:
        roster: Digest from :func:`roster_digest`.
        dealers: Clients whose shares were delivered.
        survivors: Clients whose masked vectors are in the sum.
    """
    return b"survivors" + roster + digest(encode_clients(dealers)) + encode_clients(survivors)
