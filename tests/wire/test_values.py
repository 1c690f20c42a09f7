from __future__ import annotations

import math

import pytest
import torch

from lightning_sparsefl.errors import InvalidOption, MalformedPayload
from lightning_sparsefl.wire.frame import Reader, Writer
from lightning_sparsefl.wire.indices import size as indices_size
from lightning_sparsefl.wire.schema import Schema
from lightning_sparsefl.wire.values import read_metrics, read_value, write_metrics, write_value

SCHEMA = Schema({"w": torch.zeros(20, 50), "n": torch.zeros(3, dtype=torch.int64)})
MASK = torch.rand(20, 50, generator=torch.Generator().manual_seed(0)) < 0.5


def through(value, reference=None):
    writer = Writer(keep=True)
    write_value(writer, SCHEMA, value, reference or {})
    reader = Reader(writer.payload(), room=10**6)
    back = read_value(reader, SCHEMA, reference or {})
    reader.finish()
    assert writer.total == len(writer.payload())
    return writer, back


@pytest.mark.parametrize(
    "value",
    [
        *[None, True, False, 0, -1, 127, -128, 128, 2**64, -(2**200), 0.1, -math.inf, "", "\u00e9t\u00e9"],
        *[[], (), {}, [1, [2.0, (None, "x")]], {"a": {"b": {"c": [True]}}, "w": 1}],
    ],
)
def test_plain_values_keep_type_and_value(value):
    back = through(value)[1]
    assert back == value
    assert type(back) is type(value)


def test_not_a_number_and_minus_zero():
    assert math.isnan(through(math.nan)[1])
    assert math.copysign(1, through(-0.0)[1]) == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 2), (20, 50), (3,)])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("name", ["w", "n", "stranger"])
def test_tensors_survive_in_whatever_encoding(dtype, shape, density, name):
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(shape, generator=generator).mul(9) * (torch.rand(shape, generator=generator) < density)
    value = value.to(dtype)
    back = through({name: value})[1][name]
    assert back.dtype == dtype
    assert back.shape == value.shape
    assert torch.equal(back, value)


def test_minus_zero_and_not_a_number_are_values():
    value = torch.zeros(20, 50)
    value[3, 4], value[5, 6] = -0.0, float("nan")
    back = through({"w": value})[1]["w"]
    assert back.view(torch.int32).equal(value.view(torch.int32))


def test_a_mask_that_the_receiver_has_costs_three_bytes_and_its_number():
    writer, back = through({"masks": {"w": MASK.clone()}}, {"w": MASK})
    assert back["masks"]["w"] is MASK
    assert writer.masks == 0
    assert writer.total - through({"masks": {}})[0].total == 4


def test_a_new_mask_costs_its_bits_and_a_moved_one_its_moves():
    assert through({"w": MASK})[0].masks == 125
    moved = MASK.clone()
    moved[0, :2] = ~moved[0, :2]
    assert through({"w": moved}, {"w": MASK})[0].masks == indices_size(1000, 2)


def test_zeros_are_not_sent():
    dense, half = torch.ones(20, 50), torch.ones(20, 50) * MASK
    one = torch.zeros(20, 50)
    one[7, 7] = 1
    few, some, full = (through({"w": value})[0] for value in (one, half, dense))
    assert (few.masks, some.masks, full.masks) == (indices_size(1000, 1), 125, 0)
    assert few.total < 16 < some.total < 4 * 510 + 140 < full.total


def test_positions_are_charged_with_their_number():
    """128 positions among 514 take 64 bytes and two for their number; bits take 65."""
    value = torch.zeros(514)
    value[::4][:128] = 1
    writer = Writer(keep=False)
    write_value(writer, Schema({"w": torch.zeros(514)}), {"w": value}, {})
    assert indices_size(514, 128) == 64
    assert writer.masks == 65


def test_a_stranger_may_not_expand_without_bytes_to_show_for_it():
    assert through({"stranger": torch.zeros(1000)})[0].masks == 125
    with pytest.raises(MalformedPayload, match="expected less than 2"):
        read_value(Reader(b"\x09\x00\x01\x7f\x02\x00", room=10**6), SCHEMA, {})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"s": {1, 2}}, "`s` contains a set, which cannot be encoded"),
        ([object()], "`shared` contains a object"),
        ({"a": {3: 4}}, "`a` has the key 3; expected keys that are strings"),
        ({"z": torch.zeros(1, dtype=torch.complex64)}, "`z` is torch.complex64"),
    ],
)
def test_what_cannot_be_sent_is_named(value, words):
    with pytest.raises(InvalidOption, match=words):
        through(value)


def test_depth_is_bounded_on_both_ends():
    def nested(levels):
        return [nested(levels - 1)] if levels else None

    assert through(nested(32))[1] == nested(32)
    with pytest.raises(InvalidOption, match="more than 32 levels"):
        through(nested(33))
    with pytest.raises(MalformedPayload, match="more than 32 levels"):
        read_value(Reader(b"\x06\x01" * 1000 + b"\x00", room=0), SCHEMA, {})


def test_hostile_trees():
    with pytest.raises(MalformedPayload, match="`w` occurs twice in `shared`"):
        read_value(Reader(b"\x08\x02\x01\x00\x01\x00", room=0), SCHEMA, {})
    with pytest.raises(MalformedPayload, match="`x` is encoded without a shape but is not in the schema"):
        read_value(Reader(b"\x08\x01\x00\x01x\x0a\x00", room=0), SCHEMA, {})
    with pytest.raises(MalformedPayload, match="expected at most"):
        read_value(Reader(b"\x06\xff\xff\x03", room=0), SCHEMA, {})


def test_metrics_are_eight_bytes_and_a_name():
    metrics = {"train_loss": 0.25, "n": 3, "lr": math.inf}
    writer = Writer(keep=True)
    write_metrics(writer, metrics)
    assert writer.total == 1 + 3 * 9 + len("train_loss" + "n" + "lr")
    assert read_metrics(Reader(writer.payload(), room=0)) == metrics
    with pytest.raises(MalformedPayload, match="metric `n` occurs twice; expected each name once"):
        read_metrics(Reader(b"\x02" + 2 * (b"\x01n" + b"\x00" * 8), room=0))
