"""A run whose orders and answers pass as bytes to another process ends with the bytes of an ordinary run."""

import multiprocessing
import os
import traceback

import pytest

from helpers.algorithms import every_algorithm, rows
from helpers.federation import comparable
from lightning_sparsefl import FedBABU, FedSpa
from lightning_sparsefl.federated.commands.run import Run
from lightning_sparsefl.federated.exchange.encoding import decode_answer, encode_order
from lightning_sparsefl.federated.local.wire_node import answer_bytes, on_device

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
ENCODE = {"wire": "encode"}
SEED = 987654321


class NodeStore:
    """A node's own records, in versions by round; the only thing that it keeps from one order to the next."""

    def __init__(self):
        self.versions = {}

    def get(self, client, version):
        return self.versions.get(client, {}).get(version)

    def put(self, client, packed, version, keep):
        versions = {**self.versions.get(client, {}), version: packed}
        wanted = {version, *(max((v for v in versions if v <= at), default=None) for at in keep)}
        self.versions[client] = {v: record for v, record in versions.items() if v in wanted}


def serve(run, pipe):
    """Answer the orders that arrive, with the algorithm's client hooks, the module and the data."""
    run.node.records = store = NodeStore()
    run.server = run.coordinator = run.scorer = run.cohort = run.server_records = run.node_records = None
    commands = {
        "answer": lambda payload: next(answer_bytes(run.node, [payload]))[0],
        "records": lambda _: {client: versions[max(versions)] for client, versions in store.versions.items()},
        "forget": lambda client: store.versions.pop(client, None) and None,
    }
    while True:
        name, value = pipe.recv()
        try:
            pipe.send(commands[name](value))
        except Exception:
            traceback.print_exc()
            os._exit(1)


class Remote:
    """The parent's end: takes the place of the rank's node and of its records."""

    def __init__(self, run):
        self.codec, self.device, self.data = run.node.codec, run.device, run.data
        self.pipe, child = multiprocessing.Pipe()
        self.process = os.fork()
        if not self.process:
            serve(run, child)
        child.close()
        self.bytes = []

    def ask(self, name, value=None):
        self.pipe.send((name, value))
        return self.pipe.recv()

    def answer(self, orders):
        self.data.client_train_dataloader = None  # the parent keeps the pooled set, and no client's
        for order in orders:
            known = order.message.masks if order.held is not None else None
            self.bytes.append((order.task, encode_order(order, self.codec, known)))
            answer = decode_answer(self.ask("answer", self.bytes[-1][1]), self.codec, order.message)
            update = None if answer.update is None else on_device(answer.update, self.device)
            yield type(answer)(**{**vars(answer), "update": update})

    def fetch(self, versions, plan):
        """Do nothing: the records never leave the node."""

    def settle(self, made):
        """Do nothing: the node has kept them already."""


@pytest.fixture
def piped(monkeypatch):
    """Makes runs work through a pipe; returns the newest run's end of it."""
    remotes = []
    connect = Run._connect

    def with_a_pipe(self):
        connect(self)
        remote = Remote(self)
        remotes.append(remote)
        self.cohort.node = self.cohort.records = remote

    monkeypatch.setattr(Run, "_connect", with_a_pipe)
    yield remotes
    for remote in remotes:
        remote.pipe.close()
        os.kill(remote.process, 9)
        os.waitpid(remote.process, 0)


@every_algorithm
def test_a_run_through_a_pipe_ends_with_the_bytes_of_an_ordinary_one(algorithm, federation, last, piped, request):
    through = federation(algorithm, folder="pipe", federation=ENCODE, seed=SEED)
    remote = piped.pop()
    kept = remote.ask("records")
    tasks = {task for task, _ in remote.bytes}
    piped.append(remote)
    request.getfixturevalue("monkeypatch").undo()
    ordinary = federation(algorithm, folder="ordinary", federation=ENCODE, seed=SEED)
    ours, theirs = last(ordinary), last(through)
    assert {"train", "score"} <= tasks
    assert theirs["records"].pop("nodes") == {}
    assert comparable(kept) == ours["records"].pop("nodes")
    assert theirs == ours
    assert through.summary == ordinary.summary
    for table in ("metrics.csv", "clients.csv"):
        assert rows(through.run_folder / table) == rows(ordinary.run_folder / table)
    assert not any(str(SEED).encode() in payload for _, payload in remote.bytes)  # the seed does not travel


def test_a_node_that_lost_a_record_gets_a_fresh_order_which_is_charged(federation, piped, monkeypatch):
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
    again = [len(payload) for task, payload in piped[-1].bytes if task == "train"]
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
