"""Signatures with the long-term keys of nodes: Ed25519, or ECDSA on P-256 and P-384."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256, SHA384

PrivateKey: TypeAlias = Ed25519PrivateKey | EllipticCurvePrivateKey
PublicKey: TypeAlias = Ed25519PublicKey | EllipticCurvePublicKey


class Signer(Protocol):
    """Signs in the name of a client."""

    def sign(self, content: bytes) -> bytes:
        """Return the signature of a content."""
        ...


class Verifier(Protocol):
    """Knows the long-term keys of all clients' nodes."""

    def verifies(self, client: int, content: bytes, signature: bytes) -> bool:
        """Return whether a signature is the client's signature of a content."""
        ...


@dataclass(frozen=True)
class KeySigner:
    """Signer with a node's private key."""

    key: PrivateKey
    """Private key of the node."""

    def sign(self, content: bytes) -> bytes:
        """Return the signature of a content.

        Args:
            content: Bytes to sign.
        """
        if isinstance(self.key, Ed25519PrivateKey):
            return self.key.sign(content)
        return self.key.sign(content, _ecdsa(self.key.curve.key_size))


@dataclass(frozen=True)
class KeyVerifier:
    """Verifier with the public keys of a registry."""

    keys: Mapping[int, PublicKey]
    """Public key of each client's node."""

    def verifies(self, client: int, content: bytes, signature: bytes) -> bool:
        """Return whether a signature is valid; it is not if the client is not in the registry.

        Args:
            client: Number of the client.
            content: Bytes that were signed.
            signature: Signature of the bytes.
        """
        key = self.keys.get(client)
        try:
            if isinstance(key, Ed25519PublicKey):
                key.verify(signature, content)
            elif key is not None:
                key.verify(signature, content, _ecdsa(key.curve.key_size))
        except InvalidSignature:
            return False
        return key is not None


@dataclass(frozen=True)
class Signing:
    """With which keys a node signs and checks."""

    signer: Signer | None = None
    """Signs with the node's long-term key; None = nothing is signed."""
    verifier: Verifier | None = None
    """Knows the long-term keys of the other nodes; None = the server is trusted to pass keys on unchanged."""


UNSIGNED = Signing()
"""Nothing is signed or checked."""


def _ecdsa(bits: int) -> ECDSA:
    """Return the signature scheme of a curve."""
    return ECDSA(SHA256() if bits <= 256 else SHA384())
