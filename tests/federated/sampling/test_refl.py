"""REFL: draws, runs with late clients on any number of ranks, after a kill, and in a replay; availability."""

from __future__ import annotations

import csv
import math
from collections import Counter

import numpy as np
import pytest
import torch

from lightning_sparsefl import SCAFFOLD, FedAvg, FedBN, Federation, FedP3, FedSpa
from lightning_sparsefl.cost import Availability, Devices
from lightning_sparsefl.errors import InvalidOption, InvalidUpdate
from lightning_sparsefl.federated import REFL, Candidates, CoverageMedian, Oort, Privacy, Seen, Uniform
from lightning_sparsefl.federated.exchange.hashing import fingerprint
from lightning_sparsefl.federated.sampling.client_table import ClientTable
from lightning_sparsefl.models import MLP
from lightning_sparsefl.testing.contents import rows

SLOW = Devices(flops_per_second=1e6, bytes_per_second=1e6)
LATE = {"sampler": REFL(over_select=1.5, target="fixed", rest=0), "devices": SLOW, "capacities": [1.0, 0.5, 0.3]}
"""All six clients are drawn first, of which the last two take two to four rounds."""
ADAPTIVE = {**LATE, "sampler": REFL(over_select=1.5, rest=2)}


def candidates(count=4, round=9, clients=range(10), now=100.0, arrivals=None, available=None):
    return Candidates(round, clients, count, lambda client: 10, lambda client: 1.0, now, arrivals or {}, available)


def state_of(mean=50.0, turns=None):
    """A state in which clients had their last turns in the given rounds."""
    clients = sorted(turns or {})
    table = ClientTable.empty(last=np.int64).updated(np.array(clients, int), last=[turns[client] for client in clients])
    return {"mean": mean, "turns": table.to_plain()}


def turns_of(state):
    return dict(zip(*(values.tolist() for values in state["turns"].values()), strict=True))


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def pending_of(trainer):
    content = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    return content["sparsefl"]["state"]["pending"]


def metrics_of(trainer):
    with open(trainer.run_folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


# ---- the draw


def test_clients_that_will_leave_come_first():
    """Of ten clients, three leave; the forecast is always right, and then always wrong."""
    state = state_of()
    asked = candidates(count=3, available=lambda client, at: at < 150 or client >= 3)
    assert {*REFL(accuracy=1.0).draw(state, asked, rng())} == {0, 1, 2}
    assert {*REFL(accuracy=0.0).draw(state, asked, rng())} < {*range(3, 10)}
    more = candidates(count=5, available=asked.available)
    assert {*REFL(accuracy=1.0).draw(state, more, rng())} > {0, 1, 2}


def test_without_a_trace_the_draw_is_uniform():
    counts = Counter()
    for seed in range(1000):
        counts.update(REFL().draw(state_of(), candidates(), rng(seed)))
    assert all(abs(count - 400) < 70 for count in counts.values())  # 4.5 standard deviations


def test_clients_rest_after_their_turn_and_while_their_update_is_pending():
    state = state_of(turns={0: 4, 1: 5, 2: 8})
    for seed in range(50):
        found = REFL().draw(state, candidates(arrivals={5: 200.0}), rng(seed))
        assert {*found} <= {0, 3, 4, 6, 7, 8, 9}  # round 4 is five rounds ago
    assert {*REFL().draw(state, candidates(count=10, arrivals={5: 200.0}), rng())} == {*range(10)}


def test_without_rest_a_client_has_one_turn_after_the_other():
    """Whereas one that rests is drawn after all others."""
    state = state_of(turns={0: 8})
    for rest, counted in ((0, True), (2, False)):
        found = [REFL(rest=rest).draw(state, candidates(count=9), rng(seed)) for seed in range(30)]
        assert any(0 in clients for clients in found) == counted


@pytest.mark.parametrize(("target", "needed"), [("adaptive", 1), ("half", 2), ("fixed", 4)])
def test_a_round_waits_for_fewer_if_late_updates_are_expected(target, needed):
    sampler, state = REFL(target=target), state_of()
    soon = dict.fromkeys(range(4), 149.0)
    assert sampler.needed(state, candidates(arrivals=soon)) == needed
    assert sampler.needed(state, candidates(arrivals={0: 151.0})) == 4
    assert REFL().needed(state, candidates(arrivals={0: 150.0, 1: 120.0, 2: 151.0})) == 2
    assert REFL().needed(REFL().start(), candidates(now=0.0, arrivals=soon)) == 4


def test_the_mean_duration_by_hand():
    sampler, state = REFL(), REFL().start()
    for round, (seconds, mean) in enumerate([(8.0, 8.0), (4.0, 5.0), (9.0, 8.0)]):
        seen = {round: Seen(10, True, {}, seconds), 7: Seen(10, False, {}, 99.0), 8: Seen(10, True, {}, 1.0)}
        state = sampler.learn(state, candidates(round=round), seen)
        assert state["mean"] == mean
        assert turns_of(state) == {**{i: i for i in range(round + 1)}, 7: round, 8: round}
    unmerged = sampler.learn(state, candidates(round=3), {7: Seen(10, False, {}, 99.0)})
    assert (unmerged["mean"], turns_of(unmerged)[7]) == (8.0, 3)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("rest", [-1, 1.5]),
        ("accuracy", [1.1, "1"]),
        ("memory", [-0.1, math.nan]),
        ("target", ["all"]),
        ("beta", [2.0]),
        ("limit", [0, 1.5]),
        ("over_select", [0.5]),
    ],
)
def test_options(option, values):
    for value in values:
        with pytest.raises(InvalidOption, match=rf"`federation.sampler.{option}` is {value!r}; expected "):
            REFL(**{option: value})


