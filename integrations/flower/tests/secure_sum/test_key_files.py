"""Keys that nodes sign with, from files."""

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from lightning_sparsefl.errors import InvalidOption

from lightning_sparsefl_flower.secure_sum.key_files import read_signer, read_signers

KEYS = {
    "ed25519": ed25519.Ed25519PrivateKey.generate,
    "p256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
}


def private(key):
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def public(key):
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "file"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize("kind", KEYS)
def test_a_key_signs_for_its_own_clients_only(file, kind):
    key, other = KEYS[kind](), KEYS["ed25519"]()
    signature = read_signer(file(private(key))).sign(b"content")
    verifier = read_signers(file(f"# nodes\n0,3 {public(key)} a comment\n\n1 {public(other)}\n"))
    assert [client for client in range(4) if verifier.verifies(client, b"content", signature)] == [0, 3]
    assert not verifier.verifies(0, b"other", signature)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no key", "which cannot be read"),
        (private(ec.generate_private_key(ec.SECP521R1())), "of another kind; expected Ed25519"),
    ],
    ids=["text", "curve"],
)
def test_a_private_key_that_cannot_sign_is_refused(file, content, words):
    with pytest.raises(InvalidOption, match=words):
        read_signer(file(content))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidOption, match=r"`--key` is .*which cannot be read"):
        read_signer(tmp_path / "none")
    with pytest.raises(InvalidOption, match=r"`--signers` is .*which cannot be read"):
        read_signers(tmp_path / "none")


ED25519 = public(KEYS["ed25519"]())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("0,3", "The key in line 1 of .* cannot be read"),
        (f"0\n{ED25519}", "The key in line 1 of .* cannot be read"),
        (f"0,x {ED25519}", "The clients in line 1 of .* are '0,x'"),
        (f"-1 {ED25519}", "The clients in line 1 of .* are '-1'"),
        (f"0 {ED25519}\n2,0 {ED25519}", "client 0 twice"),
        (f"0 {public(ec.generate_private_key(ec.SECP521R1()))}", "of another kind; expected Ed25519"),
        (b"\xff\xfe", "cannot be read"),
    ],
    ids=["no key", "no clients", "letters", "negative", "twice", "curve", "bytes"],
)
def test_a_list_of_something_else_is_refused(file, content, words):
    with pytest.raises(InvalidOption, match=words):
        read_signers(file(content))
