"""Keys that two parties agree on, and the masks that follow from a key."""

from __future__ import annotations

from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lightning_sparsefl_flower.secure_sum.errors import SecureSumRefused

KEY_BYTES = 32
"""Bytes of a key, and of a seed of masks."""
_NONCE = bytes(16)
"""Counter and nonce of ChaCha20; a key makes one stream only."""


def public_bytes(key: X25519PrivateKey) -> bytes:
    """Return the public key that belongs to a private key.

    Args:
        key: Private key.
    """
    return key.public_key().public_bytes_raw()


def agreed_key(own: X25519PrivateKey, other: bytes, label: bytes) -> bytes:
    """Return the key that the owners of two key pairs can compute, and nobody else.

    Args:
        own: Private key of one side.
        other: Public key of the other side, 32 bytes.
        label: Use of the key; other uses get independent keys.

    Raises:
        SecureSumRefused: If the public key is one with which every secret is the same.
    """
    try:
        secret = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise SecureSumRefused("A public key of the secure sum is not a valid X25519 key.") from None
    return derived_key(secret, label)


def derived_key(secret: bytes, label: bytes) -> bytes:
    """Return a key of 32 bytes that follows from a secret and a use (HKDF with SHA-256, RFC 5869).

    Args:
        secret: Secret of high entropy.
        label: Use of the key.
    """
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=label).derive(secret)


def mask(key: bytes, count: int) -> Any:
    """Return the mask of a key, uniform numbers modulo 2**64 from the key stream of ChaCha20 (RFC 8439).

    Args:
        key: Key of 32 bytes, used for this mask only.
        count: Number of values.

    Returns:
        Array of uint64 of shape (count,).
    """
    stream = Cipher(algorithms.ChaCha20(key, _NONCE), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8").astype(np.uint64, copy=False)