# ---- runs


def test_late_updates_wait_and_arrive(federation):
    """The two slow clients are late in round 0, train in it, and are not drawn until their updates arrive."""
    trainer = federation(FedAvg(), rounds=8, federation=LATE, max_epochs=1)
    table, metrics = rows(trainer.run_folder / "clients.csv"), metrics_of(trainer)
    drawn = {round: [] for round in range(8)}
    for row in table:
        if row["downlink_bytes"]:
            drawn[int(row["round"])].append(row)
    assert [int(row["client"]) for row in drawn[0] if row["trained"] == "0"] == [4, 5]
    late = [row for row in drawn[0] if row["trained"] == "0"]
    assert all(float(row["uplink_bytes"]) > 0 and float(row["flops_train"]) > 0 for row in late)
    assert all(row["local/train_loss"] for row in late)
    arrived = [int(float(row["clients/arrived"])) for row in metrics]
    clocks = [float(row["time/clock"]) for row in metrics]
    assert clocks == pytest.approx([sum(float(m["time/simulated"]) for m in metrics[: i + 1]) for i in range(8)])
    assert arrived[0] == 0
    for row in late:
        client, seconds = int(row["client"]), float(row["flops_train"]) / 3e5 + float(row["uplink_bytes"]) / 1e6
        ends = next(round for round in range(1, 8) if clocks[round] >= seconds)
        assert arrived[ends] > 0
        assert all(client not in {int(each["client"]) for each in drawn[r]} for r in range(1, ends + 1))
    waiting = pending_of(trainer)
    assert len(waiting) == sum(float(row["clients/late"]) for row in metrics) - sum(arrived)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("case", ["fedavg", "adaptive", "memory", "masks"])
def test_late_updates_are_the_same_on_any_number_of_ranks(case, federation, last):
    algorithm = {"memory": FedBN(), "masks": FedSpa()}.get(case, FedAvg())
    options = ADAPTIVE if case == "adaptive" else LATE
    one = federation(algorithm, rounds=5, folder="one", federation=options)
    assert pending_of(one)
    assert sum(float(row["clients/arrived"]) for row in metrics_of(one)) > 0
    for devices in (2, 3):
        several = federation(algorithm, rounds=5, folder=f"{devices}", federation=options, devices=devices)
        assert last(one)["sparsefl"]["state"] == last(several)["sparsefl"]["state"]
        assert last(one)["state_dict"] == last(several)["state_dict"]
        assert last(one)["records"] == last(several)["records"]


