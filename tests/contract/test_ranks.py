"""Any number of ranks, started in any way, ends with the bytes of one, or with an error that names the round."""

import csv
import runpy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_sparsefl import FedAvg, algorithms
from lightning_sparsefl.errors import RanksDisagree
from lightning_sparsefl.federated.distributed.rank_consistency import check_ranks_agree
from lightning_sparsefl.federated.exchange.hashing import checksum
from lightning_sparsefl.federated.rounds.cohort import RankCohort
from lightning_sparsefl.types import ServerState

RANKS = Path(__file__).parents[1] / "stress" / "ranks.py"
WAYS = {
    "popen": ("popen 2", "popen 3"),
    "torchrun": ("torchrun 1", "torchrun 3"),
    "torchrun, 2 nodes": ("torchrun, 2 nodes of 1",),
    "slurm": ("slurm, 2 nodes of 1",),
    "workers": ("fork, 2 workers on a device",),
}
"""Two and three forked ranks: test_algorithms.py."""


def spread(cases, placements):
    """Every algorithm with both placements, each in another way, and both placements in every launch."""
    plan, ways = {launch: [] for launches in WAYS.values() for launch in launches}, list(WAYS.values())
    for number, case in enumerate(cases):
        for shift, placement in enumerate(placements):
            launches = ways[(number + 2 * shift) % len(ways)]
            plan[launches[number // len(ways) % len(launches)]].append((case, placement))
    return plan


CASES = [*algorithms.__all__, "extra trees"]
PLAN = spread(CASES, ("static", "dynamic"))
SCRIPT = runpy.run_path(str(RANKS))


def test_the_plan_has_every_algorithm_in_two_ways_with_both_placements():
    assert [type(SCRIPT["CASES"][name]).__name__ for name in algorithms.__all__] == algorithms.__all__
    assert SCRIPT["PLACEMENTS"] == ("static", "dynamic")
    assert all({placement for _, placement in runs} == {"static", "dynamic"} for runs in PLAN.values())
    assert len({run for runs in PLAN.values() for run in runs}) == 2 * len(CASES)
    assert sum(map(len, PLAN.values())) == 2 * len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("launch", PLAN)
def test_every_way_of_starting_ranks_gives_the_bytes_of_one(launch):
    """A selection; tests/stress/ranks.py runs all combinations, with more options of the algorithms."""
    (result,) = SCRIPT["compare"]({launch: PLAN[launch]}, rounds=2)
    assert result["runs"] == len(PLAN[launch])
    assert result["launches"][launch]["differences"] == []
    marks = [case["weights"] for case in result["one rank"].values()]
    # a comparison of constants would see nothing; some methods have the server of another, as Ditto has FedAvg's
    assert len(set(marks)) > len(marks) // 2


class Noted(FedAvg):
    """Each client leaves a note of where it was trained."""

    notes = None

    def train(self, message, client):
        rank = dist.get_rank() if dist.is_initialized() else 0
        (self.notes / f"{client.round} {rank} {client.id}").touch()
        return super().train(message, client)


def test_a_slow_rank_is_given_less_without_a_change_of_a_byte(federation, last, tmp_path, monkeypatch):
    before = RankCohort._stack

    def by_a_clock_of_ours(self, *args):
        return [
            replace(outcome, elapsed=outcome.charge.flops_train * (9.0 if outcome.rank else 1.0))
            if outcome.charge
            else outcome
            for outcome in before(self, *args)
        ]

    monkeypatch.setattr(RankCohort, "_stack", by_a_clock_of_ours)
    runs = {}
    for devices in (1, 2):
        Noted.notes = tmp_path / f"notes {devices}"
        Noted.notes.mkdir()
        runs[devices] = federation(Noted(), devices=devices, folder=str(devices))
    assert last(runs[2]) == last(runs[1])
    clients = Counter(tuple(map(int, note.name.split()[:2])) for note in Noted.notes.iterdir())
    assert clients[0, 1] == 2
    assert clients[2, 1] < 2
    tables = {}
    for devices, run in runs.items():
        with (run.run_folder / "metrics.csv").open() as file:
            tables[devices] = list(csv.DictReader(file))
    assert all(row["time/idle"] == "0.0" and "time/idle/rank_0" not in row for row in tables[1])
    first = {name: float(value) for name, value in tables[2][0].items() if name.startswith("time/idle")}
    assert first["time/idle"] == (first["time/idle/rank_0"] + first["time/idle/rank_1"]) / 2
    assert min(first.values()) >= 0


class FakeRanks:
    """What the processes would see, each with its server."""

    size = 2
    waited = 0.5

    def __init__(self, others):
        self.others = others

    def gather(self, value):
        return [*self.others, value]


def server(**changed):
    state = {"weights": {"w": torch.ones(3)}, "masks": {}, "extra": {"plan": {"rounds": torch.tensor(3)}}}
    return ServerState(round=5, **{**state, **changed})


def seen_by_the_first(state, observed=None):
    sent = []
    ranks = FakeRanks([])
    ranks.gather = lambda value: sent.append(value) or [value]
    check_ranks_agree(state, observed or {}, ranks)
    return sent


@pytest.mark.parametrize(
    ("part", "changed", "observed"),
    [
        ("weights", {"weights": {"w": torch.tensor([1.0, 1.0, 1.0 + 2**-23])}}, {}),
        ("weights", {"weights": {"w": torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)}}, {}),
        ("weights", {"weights": {"v": torch.ones(3)}}, {}),
        ("masks", {"masks": {"w": torch.tensor([True, True, False])}}, {}),
        ("extra", {"extra": {"plan": {"rounds": torch.tensor(4)}}}, {}),
        ("shared", {}, {7: {"pulls": 2}}),
    ],
)
def test_a_rank_with_another_server_is_named_with_the_round_and_the_part(part, changed, observed):
    first = seen_by_the_first(server())
    assert check_ranks_agree(server(), {}, FakeRanks(first)) == [0.5, 0.5]
    with pytest.raises(RanksDisagree, match=f"After round 4 the server's {part} on rank 1") as caught:
        check_ranks_agree(server(**changed), observed, FakeRanks(first))
    assert (caught.value.parts, caught.value.round, caught.value.rank) == ((part,), 4, 1)


def test_every_bit_and_every_name_is_in_the_fingerprint():
    g = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2**31, (50,), generator=g, dtype=torch.int32)
    whole = checksum({"a": values})
    for place in range(50):
        for bit in (0, 13, 30):
            flipped = values.clone()
            flipped[place] ^= 1 << bit
            assert checksum({"a": flipped}) != whole
    assert checksum({"b": values}) != whole
    assert checksum({"a": values.view(5, 10)}) != whole
    assert checksum({"a": values.view(5, 10).T}) != checksum({"a": values.view(10, 5)})
    assert checksum([1, None, "x", True]) != checksum([1, None, "x", False])
    assert checksum(torch.zeros((), dtype=torch.bfloat16)) != checksum(torch.ones((), dtype=torch.bfloat16))


class Astray(FedAvg):
    """From round 1 on, the last rank's server is another one, by a single bit."""

    def aggregate(self, server, merged):
        state = super().aggregate(server, merged)
        if state.round == 1 and dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1:
            next(iter(state.weights.values())).view(torch.int32).view(-1)[0] ^= 1
        return state


def test_a_run_whose_ranks_part_ways_ends_with_the_round_and_without_committing_it(federation, tmp_path):
    with pytest.raises(Exception, match="After round 1 the server's weights on rank 2 differ from those on rank 0"):
        federation(Astray(), devices=3, rounds=4)
    last = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=True)
    assert last["sparsefl"]["state"]["round"] == 1
