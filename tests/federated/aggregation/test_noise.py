"""The key stream, its key, and the file that the key is read from."""

import struct
import sys

import pytest
import torch
from scipy import stats

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.noise import KeyStream, NormalStream, derive_key, read_key, require_cipher

pytest.importorskip("cryptography")

# AES-256 of the block 0 under the key 0 (NIST SP 800-38A's cipher; the first test vector of many libraries)
FIRST_BLOCK = bytes.fromhex("dc95c078a2408989ad48a21492842087")
DIGITS = "0123456789abcdef" * 4


def test_each_number_is_the_quantile_of_64_bits_of_the_stream():
    drawn = NormalStream(bytes(32)).draw(2).tolist()
    for value, word in zip(drawn, struct.unpack("<2Q", FIRST_BLOCK), strict=True):
        tail = ((word >> 1) + 0.5) / 2**64
        expected = stats.norm.isf(tail) if word & 1 else -stats.norm.isf(tail)
        assert value == pytest.approx(expected, rel=1e-12)


def test_the_numbers_are_normal():
    drawn = NormalStream(b"k" * 32).draw(200_000).numpy()
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert abs((drawn[::2] * drawn[1::2] > 0).mean() - 0.5) < 0.01  # neighbours are independent
    assert (abs(drawn) > 4).mean() == pytest.approx(2 * stats.norm.sf(4), rel=0.6)


def test_a_stream_goes_on_where_it_was():
    one, two = NormalStream(b"k" * 32), NormalStream(b"k" * 32)
    assert torch.equal(torch.cat([one.draw(n) for n in (1, 0, 2, 10)]), two.draw(13))


def test_draws_below_a_limit_are_uniform_and_reject_the_words_that_would_bias_them(monkeypatch):
    stream = KeyStream(b"k" * 32)
    drawn = [stream.below(7) for _ in range(7000)]
    assert stats.chisquare([drawn.count(value) for value in range(7)]).pvalue > 1e-3
    words = iter([2**64 - 1, 2**64 - 2, 2**64 - 3])
    monkeypatch.setattr(stream, "words", lambda count: [next(words)])
    assert stream.below(3) == (2**64 - 2) % 3  # 2**64 - 1 is a multiple of 3


def test_the_key_follows_from_secret_context_and_values():
    values = torch.arange(4, dtype=torch.float64)
    keys = [
        derive_key(bytes(32), (1, 2), values),
        derive_key(bytes(31) + b"1", (1, 2), values),
        derive_key(bytes(32), (1, 3), values),
        derive_key(bytes(32), (12,), values),
        derive_key(bytes(32), (1, 2), values.nextafter(values + 1)),
    ]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}
    assert derive_key(bytes(32), (1, 2), values.clone()) == keys[0]


def test_a_key_file_holds_256_bits(tmp_path):
    file = tmp_path / "key"
    file.write_text(DIGITS + "\n")
    file.chmod(0o600)
    assert read_key(str(file)) == bytes.fromhex(DIGITS)


def test_a_key_that_others_can_read_is_reported(tmp_path):
    file = tmp_path / "key"
    file.write_text(DIGITS)
    file.chmod(0o644)
    with pytest.warns(UserWarning, match="chmod 600") as caught:
        read_key(str(file))
    assert DIGITS not in str(caught[0].message)


@pytest.mark.parametrize("content", ["", DIGITS[:32], DIGITS + "00", "g" * 64, "\N{POUND SIGN}" * 64])
def test_a_bad_key_file_is_refused_without_its_content(content, tmp_path):
    file = tmp_path / "key"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidOption, match=r"expected .*64 hexadecimal digits") as refused:
        read_key(str(file))
    assert not content or content not in str(refused.value)


@pytest.mark.parametrize("path", [None, "missing"])
def test_without_a_key_there_is_no_noise(path):
    with pytest.raises(InvalidOption, match=r"`federation.privacy.key_file` is "):
        read_key(path)


def test_without_cryptography_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(InvalidOption, match=r"pip install 'lightning-sparsefl\[privacy\]'"):
        require_cipher()
