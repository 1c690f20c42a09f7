"""Files of the long-term keys with which nodes sign: OpenSSH's private keys, and a list of public keys."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from lightning_sparsefl.errors import InvalidOption

from lightning_sparsefl_flower.secure_sum.signing import KeySigner, KeyVerifier, PublicKey

_KINDS = "Ed25519, ECDSA on P-256 or ECDSA on P-384"


def read_signer(path: Path) -> KeySigner:
    """Read the private key of a node.

    Args:
        path: File in OpenSSH's format, without a passphrase.

    Raises:
        InvalidOption: If the file cannot be read, or has a key of another kind.
    """
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidOption(
            f"`--key` is {path}, which cannot be read ({error}); expected a private key in OpenSSH's format without a "
            f"passphrase: {_KINDS}."
        ) from error
    if not isinstance(key, Ed25519PrivateKey | EllipticCurvePrivateKey) or not _signs(key):
        raise InvalidOption(f"`--key` is {path}, a key of another kind; expected {_KINDS}.")
    return KeySigner(key)


def read_signers(path: Path) -> KeyVerifier:
    """Read the public keys of all nodes.

    Args:
        path: Text with a line for each node: the numbers of its clients, separated by commas, and its public key in
            OpenSSH's format (kind, base64, and perhaps a comment). Empty lines and lines with ``#`` are skipped.

    Raises:
        InvalidOption: If the file cannot be read, names a client twice, or has a key of another kind.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"`--signers` is {path}, which cannot be read ({error}).") from error
    keys: dict[int, PublicKey] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.startswith("#"):
            clients, key = _parsed(line, f"line {number} of {path} (`--signers`)")
            for client in clients:
                if client in keys:
                    raise InvalidOption(f"{path} (`--signers`) has client {client} twice; expected one key for each.")
                keys[client] = key
    return KeyVerifier(keys)


def _parsed(line: str, where: str) -> tuple[list[int], PublicKey]:
    clients, _, key = line.partition(" ")
    try:
        public = load_ssh_public_key(" ".join(key.split()[:2]).encode())
        numbers = [int(client) for client in clients.split(",") if client.isdecimal()]
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidOption(f"The key in {where} cannot be read ({error}); expected one of OpenSSH.") from error
    if len(numbers) != len(clients.split(",")):
        raise InvalidOption(f"The clients in {where} are {clients[:40]!r}; expected numbers separated by commas.")
    if not isinstance(public, Ed25519PublicKey | EllipticCurvePublicKey) or not _signs(public):
        raise InvalidOption(f"The key in {where} is of another kind; expected {_KINDS}.")
    return numbers, public


def _signs(key: Ed25519PrivateKey | EllipticCurvePrivateKey | PublicKey) -> bool:
    """Return whether there is a scheme for a key's curve."""
    return isinstance(key, Ed25519PrivateKey | Ed25519PublicKey) or key.curve.key_size in (256, 384)
