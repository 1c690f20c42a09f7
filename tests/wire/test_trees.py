from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.errors import MalformedPayload
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.wire.frame import Reader, Writer
from lightning_sparsefl.wire.indices import size as indices_size
from lightning_sparsefl.wire.schema import Schema
from lightning_sparsefl.wire.trees import read_masks, read_shape, read_weights, write_masks, write_weights

SCHEMA = Schema({"w": torch.zeros(1000), "b": torch.zeros(8)})
SQUARE = Schema({"conv": torch.zeros(40, 30, 3, 3)})


def at(*positions, length=1000):
    mask = torch.zeros(length, dtype=torch.bool)
    mask[list(positions)] = True
    return mask


def masks_through(masks, reference, schema=SCHEMA):
    writer = Writer(keep=True)
    write_masks(writer, schema, masks, reference, counts(masks))
    reader = Reader(writer.payload(), room=10**6)
    back = read_masks(reader, schema, reference)
    reader.finish()
    assert list(back) == list(masks)
    assert all(torch.equal(back[name], mask) for name, mask in masks.items())
    assert writer.total == len(writer.payload())
    return writer, back


def test_masks_the_receiver_has_cost_one_byte_and_are_its_own():
    masks = {"w": at(1, 5), "b": at(0, length=8)}
    writer, back = masks_through({name: mask.clone() for name, mask in masks.items()}, masks)
    assert (writer.total, writer.masks) == (1, 0)
    assert back["w"] is masks["w"]


def test_only_the_mask_that_changed_is_sent():
    known = {"w": at(*range(0, 1000, 2)), "b": at(0, length=8)}
    writer, back = masks_through({"w": known["w"], "b": at(1, length=8)}, known)
    assert writer.masks == 1
    assert back["w"] is known["w"]


def test_a_mask_that_changed_a_little_costs_what_changed():
    known = {"w": at(*range(0, 1000, 2))}
    moved = known["w"].clone()
    moved[[10, 11]] = ~moved[[10, 11]]
    writer, _ = masks_through({"w": moved}, known)
    assert writer.masks == indices_size(1000, 2) < 125


@pytest.mark.parametrize(
    ("mask", "cost"),
    [
        (at(), 0),
        (~at(), 0),
        (at(7), indices_size(1000, 1)),
        (~at(7), indices_size(1000, 1)),
        (at(*range(0, 1000, 2)), 125),
    ],
)
def test_the_cheapest_encoding_of_a_new_mask(mask, cost):
    assert masks_through({"w": mask}, {})[0].masks == cost
    assert masks_through({"w": mask}, {"w": at(*range(0, 1000, 3))})[0].masks <= 125


def test_positions_are_charged_with_their_number():
    """128 positions among 514 take 64 bytes and two for their number; bits take 65."""
    schema, mask = Schema({"w": torch.zeros(514)}), at(*range(0, 512, 4), length=514)
    assert indices_size(514, 128) == 64
    assert masks_through({"w": mask}, {}, schema)[0].masks == 65


def test_a_mask_of_whole_rows_and_columns_costs_a_bit_for_each():
    rows, columns = at(*range(5, 25), length=40), at(*range(0, 30, 2), length=30)
    grid = (rows[:, None] & columns[None, :])[:, :, None, None].expand(40, 30, 3, 3)
    writer, _ = masks_through({"conv": grid}, {}, SQUARE)
    assert writer.masks == (40 + 30 + 3 + 3 + 7) // 8
    one_less = grid.clone()
    one_less[5, 0, 0, 0] = False
    assert masks_through({"conv": one_less}, {}, SQUARE)[0].masks > 1000
    moved = grid.clone()
    moved[5, 0, 0, 0], moved[0, 0, 0, 0] = False, True  # as many as before
    assert masks_through({"conv": moved}, {}, SQUARE)[0].masks > 1000


def test_masks_of_unknown_shape_are_bits():
    assert masks_through({"other": ~at(length=40)}, {})[0].masks == 5
    assert masks_through({"w": ~at(length=40)}, {"w": at(1)})[0].masks == 5
    assert masks_through({"other": at(3, length=40), "w": at()}, {"other": at(3, length=40)})[0].masks == 0


