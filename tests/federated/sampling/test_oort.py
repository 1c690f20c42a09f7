"""Oort: published numbers, degenerate cases, bad input, and runs."""

from __future__ import annotations

import csv
import math
from collections import Counter

import numpy as np
import pytest
import torch

from helpers.networks import Classifier
from lightning_sparsefl import FedAvg, FedSpa
from lightning_sparsefl.cost import Devices
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import Candidates, Oort, Seen
from lightning_sparsefl.federated.rounds.server import Server
from lightning_sparsefl.federated.sampling.client_table import ClientTable
from lightning_sparsefl.federated.sampling.oort import percentile, scores, utility
from lightning_sparsefl.testing.contents import rows

KNOWN = {0: (10.0, 2, 30.0), 1: (40.0, 9, 50.0), 2: (20.0, 5, 200.0)}
"""Utility, last round and seconds of clients."""
SLOW = Devices(flops_per_second=1e6, bytes_per_second=1e4)
RUN = {"sampler": Oort(over_select=1.25), "devices": SLOW, "capacities": [1.0, 0.5, 0.25]}


def candidates(count=4, round=0, clients=range(10), samples=lambda client: 10, seconds=lambda client: None):
    return Candidates(round, clients, count, samples, seconds)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def state(known, **changes):
    table = ClientTable.empty(utility=float, last=np.int64, seconds=float)
    utility, last, seconds = zip(*known.values(), strict=True)
    table = table.updated(np.array([*known]), utility=utility, last=last, seconds=seconds)
    return {**Oort().start(), "known": table.to_plain(), **changes}


def known_of(state):
    """Utility, last round and seconds of each client, as in `KNOWN`."""
    client, *columns = (values.tolist() for values in state["known"].values())
    return dict(zip(client, zip(*columns, strict=True), strict=True))


def scored(known, round, **options):
    return scores(*map(np.array, zip(*known.values(), strict=True)), round, **options)


def test_scores_by_hand():
    found = scored(KNOWN, 10, preferred=100.0, clip=1.0)
    assert found == pytest.approx([0.3396402, 1.1599509, 0.1370380], abs=5e-8)
    first = (10 - 9.99) / (40 - 9.99) + math.sqrt(0.1 * math.log(10) / 2)
    assert found[0] == pytest.approx(first, rel=1e-12)
    assert scored(KNOWN, 10, preferred=math.inf, clip=1.0)[2] == pytest.approx(4 * found[2], rel=1e-12)
    clipped = scored({**KNOWN, 3: (1000.0, 9, 1.0)}, 10, preferred=math.inf, clip=0.5)  # at the third smallest
    assert clipped[1] == clipped[3]


def test_utilities_and_percentiles_by_hand():
    assert utility(Seen(30, True, {"train_loss_sq": 4.0})) == 60.0
    assert percentile(np.array([3.0, 1.0, 2.0, 4.0]), 50.0) == 3.0
    assert percentile(np.array([3.0, 1.0, 2.0, 4.0]), 99.9) == 4.0
    assert percentile(np.array([3.0, 1.0]), 100.0) == percentile(np.array([]), 10.0) == math.inf


def test_equal_clients_are_drawn_uniformly_without_exploration():
    sampler = Oort(over_select=1.0, exploration=0.0, least_exploration=0.0)
    before = state(dict.fromkeys(range(10), (5.0, 3, 10.0)), epsilon=0.0, least=0.0)
    counts = Counter()
    for seed in range(2000):
        counts.update(sampler.draw(before, candidates(count=4, round=5), rng(seed)))
    assert all(abs(count - 800) < 100 for count in counts.values())  # 4.5 standard deviations


def test_the_first_cohort_is_of_new_clients_in_proportion_to_their_samples():
    sizes = [1000.0, 1000.0, *[10.0] * 98]
    counts = Counter()
    asked = candidates(clients=range(100), samples=sizes.__getitem__)
    for seed in range(400):
        counts.update(Oort().draw(Oort().start(), asked, rng(seed)))
    assert all(client < 20 for client in counts)  # 5 x 4 candidates, by size and then by number
    assert counts[0] > 380
    assert counts[1] > 380


