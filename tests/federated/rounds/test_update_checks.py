"""An update is compared with its message before anything of it is kept."""

from dataclasses import replace

import pytest
import torch

from lightning_sparsefl.errors import InvalidUpdate
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.exchange.update_checks import check_update_schema, excess_reason, non_finite_reason
from lightning_sparsefl.sparse.masks import intersect
from lightning_sparsefl.types import Message, Update

WEIGHTS = {"a": torch.ones(3, 2), "b": torch.ones(4)}
LAYOUT = Layout(WEIGHTS, {})
HALF = torch.tensor([True, True, False, False])
MESSAGE = Message(weights=WEIGHTS, masks={"b": HALF}, extra={"control": {"b": torch.ones(4)}})


def may_vote(message):
    return intersect(message.trainable, message.masks)


def check(update, message=MESSAGE):
    check_update_schema(update, message, LAYOUT, may_vote, "The update of client 3")


GOOD = {
    "all": Update(weights=WEIGHTS),
    "some names": Update(weights={"b": torch.zeros(4)}),
    "nested records": Update(weights={}, shared={"a": [{"b": ({"c": 1},)}]}, memory={"t": (1, 2)}),
    "nothing": Update(weights={}, shared={"n": 1}),
    "the votes that follow": Update(weights=WEIGHTS, votes={"b": HALF}),
    "fewer votes": Update(weights=WEIGHTS, votes={"b": torch.zeros(4, dtype=torch.bool)}),
    "votes on what is not sent": Update(weights={"a": torch.ones(3, 2)}, votes={}),
    "masks": Update(weights=WEIGHTS, shared={"masks": {"b": HALF, "own": HALF[:3]}}),
    "bool extra": Update(weights=WEIGHTS, extra={"control": {"b": HALF}, "new": {"c": HALF[:3]}}),
    "extra": Update(weights=WEIGHTS, extra={"control": {"b": torch.zeros(4)}, "new": {"c": torch.zeros(7)}}),
}
BAD = {
    "name": (Update(weights={"c": torch.ones(2)}), "holds 'c', which the model does not have"),
    "shape": (Update(weights={"b": torch.ones(5)}), r"'b' with shape \(5,\); expected \(4,\)"),
    "dtype": (Update(weights={"b": torch.ones(4).double()}), "'b' as torch.float64; expected torch.float32"),
    "kind": (Update(weights=WEIGHTS, kind="both"), "`kind` 'both'"),
    "zero": (Update(weights=WEIGHTS, weight=0), "`weight` 0; expected a positive integer"),
    "fraction": (Update(weights=WEIGHTS, weight=0.5), "`weight` 0.5"),
    "flag": (Update(weights=WEIGHTS, weight=True), "`weight` True"),
    "vote's name": (Update(weights=WEIGHTS, votes={"c": HALF}), "votes on 'c', which the model"),
    "vote's shape": (Update(weights=WEIGHTS, votes={"b": HALF[:2]}), r"votes on 'b' with shape \(2,\)"),
    "vote's dtype": (Update(weights=WEIGHTS, votes={"b": HALF.float()}), "votes on 'b' as torch.float32"),
    "vote's place": (Update(weights=WEIGHTS, votes={"b": ~HALF}), "coordinates of 'b' that `may_vote` forbids"),
    "dense votes": (Update(weights=WEIGHTS, votes={}), "coordinates of 'b' that `may_vote` forbids"),
    "masks of numbers": (Update(weights=WEIGHTS, shared={"masks": {"b": HALF.float()}}), r"\['masks'\]` with 'b'"),
    "masks' shape": (
        Update(weights=WEIGHTS, shared={"masks": {"b": HALF[:2]}}),
        "not a bool mask of the model's shape",
    ),
    "one mask": (Update(weights=WEIGHTS, shared={"masks": HALF}), r"`shared\['masks'\]` as Tensor; expected a tree"),
    "a number as a key": (Update(weights={}, memory={3: "k"}), "has in `memory` the key 3; expected keys that are str"),
    "a nested key": (Update(weights={}, shared={"a": [{"b": ({3: 1},)}]}), "has in `shared` the key 3; expected keys"),
    "whole extra": (Update(weights=WEIGHTS, extra={"n": {"b": torch.ones(4).int()}}), "'b' as torch.int32; expected"),
    "plain extra": (Update(weights=WEIGHTS, extra={"n": {"b": 1.0}}), "'b' as `float`; expected tensors of floats"),
    "plain weights": (Update(weights={"b": [1.0]}), "holds 'b' as `list`; expected a tensor"),
    "vector metric": (
        Update(weights=WEIGHTS, metrics={"k": torch.ones(3)}),
        "a `Tensor` as the metric 'k'; expected",
    ),
    "text metric": (Update(weights=WEIGHTS, metrics={"k": "1"}), "a `str` as the metric 'k'; expected a number"),
    "extra's shape": (
        Update(weights=WEIGHTS, extra={"control": {"b": torch.ones(2)}}),
        r"`extra\['control'\]` with 'b' of shape \(2,\); expected \(4,\)",
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_what_answers_the_message_passes(case):
    check(GOOD[case])
    assert non_finite_reason(GOOD[case]) is None


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_is_refused_in_a_sentence(case):
    update, said = BAD[case]
    with pytest.raises(InvalidUpdate, match=said) as caught:
        check(update)
    assert "client 3" in str(caught.value)


def test_a_difference_needs_something_to_differ_from():
    part = replace(MESSAGE, weights={"b": torch.ones(4)})
    check(Update(weights=WEIGHTS), part)
    with pytest.raises(InvalidUpdate, match="a difference of 'a', which was not sent"):
        check(Update(weights=WEIGHTS, kind="difference"), part)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_named(value):
    broken = torch.tensor([1.0, value])
    assert (
        non_finite_reason(Update(weights={"b": broken}))
        == "its update of weights['b'] holds values that are not finite"
    )
    assert "extra['c']['b']" in non_finite_reason(Update(weights=WEIGHTS, extra={"c": {"b": broken}}))
    assert "shared['list'][1]" in non_finite_reason(Update(weights=WEIGHTS, shared={"list": [1.0, broken]}))
    assert non_finite_reason(Update(weights=WEIGHTS, metrics={"train_loss": value})) == f"its train_loss is {value}"
    assert non_finite_reason(Update(weights=WEIGHTS, metrics={"auroc": value}, memory={"b": broken})) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_whose_squares_overflow_are_the_clients_fault(dtype):
    for value, said in ((1e19, None), (-3e38, "its update of weights['b'] holds values up to 3")):
        update = Update(weights={"b": torch.tensor([1.0, value], dtype=dtype)})
        reason = non_finite_reason(update)
        assert reason is None if said is None else reason.startswith(said)


def endless():
    tree = []
    tree.append(tree)
    return tree


ROOM = 4 * 40 + 64 * 1024  # the model has ten float32


@pytest.mark.parametrize(
    ("update", "said"),
    [
        (Update(weights={}, weight=31), "its update has the weight 31; expected at most 30, its training samples"),
        (Update(weights={}, weight=2**62), f"the weight {2**62}; expected at most 30"),
        (Update(weights={}, metrics=dict.fromkeys(map(str, range(257)), 1.0)), "257 metrics; expected at most 256"),
        (Update(weights={}, shared={"a": torch.zeros(ROOM, dtype=torch.bool)}), f"more than {ROOM} bytes, 4 times"),
        (Update(weights={}, shared={"a": [0.0] * (ROOM // 8)}), f"more than {ROOM} bytes"),
        (Update(weights={}, shared={"a": "x" * ROOM}), f"more than {ROOM} bytes"),
        (Update(weights={}, shared={"a": endless()}), f"more than {ROOM} bytes"),
    ],
    ids=["weight", "huge", "metrics", "tensor", "numbers", "text", "endless"],
)
def test_a_client_cannot_claim_more_than_its_share(update, said):
    assert said in excess_reason(update, 30, LAYOUT)


@pytest.mark.parametrize(
    "update",
    [
        Update(weights={}, weight=30),
        Update(weights={}, metrics=dict.fromkeys(map(str, range(256)), 1.0)),
        Update(weights={}, shared={"masks": {"b": HALF}, "a": torch.zeros(ROOM - 100, dtype=torch.uint8)}),
    ],
    ids=["weight", "metrics", "shared"],
)
def test_its_share_is_a_clients_due(update):
    assert excess_reason(update, 30, LAYOUT) is None


def test_a_client_without_samples_may_weigh_one():
    assert excess_reason(Update(weights={}), 0, LAYOUT) is None


def test_an_error_names_the_first_of_all_tensors_with_forbidden_votes():
    names = [f"t{number:02}" for number in range(40)]
    weights = {name: torch.ones(2) for name in reversed(names)}
    message = Message(weights=weights, masks={name: torch.tensor([True, False]) for name in weights})
    with pytest.raises(InvalidUpdate, match="coordinates of 't00' that"):
        check_update_schema(
            Update(weights=weights, votes={}), message, Layout(weights, {}), may_vote, "The update of client 3"
        )