def test_a_killed_run_goes_on_with_its_pending_updates(federation, last, monkeypatch):
    options = {**LATE, "wire": "encode", "local_engine": "fast"}
    straight = federation(FedAvg(), rounds=5, folder="straight", federation=options)
    calls, train = [], FedAvg.train

    def dies(self, message, client):
        calls.append(client.id)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return train(self, message, client)

    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "train", dies)
        with pytest.raises(KeyboardInterrupt):
            federation(FedAvg(), rounds=5, folder="resumed", federation=options)
    content = torch.load(next((straight.run_folder.parents[2] / "resumed").rglob("last.ckpt")), weights_only=True)
    assert content["sparsefl"]["state"]["round"] < 3
    assert content["sparsefl"]["state"]["pending"]
    resumed = federation(FedAvg(), rounds=5, folder="resumed", federation=options, ckpt_path="last")
    assert last(resumed) == last(straight)
    assert resumed.summary == straight.summary


def test_a_pending_update_of_another_model_is_refused(federation):
    half = federation(FedAvg(), rounds=1, federation=LATE)
    path = half.run_folder / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    changes = content["sparsefl"]["state"]["pending"][0]["changes"]
    changes["other"] = changes.pop(next(iter(changes)))
    del content["sparsefl"]["checksum"]
    content["sparsefl"]["checksum"] = fingerprint(content)
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"among its pending updates, holds 'other', which the model does not have"):
        federation(FedAvg(), rounds=2, federation=LATE, ckpt_path=str(path))


