"""Keys and certificates of a deployment on one machine: a CA, a certificate of localhost, a key for each node."""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALIDITY = datetime.timedelta(days=30)


def write_tls(folder: Path) -> None:
    """Write `ca.crt`, `server.pem` and `server.key`, with which a SuperLink serves localhost.

    Args:
        folder: Existing folder.
    """
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = _name("CA of a trial")
    usage = {name: False for name in x509.KeyUsage.__init__.__annotations__ if name != "return"}
    signs = x509.KeyUsage(**{**usage, "key_cert_sign": True, "crl_sign": True})
    root = (
        _certificate(issuer, issuer, authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signs, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    own = (
        _certificate(_name("localhost"), issuer, server)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    _write(folder / "ca.crt", root.public_bytes(serialization.Encoding.PEM))
    _write(folder / "server.pem", own.public_bytes(serialization.Encoding.PEM))
    _write(folder / "server.key", _private(server, serialization.PrivateFormat.PKCS8))


def write_node_key(path: Path) -> None:
    """Write a node's private key, and its public key beside it as `.pub`, in OpenSSH's format.

    Args:
        path: Path of the private key.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    _write(path, _private(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(path.with_name(f"{path.name}.pub"), public)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + _VALIDITY)
    )


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes) -> None:
    """Write a new file that only this user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def main() -> None:
    """Write the files for a number of nodes into a new folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="New folder.")
    parser.add_argument("nodes", type=int, help="Number of nodes.")
    asked = parser.parse_args()
    asked.folder.mkdir(mode=0o700)
    write_tls(asked.folder)
    for place in range(asked.nodes):
        write_node_key(asked.folder / f"node-{place}")


if __name__ == "__main__":
    main()
