"""Whole runs whose updates are summed under masks, against plain runs."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from lightning_sparsefl import SCAFFOLD, FedAvg, FedDIP, FederatedAlgorithm, FedPer, FedProx, FedSpa, HeteroFL
from lightning_sparsefl.errors import ClientFailed, InvalidOption
from lightning_sparsefl.federated.commands.run import Run
from lightning_sparsefl.federated.rounds.cohort import RankCohort
from lightning_sparsefl.testing.contents import rows
from lightning_sparsefl.testing.small_federation import SmallFederation

from lightning_sparsefl_flower.secure_sum.local import LocalClients
from lightning_sparsefl_flower.secure_sum.node import SecureNode
from lightning_sparsefl_flower.secure_sum.obstacles import require_summable
from lightning_sparsefl_flower.secure_sum.policy import Policy
from lightning_sparsefl_flower.secure_sum.server import Gone, SecureCollect

POLICY = Policy(threshold=0.5, min_coverage=1)
METHODS = [
    FedAvg(),
    FedProx(),
    FedDIP(density=0.3, reconfigure_every=1),
    FedSpa(search="static", mask_init="same"),
    FedSpa(search="static", mask_init="different"),
    FedPer(),
    HeteroFL(rates=(1.0, 0.5)),
    SCAFFOLD(),
]


@pytest.fixture
def federation(tmp_path):
    """Run a small federation with one client after another, as clients elsewhere train."""
    run = SmallFederation(tmp_path)
    return lambda algorithm, federation=None, **options: run(
        algorithm, federation={"local_engine": "fast", **(federation or {})}, **options
    )


class Secure(RankCohort):
    """A cohort of one process, whose updates are summed under masks; some clients leave in some rounds."""

    gone: frozenset[tuple[int, str]] = frozenset()
    policy = POLICY

    def connect(self, run):
        require_summable(run.algorithm, run.federation, self.policy)
        reducer = run.federation.reducer or run.algorithm.reducer()
        self.secure = SecureNode(run.layout, run.node.codec, reducer, self.policy)
        self.collect = SecureCollect(run.layout, self.policy, self.ask)

    def ask(self, step, payloads):
        replies = LocalClients(dict.fromkeys(payloads, self.secure))(step, payloads)
        return {c: Gone("power cut") if (c, step) in self.gone else reply for c, reply in replies.items()}

    def run(self, plan, order, receive, merge):
        if merge is None:
            return super().run(plan, order, receive, merge)
        list(self._assigned(plan, plan.loads))  # fetches the records of the clients
        orders = [order(client, False) for client in sorted(plan.loads)]
        answers = [self.secure.keep(*pair) for pair in zip(orders, self.node.answer(orders), strict=True)]
        outcomes = self.collect(orders, answers, receive, merge)
        return [replace(outcome, rank=0) for outcome in outcomes]


def securely(run, gone=()):
    """Run with secure sums."""
    connect = Run._connect

    def connected(self):
        connect(self)
        if isinstance(self.cohort, RankCohort):
            self.cohort.__class__ = Secure
            self.cohort.gone = frozenset(gone)
            self.cohort.connect(self)

    with mock.patch.object(Run, "_connect", connected):
        return run()


def state(trainer):
    """The server's state after the last round; the run's identifier is random."""
    content = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    return {"weights": content["state_dict"], "state": content["sparsefl"]["state"]}


def same(one, other):
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


def uplinks(trainer):
    return [int(row["uplink_bytes"]) for row in rows(trainer.run_folder / "clients.csv") if row["trained"] == "1"]


@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
def test_the_run_ends_with_the_bytes_of_the_plain_one(algorithm, federation):
    options = {"capacities": [0.5, 1.0, 0.5, 1.0, 0.5, 1.0]} if isinstance(algorithm, HeteroFL) else {}
    plain = federation(algorithm, federation=options, folder="plain")
    secure = securely(partial(federation, algorithm, federation=options, folder="secure"))
    assert state(plain)["state"]["round"] == 3
    assert same(state(secure), state(plain))
    assert min(uplinks(secure)) > max(uplinks(plain))  # the bytes of the sums are charged


@pytest.mark.parametrize("step", ["share", "mask", "confirm"])
@pytest.mark.parametrize("algorithm", [FedAvg(), FedDIP(density=0.3, reconfigure_every=1)], ids=repr)
def test_a_client_that_drops_out_is_left_out_as_in_a_plain_run(algorithm, step, federation, monkeypatch):
    options = {"on_client_error": "skip"}
    secure = securely(partial(federation, algorithm, federation=options, folder="secure"), {(1, step)})
    train = type(algorithm).train

    def failing(self, message, client):
        if client.id == 1 and step != "confirm":
            raise ClientFailed("power cut", client=1, round=client.round, rank=0)
        return train(self, message, client)

    monkeypatch.setattr(type(algorithm), "train", failing)
    plain = federation(algorithm, federation=options, folder="plain")
    assert same(state(secure), state(plain))
    drawn = [row for row in rows(plain.run_folder / "clients.csv") if row["client"] == "1"]
    assert drawn


def test_a_dropped_client_ends_a_run_that_allows_none(federation):
    with pytest.raises(ClientFailed, match="left the secure sum: power cut"):
        securely(partial(federation, FedAvg()), {(client, "mask") for client in (1,)})


def test_a_refused_method_ends_the_run_at_its_start(federation):
    with pytest.raises(InvalidOption, match="FedSpa uploads what the server keeps of each client"):
        securely(partial(federation, FedSpa()))


def test_a_method_that_says_nothing_of_its_uploads_sends_none(federation, monkeypatch):
    """A method of another author that forgot `uploads_shared`."""
    monkeypatch.setattr(FedSpa, "uploads_shared", False)
    assert issubclass(FedSpa, FederatedAlgorithm)
    with pytest.raises(InvalidOption, match="has `shared`, which a secure sum does not hide"):
        securely(partial(federation, FedSpa()))
