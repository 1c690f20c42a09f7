"""FedP3: owned layers dense in both directions, the others pruned on their way down."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from helpers.freezing import BUFFERS, HEAD, WEIGHTS, A, B, started, views
from helpers.networks import DeepClassifier
from lightning_sparsefl import FedAvg, FedP3
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.uses import TensorUses
from lightning_sparsefl.testing.contents import comparable
from lightning_sparsefl.types import Message
from lightning_sparsefl.wire import Codec

TRAINED = {name: value + 1 for name, value in WEIGHTS.items()}
FOUR = {
    f"{layer}.{kind}": torch.randn(4, 5) if kind == "weight" else torch.randn(4)
    for layer in "abcde"
    for kind in ("weight", "bias")
}
"""Four hidden layers and a last one, as the network of the authors' code."""


def owners(method, clients=100):
    """By hidden layer: the clients that own it, which are those that receive it without masks."""
    people = views(*[1.0] * clients)
    server = method.init(FOUR, fleet_of(people))
    unowned = {person.id: set(method.download(server, person).masks) for person in people}
    return {layer: [k for k, masks in unowned.items() if f"{layer}.weight" not in masks] for layer in "abcd"}


def fleet_of(people):
    return Fleet(people, frozenset(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"owned": 0}, r"`algorithm.owned` is 0; expected a whole number >= 1"),
        ({"keep": 0.0}, r"`algorithm.keep` is 0.0; expected a number in \(0, 1\]"),
        ({"local_width": 0.0}, r"`algorithm.local_width` is 0.0; expected a number in \(0, 1\]"),
        ({"head": "mean"}, r"`algorithm.head` is 'mean'; expected one of 'own', 'shared'"),
    ],
)
def test_refuses_options_out_of_range(options, message):
    with pytest.raises(InvalidOption, match=message):
        FedP3(**options)


