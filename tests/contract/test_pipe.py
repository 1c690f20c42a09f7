"""Orders and answers that pass as bytes to a node in another process; all methods: test_algorithms.py."""

from itertools import pairwise

import pytest

from lightning_sparsefl import FedBABU, FedSpa, Hermes
from lightning_sparsefl.testing.contents import rows
from lightning_sparsefl.testing.pipe import Remote, piped

ENCODE = {"wire": "encode", "local_engine": "fast"}


@pytest.fixture
def remotes():
    """Makes runs work through a pipe; the list of their ends."""
    with piped() as ends:
        yield ends


def test_a_node_that_lost_a_record_gets_a_fresh_order_which_is_charged(federation, remotes, monkeypatch):
    answer, forgot = Remote.answer, []

    def forgetful(self, orders):
        (order,) = orders
        if order.task == "train" and order.version is not None and not forgot:
            forgot.append(order.client)
            self.ask("forget", order.client)
        yield from answer(self, orders)

    monkeypatch.setattr(Remote, "answer", forgetful)
    trainer = federation(FedSpa(), rounds=4, federation=ENCODE)
    clients = [row for row in rows(trainer.run_folder / "clients.csv") if row["trained"] == "1"]
    (lost,) = forgot
    own = [int(row["downlink_bytes"]) for row in clients if int(row["client"]) == lost]
    again = [len(payload) for task, payload in remotes[-1].bytes if task == "train"]
    assert len(own) >= 2
    assert max(own[1:]) >= own[0]  # the mask travels once more
    assert len(again) == len(clients) + 1


def test_a_client_whose_record_is_lost_gets_what_a_new_one_does(federation, remotes, monkeypatch):
    """Hermes cuts a message to what a client's own model, which is lost here, has in common with the others."""
    answer, orders = Remote.answer, []

    def forgetful(self, asked):
        (order,) = asked
        if order.task == "train" and order.round >= 3 and order.message.masks:
            self.ask("forget", order.client)
        orders.append(order)
        yield from answer(self, asked)

    monkeypatch.setattr(Remote, "answer", forgetful)
    federation(Hermes(min_score=0.0, penalty=0.0), rounds=5, federation=ENCODE)
    pairs = [(one, two) for one, two in pairwise(orders) if (one.round, one.client) == (two.round, two.client)]
    again = [(one, two) for one, two in pairs if one.task == two.task == "train"]
    assert again
    for order, fresh in again:
        assert order.message.masks
        assert not fresh.message.masks
        assert fresh.message.weights.keys() == order.message.weights.keys()


def test_own_buffers_never_travel(federation):
    """With `local` and `server`, not even for the first time."""
    down = {}
    for mode in ("average", "local", "server"):
        trainer = federation(FedBABU(), rounds=2, folder=mode, federation={"buffers": mode})
        down[mode] = trainer.summary["comm/downlink_bytes_total"]
    assert down["local"] == down["server"]
    assert (
        down["average"] - down["local"] > 2 * 4 * 16 * 4
    )  # eight client-rounds; of the batch norm, one buffer is dense