def test_slow_devices_are_asked_for_only_with_a_preferred_time():
    def never(client):
        raise AssertionError

    known = {0: (5.0, 1, 10.0), 1: (5.0, 1, 20.0)}
    for seed in range(5):
        assert len(Oort().draw(state(known), candidates(seconds=never), rng(seed))) == 4
    counts = Counter()
    seconds = [10.0, 20.0, *[5.0] * 4, *[1e6] * 4]
    for seed in range(100):
        before = state(known, threshold=10.0)
        counts.update(Oort(threshold=10.0).draw(before, candidates(seconds=seconds.__getitem__), rng(seed)))
    assert all(counts[client] > 90 for client in (2, 3, 4))
    assert sum(counts[client] for client in (6, 7, 8, 9)) < 10


def test_the_share_of_new_clients_falls_to_its_bound_and_to_zero_at_the_end():
    sampler, before = Oort(), Oort().start()
    seen = {0: Seen(10, True, {"train_loss_sq": 1.0}, 2.0)}
    shares = []
    for round in range(100):
        before = sampler.learn(before, candidates(round=round), seen)
        shares.append(before["epsilon"])
    assert shares[:3] == pytest.approx([0.9 * 0.98, 0.9 * 0.98**2, 0.9 * 0.98**3])
    assert shares[-1] == 0.2
    everyone = state(dict.fromkeys(range(10), (5.0, 3, 10.0)))
    after = sampler.learn(everyone, candidates(round=100), seen)
    assert (after["epsilon"], after["least"]) == (0.0, 0.0)


def test_late_and_failed_clients_get_the_mean_utility_of_the_round():
    before = state({3: (7.0, 1, 5.0)})
    seen = {
        0: Seen(10, True, {"train_loss_sq": 4.0}, 2.0),
        1: Seen(10, True, {"train_loss_sq": 16.0}, 3.0),
        2: Seen(99, False, {}, 50.0),
        3: Seen(99, False, {}, None),
    }
    known = known_of(Oort().learn(before, candidates(round=6), seen))
    assert known == {0: (20.0, 7, 2.0), 1: (40.0, 7, 3.0), 2: (30.0, 7, 50.0), 3: (30.0, 7, 5.0)}


def test_a_client_without_a_loss_gets_the_mean_utility_too():
    seen = {0: Seen(10, True, {"train_loss_sq": 4.0}, 2.0), 1: Seen(99, True, {}, 3.0)}
    assert known_of(Oort().learn(Oort().start(), candidates(), seen)) == {0: (20.0, 1, 2.0), 1: (20.0, 1, 3.0)}
    with pytest.raises(InvalidOption, match="needs the metric 'train_loss_sq'"):
        Oort().learn(Oort().start(), candidates(), {1: seen[1]})


@pytest.mark.parametrize(
    ("old", "new", "threshold", "expected"),
    [
        (10.0, 10.5, 50.0, 55.0),
        (10.0, 12.0, 50.0, 50.0),
        (1.0, 6.5, 50.0, 45.0),
        (1.0, 6.5, 7.0, 5.0),
        (1.0, 1.0, 98.0, 100.0),
    ],
)
def test_the_pacer_moves_the_preferred_time(old, new, threshold, expected):
    """Before round 40, with windows of rounds 0 to 19 and 20 to 39, where round 0 stands for the start."""
    sampler = Oort()
    before = state({0: (new, 1, 1.0)}, threshold=threshold, history=[old] * 20 + [new] * 19)
    seen = {0: Seen(1, True, {"train_loss_sq": new**2}, 1.0)}
    after = sampler.learn(before, candidates(round=38), seen)
    assert after["threshold"] == expected
    assert sampler.learn(before, candidates(round=37), seen)["threshold"] == threshold
    assert len(after["history"]) == 40


def test_a_client_without_a_time_is_not_slow_and_does_not_count_in_the_preferred_time():
    seen = {0: Seen(10, True, {"train_loss_sq": 4.0}, None), 1: Seen(10, True, {"train_loss_sq": 4.0}, 3.0)}
    after = {**Oort().learn(Oort().start(), candidates(), seen), "threshold": 50.0, "epsilon": 0.0, "least": 0.0}
    assert math.isnan(known_of(after)[0][2])
    for seed in range(20):
        assert {*Oort().draw(after, candidates(count=2), rng(seed))} == {0, 1}


@pytest.mark.parametrize(
    "options",
    [
        {"exploration": 1.5},
        {"clip": 0.0},
        {"cut_off": 2.0},
        {"penalty": -1.0},
        {"pacer_step": 0},
        {"pacer_delta": 100.5},
        {"threshold": 100.5},
        {"window": 0.5},
        {"losses": "all"},
    ],
)
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(InvalidOption, match=rf"`federation.sampler.{next(iter(options))}` is "):
        Oort(**options)


