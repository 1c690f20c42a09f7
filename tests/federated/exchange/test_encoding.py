"""Answers from another process: each field is checked before the answer is used."""

import json

import pytest
import torch

from lightning_sparsefl.errors import MalformedPayload
from lightning_sparsefl.federated.exchange.encoding import decode_answer, encode_answer
from lightning_sparsefl.federated.exchange.orders import Answer
from lightning_sparsefl.types import Message, Update
from lightning_sparsefl.wire import Codec

WEIGHTS = {"w": torch.arange(6.0)}
MESSAGE, CODEC = Message(weights=WEIGHTS), Codec(WEIGHTS)


def encoded(**changed):
    """An answer to an order of training, with fields of its header changed."""
    update = Update(weights=WEIGHTS, weight=3)
    size = CODEC.update_size(update, MESSAGE)
    answer = Answer("run", 1, 2, "train", 3, update=update, up=size, scores={"val": {"acc": 0.5}}, version=3)
    payload = encode_answer(answer, CODEC, MESSAGE)
    end = 4 + int.from_bytes(payload[:4], "little")
    header = json.dumps({**json.loads(payload[4:end]), **changed}).encode()
    return len(header).to_bytes(4, "little") + header + payload[end:]


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
        {"failure": 7},
        {"num_examples": -1},
        {"scores": {"val": 0.5}},
        {"scores": {"val": {"acc": "high"}}},
        {"scores": {"val": {str(i): 0.0 for i in range(257)}}},
        {"scores": {"night": {}}},
        {"checked": True},
        {"error": "none"},
        {"up": None},
        {"up": {"total": 1, "masks": 0}},
        {"up": {"total": 48, "masks": -1}},
        {"up": "large"},
    ],
    ids=str,
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
