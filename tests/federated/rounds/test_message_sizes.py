"""Messages as they arrive, of which equal ones are masked and measured once."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.federated.rounds.server import _Messages
from lightning_sparsefl.types import Message
from lightning_sparsefl.wire import Codec

WEIGHT, OTHER = torch.randn(2, 1000).unbind()
MASK = torch.arange(1000) % 10 == 0
MESSAGES = {
    "masked": Message(weights={"a": WEIGHT * MASK + 0}, masks={"a": MASK}),
    "partly trainable": Message(weights={"a": WEIGHT}, trainable={"a": MASK}),
    "an extra tree": Message(weights={"a": WEIGHT}, extra={"c": {"a": MASK}}),
    "one tensor": Message(weights={"a": WEIGHT}),
    "another name": Message(weights={"b": WEIGHT}),
    "both": Message(weights={"a": WEIGHT, "b": OTHER}),
    "split": Message(weights={"a": WEIGHT}, extra={"c": {"b": OTHER}}),
    "another key": Message(weights={"a": WEIGHT}, extra={"control": {"b": OTHER}}),
}


@pytest.fixture
def codec():
    return Codec({"a": WEIGHT, "b": OTHER}, lambda message: {})


def test_messages_with_the_same_tensors_in_other_places_have_sizes_of_their_own(codec):
    messages = _Messages(codec)
    for _ in range(2):
        for name, message in MESSAGES.items():
            assert messages.prepare(message, None) == (message, codec.message_size(message)), name
    known = MESSAGES["masked"].masks
    assert messages.prepare(MESSAGES["masked"], known)[1] == codec.message_size(MESSAGES["masked"], known)


def test_an_equal_message_is_measured_once(codec, monkeypatch):
    calls, measure = [], codec.message_size
    monkeypatch.setattr(codec, "message_size", lambda *arguments: calls.append(1) or measure(*arguments))
    messages = _Messages(codec)
    for _ in range(3):
        messages.prepare(Message(weights={"a": WEIGHT}, masks={"a": MASK}), None)
    assert len(calls) == 1


def test_a_message_arrives_with_zeros_under_its_masks(codec):
    messages, sent = _Messages(codec), Message(weights={"a": WEIGHT, "b": OTHER}, masks={"a": MASK})
    first, _ = messages.prepare(sent, None)
    assert torch.equal(first.weights["a"][MASK], WEIGHT[MASK])
    assert not first.weights["a"][~MASK].any()
    assert not first.weights["a"][~MASK].signbit().any()
    assert first.weights["b"] is OTHER
    dense = Message(weights={"a": WEIGHT, "b": OTHER})
    assert messages.prepare(dense, None)[0].weights is dense.weights  # a flat tree stays one, which loads in one copy
    again, _ = messages.prepare(sent, None)
    assert again.weights["a"] is first.weights["a"]  # clients with equal messages share their weights
