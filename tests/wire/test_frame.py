from __future__ import annotations

import math

import pytest

from lightning_sparsefl.errors import InvalidOption, MalformedPayload
from lightning_sparsefl.wire.frame import Reader, Size, Writer, varint_size

MOST = 2**63 - 1


def written(*, keep=True):
    writer = Writer(keep=keep)
    for value in (0, 1, 127, 128, 300, MOST):
        writer.varint(value)
    writer.real(math.pi)
    writer.text("na\u00efve \U0001f600")
    writer.bulk(3, lambda: b"abc", masks=True)
    writer.bulk(2, lambda: b"de")
    return writer


def test_what_was_written_is_read():
    reader = Reader(written().payload(), room=0)
    assert [reader.varint(MOST) for _ in range(6)] == [0, 1, 127, 128, 300, MOST]
    assert reader.real() == math.pi
    assert reader.text() == "na\u00efve \U0001f600"
    assert bytes(reader.take(5)) == b"abcde"
    reader.finish()


def test_a_size_is_taken_without_making_the_bytes():
    def never():
        raise AssertionError("made bytes to weigh them")

    writer = Writer(keep=False)
    writer.bulk(10, never, masks=True)
    assert writer.size() == Size(total=10, masks=10)
    assert written(keep=False).size() == written().size() == Size(total=len(written().payload()), masks=3)
    assert written(keep=False).payload() == b""


@pytest.mark.parametrize("value", [0, 1, 127, 128, 2**14 - 1, 2**14, 2**32, MOST])
def test_the_size_of_a_number(value):
    writer = Writer(keep=True)
    writer.varint(value)
    assert varint_size(value) == writer.total == len(writer.payload())


@pytest.mark.parametrize(
    ("payload", "read", "words"),
    [
        (b"ab", lambda r: r.take(3), "ends at byte 2; expected 1 more"),
        (b"\x80" * 20, lambda r: r.varint(MOST), "The number before byte 9 of the payload has more than 9 bytes"),
        (b"\x80", lambda r: r.varint(MOST), "ends at byte 1"),
        (b"\x05", lambda r: r.varint(4), "The number before byte 1 of the payload is 5; expected at most 4"),
        (b"\x02", lambda r: r.byte(2), "Byte 0 of the payload is 2; expected less than 2"),
        (b"\x05ab", lambda r: r.text(), "is 5; expected at most 3"),
        (b"\x01\xff", lambda r: r.text(), "before byte 2 of the payload is not valid UTF-8"),
        (b"\x03\xed\xa0\x80", lambda r: r.text(), "before byte 4 of the payload is not valid UTF-8"),
        (b"ab", lambda r: r.finish(), "2 bytes follow after the end"),
        (b"", lambda r: r.claim(9), "At byte 0 the payload needs 1 bytes of memory beyond the limit for this model"),
    ],
)
def test_nothing_is_believed(payload, read, words):
    with pytest.raises(MalformedPayload, match=words):
        read(Reader(payload, room=8))


@pytest.mark.parametrize("keep", [True, False])
def test_half_a_character_is_not_written(keep):
    with pytest.raises(InvalidOption, match=r"holds the string 'na\\ud800', with a surrogate"):
        Writer(keep=keep).text("na\ud800")