def test_a_reference_of_another_shape_is_ignored():
    masks_through({"w": at(*range(0, 1000, 2))}, {"w": at(length=40)})


def weights_through(weights, masks):
    writer = Writer(keep=True)
    write_weights(writer, SCHEMA, weights, masks, counts(masks))
    reader = Reader(writer.payload(), room=10**6)
    back = read_weights(reader, SCHEMA, masks)
    reader.finish()
    return writer, back


def test_the_whole_model_needs_no_names():
    weights = {"w": torch.randn(1000), "b": torch.randn(8)}
    writer, back = weights_through(weights, {})
    assert writer.total == 1 + 4 * 1008
    assert all(torch.equal(back[name], value) for name, value in weights.items())


def test_only_kept_values_are_sent_and_the_rest_is_zero():
    weights = {"w": torch.arange(1000.0), "b": torch.ones(8)}
    writer, back = weights_through(weights, {"w": at(3, 4)})
    assert writer.total == 1 + 4 * (2 + 8)
    assert back["w"].nonzero().reshape(-1).tolist() == [3, 4]
    assert back["w"].sum() == 7


def test_parts_and_strangers_carry_their_names():
    weights = {"b": torch.ones(8), "new": torch.ones(2, 2, dtype=torch.int64)}
    writer, back = weights_through(weights, {})
    assert writer.total == 2 + 1 + 32 + 1 + 4 + 1 + 3 + 32
    assert list(back) == ["b", "new"]
    assert torch.equal(back["new"], weights["new"])
    assert writer.masks == 0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            b"\x00\x02" + b"\x02" + b"\x00" * 32 + b"\x02" + b"\x00" * 32,
            "`b` occurs twice in the payload; expected each name once",
        ),
        (b"\x00\x01\x03", "expected at most 2"),
        (b"\x00\x01\x00\x01n\x63", "expected less than"),
        (b"\x00\x09", "expected at most"),
    ],
)
def test_hostile_weights(data, words):
    with pytest.raises(MalformedPayload, match=words):
        read_weights(Reader(data, room=10**6), SCHEMA, {})


def test_hostile_masks():
    with pytest.raises(MalformedPayload, match="not in the schema has encoding 2; expected one bit per position"):
        read_masks(Reader(b"\x00\x01\x00\x01n\x01\x7f\x02", room=10**6), SCHEMA, {})
    with pytest.raises(MalformedPayload, match="`w` occurs twice in the payload"):
        read_masks(Reader(b"\x00\x02\x01\x00\x01\x00", room=10**6), SCHEMA, {})
    with pytest.raises(MalformedPayload, match="beyond the limit for this model"):
        read_masks(Reader(b"\x00\x01\x01\x02", room=999), SCHEMA, {})
    with pytest.raises(MalformedPayload, match=r"`w` has shape \(2,\); expected \(1000,\), the shape of its mask"):
        read_weights(Reader(b"\x00\x01\x00\x01w\x00\x01\x02" + b"\x00" * 8, room=10**6), SCHEMA, {"w": at()})


def test_a_shape_is_that_of_a_possible_tensor():
    writer = Writer(keep=True)
    for number in (3, 2**40, 0, 2**40):
        writer.varint(number)
    with pytest.raises(MalformedPayload, match=r"expected at most 2\*\*48 elements"):
        read_shape(Reader(writer.payload(), room=0))
    with pytest.raises(MalformedPayload, match="expected at most 64"):
        read_shape(Reader(b"\x41" + b"\x01" * 65, room=0))


def test_weights_of_equal_shapes_in_another_order_keep_their_names():
    schema, writer = Schema({"a": torch.zeros(2), "b": torch.zeros(2)}), Writer(keep=True)
    write_weights(writer, schema, {"b": torch.ones(2), "a": torch.zeros(2)}, {}, {})
    back = read_weights(Reader(writer.payload(), room=10**6), schema, {})
    assert {name: value.tolist() for name, value in back.items()} == {"a": [0.0, 0.0], "b": [1.0, 1.0]}
