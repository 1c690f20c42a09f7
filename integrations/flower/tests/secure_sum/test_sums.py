"""Sums of updates under masks, against the same updates added one by one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, PlainMean, voted
from lightning_sparsefl.federated.exchange.flat import FlatModule
from lightning_sparsefl.federated.exchange.orders import Answer, ClientFacts, Order
from lightning_sparsefl.federated.exchange.plain_values import pack_plain
from lightning_sparsefl.types import Message, Update
from lightning_sparsefl.wire import Codec
from torch import nn

from lightning_sparsefl_flower.secure_sum.client_sum import context_of
from lightning_sparsefl_flower.secure_sum.errors import SecureSumRefused, TooFewClients
from lightning_sparsefl_flower.secure_sum.local import LocalClients
from lightning_sparsefl_flower.secure_sum.messages import decode_adverts, join, parts
from lightning_sparsefl_flower.secure_sum.node import SecureNode
from lightning_sparsefl_flower.secure_sum.party import Party
from lightning_sparsefl_flower.secure_sum.policy import Policy
from lightning_sparsefl_flower.secure_sum.server import Gone, SecureCollect
from lightning_sparsefl_flower.secure_sum.signing import KeySigner, KeyVerifier, Signing
from lightning_sparsefl_flower.secure_sum.support import restricted
from lightning_sparsefl_flower.secure_sum.vectors import Form

WEIGHT, CLIENTS = 1000, 6


@pytest.fixture
def flat():
    torch.manual_seed(0)
    return FlatModule(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)))


def weights(server, g):
    return {n: w + 0.1 * torch.randn(w.shape, generator=g) for n, w in server.items()}


def random_masks(g, density):
    return {"0.weight": torch.rand(7, 5, generator=g) < density, "2.weight": torch.rand(3, 7, generator=g) < density}


def dense(server, g, k):
    return Message(weights=server), Update(weights=weights(server, g), weight=k + 1)


def with_a_common_mask(server, g, k):
    masks = random_masks(torch.Generator().manual_seed(7), 0.3)
    message = Message(weights=server, masks=masks)
    return message, Update(weights={n: w * masks.get(n, 1) for n, w in weights(server, g).items()}, weight=k + 1)


def differences_under_own_masks(server, g, k):
    message = Message(weights=server, masks=random_masks(g, 0.5))
    return message, Update(weights={n: 0.1 * w for n, w in weights(server, g).items()}, kind="difference")


def without_a_head(server, g, k):
    sent = {n: w for n, w in weights(server, g).items() if not n.startswith("2.")}
    return Message(weights=server), Update(weights=sent, weight=k + 1)


def with_a_common_mask_and_without_a_head(server, g, k):
    message, update = with_a_common_mask(server, g, k)
    return message, replace(update, weights={n: w for n, w in update.weights.items() if not n.startswith("2.")})


def some_without_a_bias(server, g, k):
    message, update = dense(server, g, k)
    return message, replace(update, weights={n: w for n, w in update.weights.items() if k % 2 or n != "0.bias"})


def votes_of_their_own(server, g, k):
    message, update = dense(server, g, k)
    return message, replace(update, votes=random_masks(g, 0.4) if k else {})


def with_extra(server, g, k):
    message, update = dense(server, g, k)
    extra = {"control": {n: 10.0 ** (3 * k - 9) * torch.randn(w.shape, generator=g) for n, w in server.items()}}
    return message, replace(update, extra={**extra, "bits": {"w": torch.rand(9, generator=g) < 0.5}})


KINDS = [dense, with_a_common_mask, without_a_head, with_a_common_mask_and_without_a_head, with_extra]
RAGGED = [differences_under_own_masks, some_without_a_bias, votes_of_their_own]


class Round:
    """A round of clients with given updates; those in `gone[step]` leave before that step."""

    def __init__(self, flat, make, policy, reducer=None, gone=None, total=WEIGHT):
        self.flat, self.reducer, self.policy, self.gone = flat, reducer or CoverageMean(), policy, gone or {}
        self.change = lambda step, payload: payload
        self.server, g = flat.read(), torch.Generator().manual_seed(1)
        made = [make(self.server, g, k) for k in range(CLIENTS)]
        facts = [ClientFacts(10 * k + 7, 1.0, 5) for k in range(CLIENTS)]
        self.orders = [Order("run", k, 0, "train", facts[k], "key", made[k][0]) for k in range(CLIENTS)]
        self.updates, self.total = [update for _, update in made], total
        codec = Codec(self.server, lambda message: {})
        self.node = SecureNode(flat.layout, codec, reducer, policy)
        self.seen = []

    def start(self):
        return self.reducer.start(self.flat.layout, self.server, self.total)

    def ask(self, step, payloads):
        here = {c: self.change(step, each) for c, each in payloads.items() if c not in self.gone.get(step, ())}
        replies = LocalClients(dict.fromkeys(range(CLIENTS), self.node))(step, here)
        self.seen += [(step, client, reply) for client, reply in replies.items()]
        return {**replies, **{c: Gone("power cut") for c in payloads if c not in here}}

    def secure(self):
        answers = [
            self.node.keep(order, Answer("run", k, 0, "train", order.facts.num_examples, update))
            for k, (order, update) in enumerate(zip(self.orders, self.updates, strict=True))
        ]
        merge, self.received = self.start(), []
        collect = SecureCollect(self.flat.layout, self.policy, self.ask)
        collect(self.orders, answers, lambda orders, answers, merge: self.received.extend(answers) or [], merge)
        return merge

    def plain(self, clients=range(CLIENTS), support=None):
        """The slow twin: updates are added one by one."""
        merge = self.start()
        for k in clients:
            order, update = self.orders[k], self.updates[k]
            if support is not None:
                update = restricted(update, voted(update, order.message), support, self.flat.layout)
            merge.add(update, order.message, order.facts.num_examples)
        return merge


def same(one, other):
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


def contents(merge):
    return pack_plain(vars(merge.result({})))


@pytest.mark.parametrize("reducer", [CoverageMean(), PlainMean()], ids=repr)
@pytest.mark.parametrize("make", [*KINDS, *RAGGED])
@pytest.mark.parametrize("gone", [{}, {"mask": [2]}, {"reveal": [5], "share": [0]}], ids=str)
def test_the_sum_has_the_bytes_of_the_plain_sum(make, reducer, gone, flat):
    one = Round(flat, make, Policy(threshold=0.5, min_coverage=1), reducer, gone)
    merge = one.secure()
    left = [c for c in range(CLIENTS) if c not in (*gone.get("mask", ()), *gone.get("share", ()))]
    plain = one.plain(left)
    assert merge.coverage_min(len(left)) == plain.coverage_min(len(left))
    assert same(contents(merge), contents(plain))
    assert [answer.client for answer in one.received if answer.failure is None] == left


@pytest.mark.parametrize("reducer", [CoverageMean(), PlainMean()], ids=repr)
@pytest.mark.parametrize("make", RAGGED)
def test_coordinates_with_too_few_votes_are_left_out(make, reducer, flat):
    one = Round(flat, make, Policy(min_coverage=3), reducer)
    counts = one.plain().result({}).voters
    merge = one.secure()
    size = {name: torch.full(shape, CLIENTS) for name, shape in flat.layout.shapes.items()}
    support = torch.cat([(counts.get(name, full) >= 3).reshape(-1) for name, full in size.items()])
    assert 0 < int(support.sum()) < len(support) or make is some_without_a_bias
    assert same(contents(merge), contents(one.plain(support=support)))


def test_votes_that_are_common_need_no_count(flat):
    """With the same mask for all, only its coordinates travel, in one sum."""
    sizes = {}
    for make in (dense, with_a_common_mask, differences_under_own_masks):
        one = Round(flat, make, Policy())
        one.secure()
        sizes[make] = [len(reply) for step, client, reply in one.seen if step == "mask" and client == 0]
    masks = random_masks(torch.Generator().manual_seed(7), 0.3)
    dropped = sum(int((~mask).sum()) for mask in masks.values())
    assert sizes[dense][0] - sizes[with_a_common_mask][0] == 7 * dropped
    assert [len(found) for found in sizes.values()] == [1, 1, 2]


def test_no_answer_holds_an_update(flat):
    one = Round(flat, dense, Policy())
    one.secure()
    assert all(answer.update == Update(weights={}) for answer in one.received)


def test_a_client_with_values_beyond_the_grid_leaves_by_itself(flat):
    """The sum without a grid of one client's tensor would show it."""

    def large(server, g, k):
        message, update = dense(server, g, k)
        return message, replace(update, weights={n: w * (1e6 if k == 3 else 1) for n, w in update.weights.items()})

    one = Round(flat, large, Policy())
    assert same(contents(one.secure()), contents(one.plain([0, 1, 2, 4, 5])))
    assert "too large for the grid" in one.received[3].failure


