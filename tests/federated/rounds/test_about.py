"""Facts of clients that differ between clients and rounds: local epochs, and capacities."""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import pytest

from lightning_sparsefl import FederatedTrainer, Federation, HeteroFL, PerFedMask
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import FederatedAlgorithm
from lightning_sparsefl.federated.rounds.about import AboutClients
from lightning_sparsefl.federated.sampling.draws import uniform_cohort
from lightning_sparsefl.testing.contents import rows

ROUNDS = range(300)


def about(num_clients=4, seed=0, **options):
    return AboutClients(Federation(**options), [10, 20, 30, 40].__getitem__, num_clients, seed)


def test_local_epochs_are_spread_over_blocks_of_clients():
    clients = about(local_epochs=[4, 2])
    assert [[clients.of(client, round).local_epochs for client in range(4)] for round in (0, 7)] == [[4, 4, 2, 2]] * 2
    assert about().of(0, 0).local_epochs is None
    assert [about(local_epochs=[1, 2, 3, 4]).of(client, 0).local_epochs for client in range(4)] == [1, 2, 3, 4]


def test_local_epochs_of_a_range_are_drawn_with_both_ends_from_seed_round_and_client():
    clients, again, other = (about(local_epochs=[3, (2, 5)], seed=seed) for seed in (0, 0, 1))
    drawn = [clients.of(2, round).local_epochs for round in ROUNDS]
    counted = Counter(drawn)
    assert set(counted) == {2, 3, 4, 5}
    assert all(50 < count < 100 for count in counted.values())
    assert drawn == [again.of(2, round).local_epochs for round in reversed(ROUNDS)][::-1]
    assert drawn != [clients.of(3, round).local_epochs for round in ROUNDS]
    assert drawn != [other.of(2, round).local_epochs for round in ROUNDS]
    assert {clients.of(0, round).local_epochs for round in ROUNDS} == {3}


def test_local_epochs_follow_the_order_of_shuffled_capacities():
    clients = about(capacities=[0.25, 1.0], local_epochs=[2, 4], shuffle_capacities=True, seed=1)
    facts = [clients.of(client, 0) for client in range(4)]
    assert sorted(fact.capacity for fact in facts) == [0.25, 0.25, 1.0, 1.0]
    assert [fact.capacity for fact in facts] != [0.25, 0.25, 1.0, 1.0]
    assert all(fact.local_epochs == (2 if fact.capacity == 0.25 else 4) for fact in facts)


@pytest.mark.parametrize("epochs", [[0], [1.5], [True], [[2, 1]], [[1, 2, 3]], [[0, 1]], ["1"]])
def test_local_epochs_that_are_no_numbers_or_ranges_are_refused(epochs):
    with pytest.raises(InvalidOption, match=r"`federation.local_epochs` is .*whole numbers >= 1, or pairs"):
        Federation(local_epochs=epochs)
    with pytest.raises(InvalidOption, match=r"`federation.local_epochs` has 5 numbers; expected one for each of the 4"):
        Federation(local_epochs=[1] * 5, clients_per_round=2).check_fleet(4)


def test_entries_of_local_epochs_are_drawn_anew():
    options = {"local_epochs": [[1, 2], 9, 9, 9], "redraw_local_epochs": True}
    clients, other = (about(**options, seed=seed) for seed in (0, 1))
    drawn = [clients.of(0, round).local_epochs for round in ROUNDS]
    counted = Counter(drawn)
    assert set(counted) == {1, 2, 9}
    assert 0.65 < counted[9] / len(drawn) < 0.85
    assert 0.6 < counted[1] / counted[2] < 1.6
    assert drawn != [clients.of(1, round).local_epochs for round in ROUNDS]
    assert drawn != [other.of(0, round).local_epochs for round in ROUNDS]
    with pytest.raises(InvalidOption, match=r"`federation.local_epochs` is None; expected a list to draw from with"):
        Federation(redraw_local_epochs=True)


