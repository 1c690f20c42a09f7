"""Orders and answers that pass as bytes to a node in another process; all methods: test_algorithms.py."""

import pytest

from lightning_sparsefl import FedBABU, FedSpa
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
