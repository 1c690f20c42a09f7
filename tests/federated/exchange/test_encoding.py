"""Orders and answers from another process: each field is checked before they are used."""

import json

import pytest
import torch

from lightning_sparsefl.errors import MalformedPayload
from lightning_sparsefl.federated.exchange.encoding import (
    decode_answer,
    decode_order,
    encode_answer,
    encode_order,
    order_header,
)
from lightning_sparsefl.federated.exchange.orders import Answer, ClientFacts, Order
from lightning_sparsefl.types import Message, Update
from lightning_sparsefl.wire import Codec

WEIGHTS = {"w": torch.arange(6.0)}
MESSAGE, CODEC = Message(weights=WEIGHTS), Codec(WEIGHTS)


NO_HEADER = object()
"""In place of a value: the header lacks the name."""
NESTED = "nested"
"""In place of a value: a list so deep that showing all of it fails."""


def with_header(payload, changed):
    """The payload with fields of its header changed."""
    end = 4 + int.from_bytes(payload[:4], "little")
    header = {**json.loads(payload[4:end]), **changed}
    header = json.dumps({name: value for name, value in header.items() if value is not NO_HEADER})
    header = header.replace(f'"{NESTED}"', "[" * 900 + "]" * 900).encode()
    return len(header).to_bytes(4, "little") + header + payload[end:]


def encoded(**changed):
    """An answer to an order of training, with fields of its header changed."""
    update = Update(weights=WEIGHTS, weight=3)
    size = CODEC.update_size(update, MESSAGE)
    answer = Answer("run", 1, 2, "train", 3, update=update, up=size, scores={"val": {"acc": 0.5}}, version=3)
    return with_header(encode_answer(answer, CODEC, MESSAGE), changed)


def test_an_answer_arrives_as_it_was_sent():
    answer = decode_answer(encoded(), CODEC, MESSAGE)
    assert (answer.client, answer.round, answer.version, answer.scores) == (1, 2, 3, {"val": {"acc": 0.5}})
    assert torch.equal(answer.update.weights["w"], WEIGHTS["w"])
    assert not answer.checked


@pytest.mark.parametrize(
    "changed",
    [
        {"elapsed": "soon"},
        {"elapsed": -1.0},
        {"elapsed": float("inf")},
        {"elapsed": float("nan")},
        {"version": "3"},
        {"version": True},
        {"version": NO_HEADER},
        {"failure": 7},
        {"failure": "\ud800"},
        {"elapsed": 10**400},
        {"client": NESTED},
        {"client": 2**63},
        {"num_examples": -1},
        {"scores": {"val": 0.5}},
        {"scores": {"val": {"acc": "high"}}},
        {"scores": {"val": {str(i): 0.0 for i in range(257)}}},
        {"scores": {"night": {}}},
        {"scores": {"val": {"acc": 10**400}}},
        {"scores": {"val": {"\udfff": 0.5}}},
        {"checked": True},
        {"error": "none"},
        {"up": None},
        {"up": {"total": 1, "masks": 0}},
        {"up": {"total": 48, "masks": -1}},
        {"up": "large"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_wrong_field_is_refused(changed):
    with pytest.raises(MalformedPayload):
        decode_answer(encoded(**changed), CODEC, MESSAGE)


def test_the_size_must_be_that_of_the_update():
    answer = decode_answer(encoded(), CODEC, MESSAGE)
    size = {"total": answer.up.total, "masks": answer.up.masks}
    assert decode_answer(encoded(up=size), CODEC, MESSAGE).up == answer.up
    with pytest.raises(MalformedPayload, match="states an update of the size"):
        decode_answer(encoded(up={**size, "masks": answer.up.total + 1}), CODEC, MESSAGE)


# ---- orders

FACTS = {"num_examples": 3, "capacity": 0.5, "max_rounds": 9, "monitor": "acc", "local_epochs": None}
ORDER = Order("run", 1, 2, "train", ClientFacts(**FACTS), "key", MESSAGE, ("val",), None, 2, (1, 2))


def decoded_order(**changed):
    """The order after it was encoded and decoded, with fields of its header changed."""
    header, body = order_header(with_header(encode_order(ORDER, CODEC), changed))
    return decode_order(header, body, CODEC)


def test_an_order_arrives_as_it_was_sent():
    order = decoded_order()
    assert {**vars(order), "message": None} == {**vars(ORDER), "message": None}
    assert torch.equal(order.message.weights["w"], WEIGHTS["w"])


WRONG = {
    "run": [1, None, "\ud800", NO_HEADER],
    "client": [-1, 1.0, True, "1", 2**63, 10**400, NESTED, NO_HEADER],
    "round": [-1, "../..", 2**63, NO_HEADER],
    "task": ["steal", ["train"], {}, NESTED, NO_HEADER],
    "key": [0, None, NO_HEADER],
    "splits": ["val", {"val": 1}, ["night"], [["val"]], ["val", "val"], None, NO_HEADER],
    "held": [0, ["d"], {}, NO_HEADER],
    "version": [-1, "2", False, 2**63, NO_HEADER],
    "keep": [3, None, ["1"], [-1], [True], [2**63], {"1": 1}, NO_HEADER],
    "facts": [None, [], {}, {**FACTS, "seed": 1}, list(FACTS), NO_HEADER],
    "message": [{}],
    "more": [1],
}
WRONG_FACTS = {
    "num_examples": ["x", -1, 1.5, True, 2**63, NESTED],
    "capacity": [0, 1.5, -0.5, "1", float("nan"), float("inf"), 10**400, True],
    "max_rounds": ["9", -1, None],
    "monitor": [None, 1, "\ud800"],
    "local_epochs": [0, "1", 1.5, False],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_field_of_an_order_is_refused(name, value):
    with pytest.raises(MalformedPayload, match=rf"`{name}|'{name}'|names"):
        decoded_order(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(n, value) for n, values in WRONG_FACTS.items() for value in values])
def test_a_wrong_fact_of_an_order_is_refused(name, value):
    with pytest.raises(MalformedPayload, match=f"An order's `facts` has the `{name}` "):
        decoded_order(facts={**FACTS, name: value})
