"""FedSelect: single weights become personal, those that move most."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from lightning_sparsefl import FedAvg, FedSelect
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.testing.contents import comparable
from lightning_sparsefl.types import Message, ServerState
from lightning_sparsefl.wire import Codec

INITIAL = {"a.weight": torch.zeros(10), "a.bias": torch.zeros(2), "a.weight_mean": torch.zeros(3)}
BUFFERS = {"a.weight_mean"}
MESSAGE = Message(weights=INITIAL)
EVERY = FedSelect(every=1, alternations=1)


def moved(seed):
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=rng) for name, value in INITIAL.items()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.5}, r"`algorithm.rate` is 1.5; expected a number in \[0, 1\]"),
        ({"bound": -0.1}, r"`algorithm.bound` is -0.1; expected a number in \[0, 1\]"),
        ({"every": 0}, r"`algorithm.every` is 0; expected a whole number >= 1"),
        ({"alternations": 0}, r"`algorithm.alternations` is 0; expected a whole number >= 1"),
    ],
)
def test_refuses_options_out_of_range(options, message):
    with pytest.raises(InvalidOption, match=message):
        FedSelect(**options)


def turns(method, client, size, count):
    """What a client keeps after each of its turns, in which its weights move at random."""
    initial, memory = {"w.weight": torch.zeros(size)}, {}
    for turn in range(count):
        trained = {"w.weight": torch.randn(size, generator=torch.Generator().manual_seed(turn))}
        someone, _ = client(trained, memory=memory, initial=initial)
        memory = method.train(Message(weights=initial), someone).memory
        yield memory


def test_three_quarters_stay_shared_at_each_selection_up_to_the_bound(client):
    """1 - .75^j of a tensor's weights are personal after j selections; above .8 there is no more."""
    kept = [int(memory["masks"]["w.weight"].sum()) for memory in turns(EVERY, client, 4096, 9)]
    assert kept == [4096 - round(4096 * 0.75**selections) for selections in (0, 1, 2, 3, 4, 5, 6, 6, 6)]
    assert [round(count / 4096, 3) for count in kept[:7]] == [0, 0.25, 0.438, 0.578, 0.684, 0.763, 0.822]


def test_selections_are_at_every_third_turn_but_not_at_the_first(client):
    kept = [int(memory["masks"]["w.weight"].sum()) for memory in turns(FedSelect(), client, 16, 8)]
    assert kept == [0, 0, 0, 4, 4, 4, 7, 7]


def test_the_weights_that_moved_most_since_the_last_selection_are_chosen(client):
    first, second, third = moved(1), moved(2), moved(3)
    memory = EVERY.train(MESSAGE, client(first, initial=INITIAL, buffers=BUFFERS)[0]).memory
    assert not memory["masks"]["a.weight"].any()
    memory = EVERY.train(MESSAGE, client(second, memory=memory, initial=INITIAL, buffers=BUFFERS)[0]).memory
    most = second["a.weight"].abs().topk(3).indices  # 2.5, rounded half up; since the run's initial values
    assert memory["masks"]["a.weight"].nonzero().view(-1).tolist() == sorted(most.tolist())
    memory = EVERY.train(MESSAGE, client(third, memory=memory, initial=INITIAL, buffers=BUFFERS)[0]).memory
    change = (third["a.weight"] - second["a.weight"]).abs().index_fill(0, most, 0)
    chosen = {*most.tolist(), *change.topk(2).indices.tolist()}
    assert set(memory["masks"]["a.weight"].nonzero().view(-1).tolist()) == chosen
    assert set(memory["masks"]) == {"a.weight"}  # neither the bias nor a buffer named as a weight
    assert torch.equal(memory["reference"]["a.weight"], third["a.weight"])


def with_own(count=4):
    mask = torch.arange(10) < count
    return {"masks": {"a.weight": mask}, "own": {"a.weight": mask * 5.0}, "turns": 1, "reference": INITIAL}