def test_too_few_clients_end_the_sum(flat):
    with pytest.raises(TooFewClients, match="4 of 6 clients are left to send their masked update"):
        Round(flat, dense, Policy(), gone={"mask": [1, 4]}).secure()


def test_an_update_is_given_to_one_sum(flat):
    """Two sums of different clients would differ by one client's update."""
    one = Round(flat, dense, Policy())
    one.secure()
    merge = one.start()
    collect = SecureCollect(flat.layout, one.policy, one.ask)
    with pytest.raises(TooFewClients, match="0 of 0 clients are left to advertise keys"):
        collect(one.orders, one.received, lambda *_: [], merge)
    assert all("has no update that is not in a sum yet" in reply for _, _, reply in one.seen[-CLIENTS:])


def test_a_plan_that_would_show_coordinates_of_one_client_is_refused(flat):
    """A server that skips the count of votes, or says that all vote alike, gets no shares."""
    for claim in ("ragged", "common"):
        one = Round(flat, votes_of_their_own, Policy())

        def change(step, payload, claim=claim):
            if step != "share":
                return payload
            plan, roster = parts(payload)
            assert plan["mode"] == "coverage"
            return join({**plan, "mode": claim}, roster)

        one.change = change
        with pytest.raises(TooFewClients, match="are left to share their secrets"):
            one.secure()
        refused = [reply for step, client, reply in one.seen if step == "share" and client]
        assert all(f"mode of a secure sum is '{claim}'" in reply for reply in refused)


