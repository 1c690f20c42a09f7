"""Samplers of cohorts: their state, late clients, and what a round tells them."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass

import pytest
import torch

from lightning_sparsefl import FedAvg, Federation
from lightning_sparsefl.cost import Devices
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import Candidates, CohortSampler, Uniform
from lightning_sparsefl.federated.sampling.cohort_draw import CohortDraw
from lightning_sparsefl.federated.sampling.draws import Training, uniform_cohort
from lightning_sparsefl.testing.contents import rows

CAPACITIES = [1.0, 0.5, 0.25]
SLOW = Devices(flops_per_second=1e6, bytes_per_second=1e4)


def candidates(clients=range(10), count=4, round=0):
    return Candidates(round, clients, count, samples=lambda client: 10 * client, seconds=lambda client: None)


@dataclass(frozen=True, kw_only=True)
class LeastSeen(CohortSampler):
    """Draws the clients that were seen least often, and of these the ones with the smallest loss of their last turn."""

    def start(self):
        return {"turns": {}, "losses": {}, "rounds": torch.zeros((), dtype=torch.int64)}

    def draw(self, state, candidates, rng):
        assert int(state["rounds"]) == candidates.round
        noise = torch.rand(1000, generator=rng)

        def rank(client):
            return state["turns"].get(client, 0), state["losses"].get(client, 0.0), float(noise[client])

        return sorted(candidates.clients, key=rank)[: candidates.count]

    def learn(self, state, candidates, seen):
        turns = {**state["turns"], **{client: state["turns"].get(client, 0) + 1 for client in seen}}
        losses = {client: one.metrics["train_loss"] for client, one in seen.items() if one.counted}
        return {"turns": turns, "losses": {**state["losses"], **losses}, "rounds": state["rounds"] + 1}


def cohorts(trainer, trained="1"):
    found = {}
    for row in rows(trainer.run_folder / "clients.csv"):
        if row["trained"] == trained and row["downlink_bytes"]:
            found.setdefault(int(row["round"]), []).append(int(row["client"]))
    return found


def metrics_of(trainer):
    with open(trainer.run_folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_the_default_draws_as_ever_also_where_more_are_drawn():
    for clients in (range(10), Training(12, [3, 7])):
        draw = CohortDraw(clients, 4, seed=5)
        for round in range(5):
            assert draw.draw("", {}, candidates(clients, draw.wanted, round)) == uniform_cohort(5, round, clients, 4)
    wider = CohortDraw(range(10), 4, seed=5, sampler=Uniform(over_select=1.3))
    assert wider.widened(4, 10) == 6
    assert wider.draw("", {}, candidates(count=6)) == uniform_cohort(5, 0, range(10), 6)
    assert CohortDraw(range(5), 4, seed=5, sampler=Uniform(over_select=3.0)).widened(4, 5) == 5
    assert CohortDraw(range(50), 4, seed=5, sampler=Uniform(over_select=10.0)).widened(4, 50) == 40


@pytest.mark.parametrize("found", [[1, 1, 2, 3], [1, 2, 3], [1, 2, 3, 10], [-1, 2, 3, 4], [0, 1, 2, 7]])
def test_a_draw_of_other_clients_than_asked_for_is_refused(found, monkeypatch):
    monkeypatch.setattr(Uniform, "draw", lambda self, state, candidates, rng: found)
    with pytest.raises(InvalidOption, match=r"`federation.sampler` is Uniform.*, which drew .* expected 4"):
        CohortDraw(Training(10, [7]), 4, seed=0).draw("", {}, candidates(Training(10, [7])))


@pytest.mark.parametrize("factor", [0.9, float("nan"), 11.0])
def test_factors_of_over_selection(factor):
    with pytest.raises(InvalidOption, match=r"`federation.sampler.over_select` is .*; expected a number in \[1, 10\]"):
        Uniform(over_select=factor)


def test_the_cohort_follows_from_what_the_sampler_has_learned(federation):
    drawn = cohorts(federation(FedAvg(), rounds=3, federation={"sampler": LeastSeen()}))
    assert set(drawn[0]).isdisjoint(set(range(6)) - set(drawn[0]))
    assert set(range(6)) - set(drawn[0]) < set(drawn[1])  # those that were left out come first


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_the_state_of_a_sampler_is_the_same_on_any_number_of_ranks(devices, federation, last):
    options = {"sampler": LeastSeen(over_select=1.25), "devices": SLOW, "capacities": CAPACITIES}
    one = federation(FedAvg(), rounds=4, folder="one", federation=options)
    several = federation(FedAvg(), rounds=4, folder="several", federation=options, devices=devices)
    assert cohorts(one) == cohorts(several)
    assert last(one)["sparsefl"]["state"] == last(several)["sparsefl"]["state"]


def test_a_resumed_run_draws_as_one_that_was_not_stopped(federation, last):
    options = {"sampler": LeastSeen()}
    whole = federation(FedAvg(), rounds=4, folder="whole", federation=options)
    half = federation(FedAvg(), rounds=2, folder="half", federation=options)
    path = str(half.run_folder / "checkpoints" / "last.ckpt")
    rest = federation(FedAvg(), rounds=4, folder="half", federation=options, ckpt_path=path)
    assert cohorts(rest) == cohorts(whole)
    assert last(rest)["sparsefl"]["state"] == last(whole)["sparsefl"]["state"]


def test_replay_runs_the_rounds_that_a_cohort_depends_on(federation, capfd):
    options = {"sampler": LeastSeen()}
    trainer = federation(FedAvg(), rounds=3, federation=options)
    drawn = cohorts(trainer)
    path = str(trainer.run_folder / "checkpoints" / "previous.ckpt")
    asked = {"verb": "replay", "federation": options, "rounds": 3, "ckpt_path": path}
    again = federation(FedAvg(), arguments={"client": drawn[2][0], "round": 2}, **asked).summary
    assert (again.round, again.outcome.client) == (2, drawn[2][0])
    absent = next(client for client in range(6) if client not in drawn[2])
    with pytest.raises(InvalidOption, match=f"`client` is {absent}, which does not train in round 2"):
        federation(FedAvg(), arguments={"client": absent, "round": 2}, **asked)


def test_late_clients_are_the_slowest_and_pay_for_download_and_flops(federation):
    options = {"sampler": Uniform(over_select=1.5), "devices": SLOW, "capacities": CAPACITIES}
    trainer = federation(FedAvg(), rounds=3, federation=options)
    drawn, late = cohorts(trainer), cohorts(trainer, trained="0")
    table = rows(trainer.run_folder / "clients.csv")
    metrics = metrics_of(trainer)
    charged = {(int(row["round"]), int(row["client"])): row for row in table if row["downlink_bytes"]}
    whole = federation(FedAvg(), rounds=1, folder="whole", federation={"clients_per_round": 6})
    sizes = {int(row["client"]): row["num_examples"] for row in rows(whole.run_folder / "clients.csv")}
    assert all(row["num_examples"] == sizes[client] for (_, client), row in charged.items())
    for round in range(3):
        assert sorted([*drawn[round], *late[round]]) == uniform_cohort(0, round, range(6), 6)
        assert (len(drawn[round]), len(late[round])) == (4, 2)
        seconds = {
            client: float(charged[round, client]["flops_train"]) / (CAPACITIES[client // 2] * 1e6)
            for client in [*drawn[round], *late[round]]
        }
        assert max(seconds[client] for client in drawn[round]) < min(seconds[client] for client in late[round])
        left_out = [charged[round, client] for client in late[round]]
        assert all(float(row["uplink_bytes"]) == float(row["paper_bytes_up"]) == 0 for row in left_out)
        row = metrics[round]
        assert float(row["clients/late"]) == 2
        assert (float(row["clients/trained"]), float(row["clients/failed"])) == (4, 0)
        assert float(row["flops/late"]) == sum(float(each["flops_train"]) for each in left_out) > 0
        assert float(row["comm/late_bytes"]) == sum(float(each["downlink_bytes"]) for each in left_out) > 0
        counted = max(seconds[client] for client in drawn[round])
        assert counted < float(row["time/simulated"]) < counted + 1
        every = [float(charged[key]["flops_train"]) for key in charged if key[0] == round]
        assert float(row["flops/train"]) == pytest.approx(sum(every))


def test_over_selection_without_times_is_refused(federation):
    with pytest.raises(InvalidOption, match=r"`federation.sampler.over_select` is 1.5, but no times .*set `fed"):
        federation(FedAvg(), federation={"sampler": Uniform(over_select=1.5)})
    assert not list(federation.folder.rglob("version_*"))


def test_devices_simulate_the_time_of_any_method(federation):
    row = metrics_of(federation(FedAvg(), rounds=1, federation={"devices": SLOW}))[0]
    assert float(row["time/simulated"]) > 0
    assert "clients/late" not in row
    assert "time/simulated" not in metrics_of(federation(FedAvg(), rounds=1, folder="none"))[0]


def test_a_private_run_refuses_other_samplers(private):
    with pytest.raises(InvalidOption, match=r"`federation.sampler` is LeastSeen.* null with `federation.privacy`"):
        Federation(**private, sampler=LeastSeen())
    assert Federation(**private, sampler=Uniform()).sampler == Uniform()


@pytest.fixture
def private(tmp_path):
    from lightning_sparsefl.federated import Privacy

    return {"clip_update": 0.5, "privacy": Privacy(noise_multiplier=1.0, delta=1e-3)}


def test_another_sampler_is_refused_on_resume(federation):
    half = federation(FedAvg(), rounds=1)
    path = str(half.run_folder / "checkpoints" / "last.ckpt")
    with pytest.raises(ValueError, match=re.escape("`federation.sampler` was None, and is LeastSeen")):
        federation(FedAvg(), rounds=2, federation={"sampler": LeastSeen()}, ckpt_path=path)