def test_capacities_are_drawn_anew_from_seed_round_and_client():
    options = {"capacities": [0.25, 0.5, 1.0], "redraw_capacities": True}
    clients, again, other = (about(**options, seed=seed) for seed in (0, 0, 1))
    drawn = [clients.of(0, round).capacity for round in ROUNDS]
    counted = Counter(drawn)
    assert set(counted) == {0.25, 0.5, 1.0}
    assert all(75 < count < 125 for count in counted.values())
    assert drawn == [again.of(0, round).capacity for round in reversed(ROUNDS)][::-1]
    assert drawn != [clients.of(1, round).capacity for round in ROUNDS]
    assert drawn != [other.of(0, round).capacity for round in ROUNDS]
    with pytest.raises(InvalidOption, match=r"`federation.capacities` is None; expected a list of levels to draw from"):
        Federation(redraw_capacities=True)


def test_a_method_that_plans_by_capacity_refuses_those_that_are_drawn_anew():
    redrawn = Federation(capacities=[0.5, 1.0], redraw_capacities=True)
    with pytest.raises(InvalidOption, match=r"`federation.redraw_capacities` is True, but PerFedMask plans"):
        FederatedTrainer(algorithm=PerFedMask(), federation=redrawn, logger=False)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_heterofl_trains_at_the_capacities_of_the_round(devices, federation):
    options = {"capacities": [0.25, 0.5, 1.0], "redraw_capacities": True}
    trainer = federation(HeteroFL(rates=(1.0, 0.5, 0.25)), rounds=3, federation=options, devices=devices)
    clients = AboutClients(Federation(**options), lambda client: 0, 6, trainer.seed)
    trained = [row for row in rows(trainer.run_folder / "clients.csv") if row["trained"] == "1"]
    sizes, widths = defaultdict(set), defaultdict(set)
    for row in trained:
        capacity = clients.of(int(row["client"]), int(row["round"])).capacity
        sizes[capacity].add(float(row["paper_bytes_down"]))
        widths[row["client"]].add(capacity)
    assert len(trained) == 12
    assert sorted(sizes) == [0.25, 0.5, 1.0]
    assert max(sizes[0.25]) < min(sizes[0.5]) <= max(sizes[0.5]) < min(sizes[1.0])
    assert all(len(size) == 1 for size in sizes.values())
    assert max(len(drawn) for drawn in widths.values()) > 1


@dataclass(frozen=True, kw_only=True)
class CountsSteps(FederatedAlgorithm):
    """Keeps for each client the steps of its last fit, its samples, and the facts that its costs depended on."""

    def train(self, message, client):
        result = client.fit(message.weights)
        seen = {"steps": result.steps, "samples": client.num_examples, "told": client.local_epochs}
        return replace(super().train(message, client), weights=result.weights, shared=seen)

    def costs(self, facts):
        return replace(super().costs(facts), flops_paper=float(facts.epochs))


@pytest.mark.parametrize("engine", ["fast", "trainer", "stacked"])
def test_clients_train_and_pay_for_their_own_epochs(engine, federation, stored_records):
    options = {"local_epochs": [1, [2, 3], 5], "local_engine": engine}
    trainer = federation(CountsSteps(), rounds=2, federation=options)
    records = stored_records(trainer.run_folder)["server"]
    clients = AboutClients(Federation(**options), lambda client: 0, 6, trainer.seed)
    for client, versions in records.items():
        version = max(versions)
        seen = versions[version]["shared"]
        assert seen["told"] == clients.of(client, version - 1).local_epochs
        assert seen["steps"] == seen["told"] * (seen["samples"] // 8)
    cohorts = [(client, round) for round in range(2) for client in uniform_cohort(trainer.seed, round, range(6), 4)]
    assert len(records) == len({client for client, _ in cohorts})
    paid = sum(clients.of(client, round).local_epochs for client, round in cohorts)
    assert trainer.summary["flops/paper_total"] == paid