@pytest.mark.slow
def test_clients_in_a_stack_may_be_late(federation):
    def run(folder, **engine):
        torch.manual_seed(0)
        module = MLP(num_classes=4, sample_shape=(1, 1, 8), hidden=(8,))  # a stack draws other dropout
        return federation(FedAvg(), rounds=4, folder=folder, module=module, federation={**LATE, **engine})

    one, stacked = run("one"), run("stacked", local_engine="stacked")
    assert sum(float(row["clients/arrived"]) for row in metrics_of(stacked)) > 0
    a, b = (torch.load(t.run_folder / "checkpoints" / "last.ckpt", weights_only=True) for t in (one, stacked))
    for name, value in a["state_dict"].items():
        torch.testing.assert_close(b["state_dict"][name], value, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(*(each["sparsefl"]["state"]["pending"] for each in (a, b)), strict=True):
        assert (ours["client"], ours["arrival"]) == (theirs["client"], theirs["arrival"])


def test_replay_of_a_late_client_and_of_a_round_after_it(federation):
    trainer = federation(FedAvg(), rounds=3, federation=ADAPTIVE)
    row = next(r for r in rows(trainer.run_folder / "clients.csv") if r["round"] == "2" and r["downlink_bytes"])
    path = str(trainer.run_folder / "checkpoints" / "previous.ckpt")
    asked = {"verb": "replay", "federation": ADAPTIVE, "rounds": 3, "ckpt_path": path}
    again = federation(FedAvg(), arguments={"client": int(row["client"]), "round": 2}, **asked).summary
    assert again.outcome.metrics["train_loss"] == float(row["local/train_loss"])
    absent = next(
        k
        for k in range(6)
        if str(k)
        not in {
            r["client"] for r in rows(trainer.run_folder / "clients.csv") if r["round"] == "2" and r["downlink_bytes"]
        }
    )
    with pytest.raises(InvalidOption, match=f"`client` is {absent}, which does not train in round 2"):
        federation(FedAvg(), arguments={"client": absent, "round": 2}, **asked)
    first = {**asked, "ckpt_path": None}
    late = federation(FedAvg(), arguments={"client": 5, "round": 0}, **first).summary
    assert late.outcome.client == 5


@pytest.mark.slow
def test_a_late_client_that_fails_leaves_nothing(federation, monkeypatch):
    train = FedAvg.train

    def fails(self, message, client):
        if client.id == 5:
            raise RuntimeError("broken")
        return train(self, message, client)

    monkeypatch.setattr(FedAvg, "train", fails)
    trainer = federation(FedAvg(), rounds=1, federation={**LATE, "on_client_error": "skip"})
    assert [update["client"] for update in pending_of(trainer)] == [4]
    assert float(metrics_of(trainer)[0]["clients/failed"]) == 1


def test_times_are_needed(federation):
    with pytest.raises(
        InvalidOption, match=r"`federation.sampler` is REFL\(.*, but no times of .* devices are not set"
    ):
        federation(FedAvg(), federation={"sampler": REFL()})
    day = Availability(intervals=[[[0, 1]]])
    with pytest.raises(
        InvalidOption, match=r"`federation.availability` is set, but no times of .* devices are not set"
    ):
        federation(FedAvg(), federation={"availability": day})


def test_updates_with_more_than_weights_and_other_reducers_are_refused(federation):
    for sampler in (LATE["sampler"], REFL(over_select=1.0)):  # also before a client is late
        with pytest.raises(InvalidUpdate, match=r"has the `extra` trees \['control'\], .* in a later .* weights only"):
            federation(SCAFFOLD(), federation={**LATE, "sampler": sampler})
    with pytest.raises(InvalidOption, match=r"REFL.* merges late updates into a mean, and the reducer is CoverageMed"):
        federation(FedAvg(), federation={**LATE, "reducer": CoverageMedian()})
    with pytest.raises(InvalidOption, match=r"`federation.sampler` is REFL.*, but FedP3 has clients send more than"):
        federation(FedP3(), federation=LATE)


def test_a_private_run_refuses_late_updates_and_traces():
    private = {"clip_update": 0.5, "privacy": Privacy(noise_multiplier=1.0, delta=1e-3)}
    with pytest.raises(InvalidOption, match=r"`federation.sampler` is REFL.*expected null with `federation.privacy`"):
        Federation(**private, sampler=REFL())
    with pytest.raises(InvalidOption, match=r"`federation.availability` is Avail.* null with `federation.privacy`"):
        Federation(**private, availability=Availability(intervals=[[[0, 1]]]))


# ---- availability


@pytest.mark.slow_after_first
@pytest.mark.parametrize("sampler", [Uniform(), Oort(over_select=1.0), REFL(rest=0)], ids=["Uniform", "Oort", "REFL"])
def test_only_available_clients_are_drawn_and_the_clock_waits_for_them(sampler, federation):
    """Blocks of two clients take turns of 50 s, with 50 s of nobody after them."""
    turns = Availability(intervals=[[[0, 50]], [[50, 100]], [[100, 150]]], period=200)
    devices = Devices(flops_per_second=2e3, bytes_per_second=1e6)
    options = {"sampler": sampler, "devices": devices, "availability": turns}
    trainer = federation(FedAvg(), rounds=30, federation=options, max_epochs=1)
    metrics, seen = metrics_of(trainer), set()
    for number, row in enumerate(metrics):
        started = float(row["time/clock"]) - float(row["time/simulated"])
        before = float(metrics[number - 1]["time/clock"]) if number else 0.0
        block = int((started + 1e-6) % 200 // 50)
        assert block < 3
        waited = started - before > 1e-6
        assert waited == (before % 200 > 150)
        drawn = [r for r in rows(trainer.run_folder / "clients.csv") if r["round"] == str(number)]
        clients = {int(r["client"]) for r in drawn if r["downlink_bytes"]}
        assert clients <= {2 * block, 2 * block + 1}
        seen |= clients
    assert len(seen) > 2


def test_a_trace_resumes_and_must_fit_the_fleet(federation, last):
    turns = Availability(intervals=[[[0, 50]], [[50, 100]], [[100, 150]]], period=200)
    options = {"devices": Devices(flops_per_second=1e3), "availability": turns}
    whole = federation(FedAvg(), rounds=4, folder="whole", federation=options)
    half = federation(FedAvg(), rounds=2, folder="half", federation=options)
    path = str(half.run_folder / "checkpoints" / "last.ckpt")
    rest = federation(FedAvg(), rounds=4, folder="half", federation=options, ckpt_path=path)
    assert last(rest)["sparsefl"]["state"] == last(whole)["sparsefl"]["state"]
    other = {**options, "availability": Availability(intervals=[[[0, 50]]])}
    with pytest.raises(ValueError, match=r"`federation.availability` was .*, and is Availability"):
        federation(FedAvg(), rounds=5, folder="half", federation=other, ckpt_path=path)
    long = Availability(intervals=[[[0, 1]]] * 7)
    with pytest.raises(InvalidOption, match=r"`federation.availability.intervals` is .*at most one list for each of t"):
        federation(FedAvg(), federation={**options, "availability": long})