def test_an_extra_tree_of_one_client_is_left_out(flat):
    def one_with_extra(server, g, k):
        message, update = dense(server, g, k)
        return message, replace(update, extra={"control": {"w": torch.ones(3)}} if k == 2 else {})

    assert Round(flat, one_with_extra, Policy(min_coverage=1)).secure().result({}).extra
    assert not Round(flat, one_with_extra, Policy()).secure().result({}).extra


def test_a_sum_that_cannot_be_is_refused(flat, monkeypatch):
    """A client that sends something else than its terms spoils the sum, which is noticed where numbers are counted."""
    words, calls = Form.words, []

    def spoilt(self, integers):
        calls.append(self)
        return words(self, integers) + np.uint64(len(calls) == 3)

    monkeypatch.setattr(Form, "words", spoilt)
    with pytest.raises(SecureSumRefused, match=r"sum of 6 clients states 7 updates"):
        Round(flat, dense, Policy()).secure()


def test_sums_of_two_cohorts_add_up(flat):
    """As of two ranks, of which each sums its own clients."""
    one = Round(flat, votes_of_their_own, Policy(min_coverage=1))
    merge = one.start()
    answers = [
        one.node.keep(order, Answer("run", k, 0, "train", order.facts.num_examples, update))
        for k, (order, update) in enumerate(zip(one.orders, one.updates, strict=True))
    ]
    for half in (slice(0, 3), slice(3, 6)):
        part = one.start()
        collect = SecureCollect(flat.layout, one.policy, one.ask)
        collect(one.orders[half], answers[half], lambda *_: [], part)
        merge.add_integers(part.integers({}), {})
    assert same(contents(merge), contents(one.plain()))


def test_nodes_with_long_term_keys_refuse_keys_of_the_server(flat):
    """A server that puts a client of its own in the place of another one gets no shares."""
    key, wrong = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    one = Round(flat, dense, Policy())
    one.node.signing = Signing(KeySigner(key), KeyVerifier(dict.fromkeys(range(CLIENTS), key.public_key())))
    assert same(contents(one.secure()), contents(one.plain()))

    two = Round(flat, dense, Policy())
    two.node.signing = one.node.signing

    def change(step, payload):
        if step != "share":
            return payload
        plan, roster = parts(payload)
        adverts = decode_adverts(roster)
        forged = Party(3, context_of("run", 0, 1), Policy(), KeySigner(wrong)).advertise(adverts[3].facts)
        return join(plan, b"".join(forged if a.client == 3 else a.encode() for a in adverts))

    two.change = change
    with pytest.raises(TooFewClients, match="0 of 6 clients are left to share their secrets"):
        two.secure()
    refused = [reply for step, client, reply in two.seen if step == "share" and client != 3]
    assert all("keys of client 3 are not signed by its node" in reply for reply in refused)