# ---- runs


def table(trainer, name="metrics"):
    with open(trainer.run_folder / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def drawn(trainer):
    return [(row["round"], row["client"]) for row in table(trainer, "clients") if row["downlink_bytes"]]


def test_a_run_logs_squared_losses_and_leaves_out_the_slowest(federation):
    for row in table(federation(FedAvg(), rounds=4, federation=RUN)):
        assert float(row["local/train_loss_sq"]) > 0
        assert (float(row["clients/trained"]), float(row["clients/late"])) == (4, 1)
        assert float(row["time/simulated"]) > 0


class LogsSquares(Classifier):
    """Logs the mean of its samples' squared losses itself."""

    def training_step(self, batch, batch_idx):
        losses = torch.nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")
        self.log_dict(
            {"train_loss": losses.mean(), "train_loss_sq": losses.square().mean()}, on_epoch=True, on_step=False
        )
        return losses.mean()


@pytest.mark.parametrize("engine", ["fast", "stacked"])
def test_a_module_may_log_the_squares_of_samples(engine, federation):
    sampler = Oort(over_select=1.0, losses="sample")
    options = {"sampler": sampler, "local_engine": engine}
    for row in table(federation(FedAvg(), rounds=2, module=LogsSquares(), federation=options)):
        assert float(row["local/train_loss_sq"]) >= float(row["local/train_loss"]) ** 2 * 0.999


def test_a_run_without_the_losses_is_refused(federation):
    options = {"sampler": Oort(over_select=1.0, losses="sample")}
    with pytest.raises(InvalidOption, match="Oort, which needs the metric 'train_loss_sq'"):
        federation(FedAvg(), rounds=1, federation=options)


class OwnCosts(FedAvg):
    """FedAvg, whose costs are asked for client by client."""

    def costs(self, facts):
        return super().costs(facts)


def test_expected_times_of_equal_clients_are_made_from_one_message(federation, monkeypatch):
    """In each round the sampler asks for the expected times of all clients that never took part."""
    made, message = [], Server._message
    monkeypatch.setattr(Server, "_message", lambda self, *asked: made.append(asked[-1]) or message(self, *asked))
    options = {**RUN, "sampler": Oort(over_select=1.25, threshold=50.0)}
    each, counts = {}, {}
    for algorithm in (OwnCosts(), FedAvg()):
        made.clear()
        each[algorithm] = federation(algorithm, rounds=3, folder=repr(algorithm), federation=options)
        counts[type(algorithm)] = made.count("train")
    assert counts[FedAvg] < counts[OwnCosts]
    one, other = each.values()
    assert drawn(one) == drawn(other)
    assert rows(one.run_folder / "clients.csv") == rows(other.run_folder / "clients.csv")


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", [FedAvg(), pytest.param(FedSpa(), marks=pytest.mark.slow)], ids=repr)
def test_any_number_of_ranks_draws_the_same_clients(devices, algorithm, federation, last):
    one = federation(algorithm, rounds=4, folder="one", federation=RUN)
    several = federation(algorithm, rounds=4, folder="several", federation=RUN, devices=devices)
    assert last(one) == last(several)
    assert drawn(one) == drawn(several)


def test_a_killed_run_ends_with_the_bytes_of_one_that_was_not(federation, last, monkeypatch):
    whole = federation(FedAvg(), rounds=5, folder="whole", federation=RUN)
    calls, train = [], FedAvg.train

    def dies_in_the_third_round(self, message, client):
        calls.append(client.id)
        if len(calls) == 11:
            raise KeyboardInterrupt
        return train(self, message, client)

    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "train", dies_in_the_third_round)
        with pytest.raises(KeyboardInterrupt):
            federation(FedAvg(), rounds=5, folder="killed", federation=RUN)
    rest = federation(FedAvg(), rounds=5, folder="killed", federation=RUN, ckpt_path="last")
    assert last(rest) == last(whole)
    assert rows(rest.run_folder / "clients.csv") == rows(whole.run_folder / "clients.csv")


def test_the_stacked_engine_trains_the_same_clients_one_by_one(federation):
    fast = federation(FedAvg(), rounds=2, folder="fast", federation=RUN)
    with pytest.warns(UserWarning, match="Clients train one after another, since .* has a LossSquares"):
        stacked = federation(FedAvg(), rounds=2, folder="stacked", federation={**RUN, "local_engine": "stacked"})
    assert drawn(fast) == drawn(stacked)