def test_epochs_alternate_between_personal_and_shared_weights(client):
    method = FedSelect(alternations=2)
    someone, script = client(moved(1), memory=with_own(), initial=INITIAL, buffers=BUFFERS)
    update = method.train(MESSAGE, someone)
    assert script.epochs == [1, 1, 1, 1]
    mask = with_own()["masks"]["a.weight"]
    for place, (_, masks, trainable, _) in enumerate(script.fits):
        assert masks == {}
        assert set(trainable) == {"a.weight", "a.bias"}
        assert torch.equal(trainable["a.weight"], ~mask if place % 2 else mask)
        assert bool(trainable["a.bias"].all()) == bool(trainable["a.bias"].any()) == bool(place % 2)
    start = script.fits[0][0]["a.weight"]
    assert torch.equal(start, mask * 5.0)
    assert torch.equal(method.personalize(MESSAGE, someone)["a.weight"], start)
    assert torch.equal(update.votes["a.weight"], ~mask)
    assert method.may_vote(MESSAGE) == {}
    assert (update.weight, update.shared) == (1, {"own": 4})
    assert comparable(method.trained(MESSAGE, update)) == comparable(moved(1))


def test_without_personal_weights_half_of_the_epochs_are_idle(client):
    someone, script = client(moved(1), initial=INITIAL, buffers=BUFFERS)
    FedSelect(alternations=3).train(MESSAGE, someone)
    assert script.epochs == [1, 1, 1]
    assert all(mask.all() for _, _, trainable, _ in script.fits for mask in trainable.values())


def test_personal_weights_are_in_no_update(client):
    codec, someone = Codec(INITIAL, EVERY.may_vote), client(moved(1), memory=with_own(), initial=INITIAL)[0]
    update = EVERY.train(MESSAGE, someone)
    arrived = codec.decode_update(codec.encode_update(update, MESSAGE), MESSAGE)
    assert arrived.weights["a.weight"].tolist() == [0.0] * 4 + moved(1)["a.weight"][4:].tolist()


def test_a_sparse_download_sends_what_the_client_shares(view, client):
    method = replace(EVERY, sparse_download=True)
    server = ServerState(round=1, weights=moved(7))
    assert method.download(server, view()).masks == {}
    update = method.train(MESSAGE, client(moved(1), memory=with_own(), initial=INITIAL)[0])
    message = method.download(server, view(shared=update.shared))
    own = update.shared["personal"]["a.weight"]
    assert int(own.sum()) == update.shared["own"] == 6
    assert torch.equal(message.masks["a.weight"], ~own)
    someone, _ = client(memory=update.memory, initial=INITIAL)
    dense, sparse = (method.personalize(each, someone) for each in (Message(weights=moved(7)), message))
    assert comparable(dense) == comparable(sparse)


def test_costs(facts):
    # 34 FLOPs of a forward pass, 7 samples; 15 alternations of two epochs, whose weight gradients are those of one
    message = facts().message
    first = FedSelect().costs(facts())
    assert first.flops_paper == 15 * 7 * 6 * 34
    assert first.flops_analytic == 15 * 7 * 3 * 34
    assert first.bytes_down_paper == first.bytes_up_paper == 4 * 18
    later = FedSelect().costs(facts(message=message, shared={"own": 6}))
    assert later.flops_paper == first.flops_paper
    assert later.flops_analytic == 15 * 7 * 5 * 34
    assert (later.bytes_down_paper, later.bytes_up_paper) == (4 * 18, 4 * 12 + 16 / 8)
    held = Message(weights=message.weights, masks={"a.weight": torch.arange(10).view(2, 5) >= 6})
    sparse = FedSelect(sparse_download=True).costs(facts(message=held, shared={"own": 6}))
    assert sparse == replace(later, bytes_down_paper=4 * 12)


@dataclass(frozen=True, kw_only=True)
class EqualWeights(FedAvg):
    """FedAvg with the plain mean of its clients."""

    def train(self, message, client):
        return replace(super().train(message, client), weight=1)


def test_without_selections_it_is_the_plain_mean(federation, last):
    methods = FedSelect(rate=0.0, every=1, alternations=1), EqualWeights()
    options = {"max_epochs": 1, "federation": {"local_engine": "fast"}}
    runs = (federation(method, folder=type(method).__name__, **options) for method in methods)
    own, plain = (last(run)["state_dict"] for run in runs)
    assert own == plain