def test_refuses_a_model_of_one_layer():
    with pytest.raises(InvalidOption, match="has no layer below the last"):
        FedP3().init({"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2)}, fleet_of(views(1.0)))


@pytest.mark.parametrize(("clients", "owned", "found"), [(1, 2, 2), (2, 1, 2), (3, 1, 3)])
def test_refuses_layers_without_an_owner(clients, owned, found):
    message = rf"`algorithm.owned` is {owned}, so that {clients} clients own {found} of the 4 hidden layers"
    with pytest.raises(InvalidOption, match=message):
        FedP3(owned=owned).init(FOUR, fleet_of(views(*[1.0] * clients)))
    FedP3(owned=4).init(FOUR, fleet_of(views(*[1.0] * clients)))


def test_blocks_of_clients_own_layers_in_turn():
    lower, two, three, every = (owners(FedP3(owned=owned)) for owned in (1, 2, 3, 9))
    assert lower == {
        "a": list(range(25)),
        "b": list(range(25, 50)),
        "c": list(range(50, 75)),
        "d": list(range(75, 100)),
    }
    assert two["a"] == [*range(25), *range(75, 100)]  # blocks 0 and 3
    assert {layer: len(clients) for layer, clients in two.items()} == dict.fromkeys("abcd", 50)
    assert {layer: len(clients) for layer, clients in three.items()} == dict.fromkeys("abcd", 75)
    assert {layer: len(clients) for layer, clients in every.items()} == dict.fromkeys("abcd", 100)


def test_owners_follow_from_the_numbers_of_clients_of_which_some_never_train():
    people = [replace(person, id=number) for person, number in zip(views(*[1.0] * 4), (1, 30, 60, 99), strict=True)]
    method = FedP3(owned=1)
    server = method.init(FOUR, fleet_of(people))
    assert [method.layers(server, person) for person in people] == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize("head", ["own", "shared"])
def test_other_layers_are_sent_with_their_largest_weights(head):
    method, people = FedP3(owned=1, keep=0.5, head=head), views(1.0, 1.0, 1.0, 1.0)
    message = method.download(method.init(FOUR, fleet_of(people)), people[1])
    assert set(message.masks) == {f"{layer}.{kind}" for layer in "acd" for kind in ("weight", "bias")}
    assert set(FOUR) - set(message.weights) == ({"e.weight", "e.bias"} if head == "own" else set())
    mask = message.masks["a.weight"]
    assert int(mask.sum()) == 10
    assert FOUR["a.weight"][mask].abs().min() > FOUR["a.weight"][~mask].abs().max()
    assert torch.equal(message.weights["a.weight"], FOUR["a.weight"] * mask)
    assert bool(message.masks["a.bias"].all())
    assert torch.equal(message.weights["b.weight"], FOUR["b.weight"])


@pytest.mark.parametrize(("head", "keep"), [("own", 0.9), ("shared", 1.0)])
def test_owned_layers_the_last_one_and_buffers_travel_up(client, head, keep):
    method, people = FedP3(owned=1, keep=keep, head=head), views(1.0, 1.0)
    message, codec = method.download(started(method, people), people[0]), Codec(WEIGHTS)
    message = codec.decode_message(codec.encode_message(message))  # masks of Trues arrive as such
    assert set(message.masks) == B
    someone, script = client(TRAINED, initial=WEIGHTS, buffers=BUFFERS)
    update = method.train(message, someone)
    assert set(update.weights) == A | HEAD | BUFFERS
    assert set(update.memory["weights"]) == set(WEIGHTS)
    assert method.may_vote(message) == {}
    assert update.weight == 1
    ((start, masks, trainable, _),) = script.fits
    assert (masks, trainable) == ({}, {})  # what arrives as zero may become a weight
    assert set(start) == set(WEIGHTS)


def test_a_client_goes_on_from_its_own_head_and_is_scored_with_what_it_trained(client):
    method, own = FedP3(), {name: value + 7 for name, value in WEIGHTS.items()}
    message = Message(weights={name: value for name, value in WEIGHTS.items() if name not in HEAD})
    someone, script = client(TRAINED, memory={"weights": own}, initial=WEIGHTS, buffers=BUFFERS)
    update = method.train(message, someone)
    start = script.fits[0][0]
    assert all(start[name] is (own if name in HEAD else WEIGHTS)[name] for name in WEIGHTS)
    assert method.personalize(message, someone) is someone.memory["weights"]
    assert method.trained(message, update) == TRAINED
    newcomer, _ = client(initial=WEIGHTS)
    assert comparable(method.personalize(message, newcomer)) == comparable(WEIGHTS)


def test_costs(facts):
    # Of b's 6 weights 5 arrive; a is owned, and so are the 2 numbers of the last layer, which does not travel down.
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    weights = facts().message.weights
    given = facts(masks={"b.weight": mask})
    given = replace(given, model=SimpleNamespace(initial={**weights, "c.weight": torch.ones(1, 2)}, uses=TensorUses()))
    costs = FedP3().costs(given)
    assert costs.flops_paper == 14 * 3 * (22 + 10)
    assert costs.flops_analytic == 14 * 3 * 34
    assert costs.bytes_down_paper == 4 * (12 + 5)
    assert costs.bytes_up_paper == 4 * (12 + 2)


@pytest.mark.parametrize(("pruning", "share"), [("uniform", 0.85), ("ordered", 0.73)])
def test_local_pruning_saves_operations_of_hidden_layers(facts, pruning, share):
    weights = facts().message.weights  # b is the last layer
    given = replace(facts(), model=SimpleNamespace(initial=weights, uses=TensorUses()))
    costs = FedP3(local_pruning=pruning, local_width=0.7).costs(given)
    assert costs.flops_paper == costs.flops_analytic == pytest.approx(14 * 3 * (share * 22 + 12))


@pytest.mark.parametrize("pruning", ["uniform", "ordered"])
def test_what_a_client_leaves_out_keeps_its_value(client, pruning):
    method, message = FedP3(local_pruning=pruning, local_width=0.5), Message(weights=WEIGHTS)
    someone, script = client(TRAINED, initial=WEIGHTS, buffers=BUFFERS)
    update = method.train(message, someone)
    ((_, masks, _, _),) = script.fits
    assert set(masks) == {"a.weight", "b.weight"}
    for name, value in update.weights.items():
        expected = torch.where(masks[name], TRAINED[name], WEIGHTS[name]) if name in masks else TRAINED[name]
        assert torch.equal(value, expected)


def test_ordered_pruning_leaves_a_block_of_rows_and_columns(client):
    someone, script = client(TRAINED, initial=WEIGHTS, buffers=BUFFERS)
    FedP3(local_pruning="ordered", local_width=0.5).train(Message(weights=WEIGHTS), someone)
    ((_, masks, _, _),) = script.fits
    rows, columns = (int(masks["a.weight"].any(dim).sum()) for dim in (1, 0))
    assert 0 < int(masks["a.weight"].sum()) == rows * columns < masks["a.weight"].numel()


WIDE = {"a.weight": torch.ones(100, 100), "b.weight": torch.ones(2, 100)}


def local_mask(client, pruning, number):
    """What a client trains of a hidden matrix of 100 rows and 100 columns."""
    someone, script = client(WIDE, initial=WIDE, client=number)
    FedP3(local_pruning=pruning, local_width=0.5).train(Message(weights=WIDE), someone)
    return script.fits[0][1]["a.weight"]


def test_local_widths_are_drawn_from_the_smallest_one_to_1(client):
    rows = sorted(int(local_mask(client, "ordered", number).any(1).sum()) for number in range(30))
    assert 50 <= rows[0] < 60
    assert 90 < rows[-1] <= 100


def test_uniform_pruning_leaves_out_weights_of_all_rows_and_columns(client):
    mask = local_mask(client, "uniform", 0)
    assert 0.45 < float(mask.float().mean()) < 1
    assert not mask.all(0).any()
    assert not mask.all(1).any()


@dataclass(frozen=True, kw_only=True)
class EqualWeights(FedAvg):
    """FedAvg with the plain mean of its clients."""

    def train(self, message, client):
        return replace(super().train(message, client), weight=1)


def test_with_all_layers_it_is_the_plain_mean(federation, last):
    states = []
    for method in (FedP3(owned=9, keep=1.0, head="shared"), EqualWeights()):
        torch.manual_seed(0)
        options = {"module": DeepClassifier(), "federation": {"local_engine": "fast"}}
        states.append(last(federation(method, folder=type(method).__name__, **options))["state_dict"])
    assert states[0] == states[1]
