"""Heartbeats: a rank that stops without a word is lost, one that ends or is slow together with all others is not."""

import threading

import pytest
import torch.distributed as dist

from lightning_sparsefl.federated.distributed.heartbeat import Heartbeat

PATIENCE = 60
"""Seconds to wait for what must happen."""


class Brittle(dist.Store):
    """A store whose machine disappears: its calls raise from then on, or wait for ever."""

    def __init__(self, store, gone, waits):
        super().__init__()
        self.store, self.gone, self.waits = store, gone, waits

    def add(self, key, more):
        if self.gone.is_set():
            if self.waits:
                threading.Event().wait(PATIENCE)
            raise dist.DistNetworkError("connection reset")
        return self.store.add(key, more)


@pytest.fixture
def beating():
    """Starts the heartbeats of ranks with one store; returns them, and per rank the event and the ranks it lost."""
    running = []

    def start(stores, seconds=0.4):
        lost = [(threading.Event(), []) for _ in stores]
        for rank, (store, (event, ranks)) in enumerate(zip(stores, lost, strict=True)):
            note = lambda gone, event=event, ranks=ranks: (ranks.extend(gone), event.set())  # noqa: E731
            running.append(Heartbeat(store, rank, len(stores), seconds, note))
            running[-1].start()
        return running, lost

    yield start
    for one in running:
        one._stopped.set()


def test_a_rank_that_falls_silent_is_lost_to_all_others(beating):
    ranks, lost = beating([store := dist.HashStore(), store, store])
    ranks[1]._stopped.set()  # as if it had been stopped: it says no more
    for rank in (0, 2):
        event, gone = lost[rank]
        assert event.wait(PATIENCE)
        assert gone == [1]


@pytest.mark.parametrize("waits", [False, True], ids=["refuses", "hangs"])
def test_all_ranks_are_lost_with_the_machine_of_the_store(waits, beating):
    gone = threading.Event()
    store = dist.HashStore()
    _, lost = beating([store, Brittle(store, gone, waits), store])
    gone.set()
    event, ranks = lost[1]
    assert event.wait(PATIENCE)
    assert ranks == [0, 2]


def test_a_rank_that_ends_is_not_lost(beating):
    store = dist.HashStore()
    ranks, lost = beating([store, store])
    ranks[1].stop()
    ranks[0]._threads[1].join(timeout=2)  # many times the 0.4 seconds after which it would be lost
    assert not lost[0][0].is_set()
    ranks[0].stop()
    assert not any(thread.is_alive() for rank in ranks for thread in rank._threads)
