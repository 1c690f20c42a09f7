"""Many clients: whoever is not in the cohort costs nothing, and records on disk change no byte."""

from __future__ import annotations

import csv
import os
import signal
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation, FedSpa
from lightning_sparsefl.cost import Availability
from lightning_sparsefl.data import FederatedBlobs, FederatedBlobsOnDemand
from lightning_sparsefl.federated.fleet import Fleet, LazyClientViews, sizes_fact
from lightning_sparsefl.federated.sampling.draws import Training, split_unseen, uniform_cohort
from lightning_sparsefl.federated.storage.record_database import RecordDatabase
from lightning_sparsefl.federated.storage.safe_load import load_plain
from lightning_sparsefl.federated.storage.sqlite_store import SqliteStore
from lightning_sparsefl.models import MLP
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.types import ClientView

CPU = torch.device("cpu")
MILLION = 1_000_000


class Counted(FederatedBlobsOnDemand):
    """Notes which clients it is asked about."""

    def __init__(self, **options):
        self.asked = {"size": [], "train": [], "test": []}
        super().__init__(num_classes=4, sample_shape=(1, 1, 8), num_pooled=40, seed=0, **options)

    def num_examples(self, client):
        self.asked["size"].append(client)
        return super().num_examples(client)

    def client_train_dataloader(self, client):
        self.asked["train"].append(client)
        return super().client_train_dataloader(client)

    def client_test_dataloader(self, client):
        self.asked["test"].append(client)
        return super().client_test_dataloader(client)


def fit(folder, store="disk", algorithm=None, data=None, ckpt_path=None, rounds=4, callbacks=(), **options):
    torch.manual_seed(0)
    settings = {"clients_per_round": 2, "pictures_every_n_rounds": 0, "store": store}
    trainer = FederatedTrainer(
        algorithm=algorithm or FedSpa(density=0.5),
        federation=Federation(**{**settings, **options}),
        accelerator="cpu",
        devices=1,
        max_rounds=rounds,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=str(folder),
        callbacks=list(callbacks),
        seed=0,
    )
    data = data or FederatedBlobs(num_clients=5, num_train=200, val_fraction=0.2, seed=0)
    module = MLP(num_classes=4, sample_shape=data.sample_shape, hidden=(8,))
    summary = trainer.fit(module, data, ckpt_path)
    return trainer.run_folder, summary


def table(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def outcome(stored_records):
    """Reads all that a run leaves but for times, in comparable form."""
    return partial(_outcome, stored_records)


def _outcome(stored_records, folder):
    content = load_plain(folder / "checkpoints" / "last.ckpt")
    own = content["sparsefl"]
    newest = {
        name: {client: versions[max(versions)] for client, versions in sorted(records.items())}
        for name, records in stored_records(folder).items()
    }
    rows = [*table(folder / "metrics.csv"), *table(folder / "clients.csv")]
    timeless = [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]
    kept = {name: own[name] for name in ("identity", "state", "ledger")}
    return comparable([content["state_dict"], kept, newest, timeless])


def comparable(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    return [comparable(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory, outcome):
    """The slow twin: all records in memory, no interruption."""
    folder, _ = fit(tmp_path_factory.mktemp("ram"), "ram")
    return outcome(folder)


@pytest.mark.parametrize("every", [1, 3])
def test_both_stores_leave_the_same_bytes(tmp_path, in_memory, every, outcome):
    folder, _ = fit(tmp_path, checkpoint_every_n_rounds=every)
    assert outcome(folder) == in_memory
    assert [path.name for path in sorted((folder / "checkpoints" / "clients").iterdir())] == [
        "nodes-000.sqlite",
        "server-000.sqlite",
    ]


@pytest.mark.slow_after_first
@pytest.mark.parametrize("moment", ["inside the file's commit", "before the checkpoint", "after the checkpoint"])
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path, in_memory, moment, monkeypatch, outcome):
    def kill_after(owner, name, calls):
        """The process dies after so many calls."""
        whole, count = getattr(owner, name), []

        def counted(*arguments, **options):
            count.append(1)
            result = whole(*arguments, **options)
            if len(count) == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        monkeypatch.setattr(owner, name, counted)

    child = os.fork()
    if child == 0:
        owner, name, calls = {
            "inside the file's commit": (RecordDatabase, "_insert", 5),
            "before the checkpoint": (SqliteStore, "conclude", 6),
            "after the checkpoint": (SqliteStore, "discard_unreferenced", 6),
        }[moment]
        kill_after(owner, name, calls)
        fit(tmp_path)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    folder, _ = fit(tmp_path, ckpt_path="last")
    assert outcome(folder) == in_memory


def test_a_run_may_change_its_store_when_it_resumes(tmp_path, in_memory, outcome):
    fit(tmp_path, "ram", rounds=4, callbacks=[Stop(2)])
    folder, _ = fit(tmp_path, "disk", ckpt_path="last")
    assert outcome(folder) == in_memory


class Stop(Callback):
    """Stops after some rounds."""

    def __init__(self, rounds):
        self.rounds = rounds

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch + 1 == self.rounds


def test_a_copy_of_a_run_on_disk_stands_alone(tmp_path, in_memory, outcome):
    copies = ModelCheckpoint(dirpath=tmp_path / "copies", filename="{epoch}", save_top_k=-1)
    fit(tmp_path / "a", rounds=4, callbacks=[copies])
    folder, _ = fit(tmp_path / "b", ckpt_path=str(tmp_path / "copies" / "epoch=1.ckpt"))
    state, *_ = outcome(folder)
    assert state == in_memory[0]


@pytest.mark.slow_after_first
@pytest.mark.parametrize("every", [1, 3])
def test_the_selected_round_is_finetuned_from_its_records(tmp_path, every):
    options = {"select": "personal/val_loss_std", "finetune_epochs": 1}
    keys = []
    for store in ("ram", "disk"):
        _, summary = fit(tmp_path, store, rounds=5, checkpoint_every_n_rounds=every, **options)
        keys.append({name: value for name, value in summary.items() if name.startswith(("selected/", "finetuned/"))})
    assert keys[0] == keys[1]
    assert 1 <= keys[0]["selected/round"] < 4


def test_whoever_is_not_drawn_is_never_asked(tmp_path):
    data = Counted(num_clients=MILLION)
    data.eval_split = "test"
    folder, summary = fit(tmp_path, data=data, rounds=2, eval_clients=3, unseen_clients=4)
    rows = table(folder / "clients.csv")
    trained = {int(row["client"]) for row in rows if row["trained"] == "1"}
    seen = {int(row["client"]) for row in rows}
    assert len(trained) == 4
    assert len(seen - trained) == 3 + 3
    assert summary["clients"] == MILLION
    assert summary["clients_scored"] == 3
    first = min(i for i in range(10) if i not in split_unseen(0, MILLION, 4)[1])
    assert set(data.asked["train"]) == trained
    assert set(data.asked["test"]) == (seen - trained) | {0}  # whether there are test sets is asked of the first
    assert set(data.asked["size"]) == seen | {first}
    assert len(data.asked["size"]) < 100
    settings = load_plain(folder / "checkpoints" / "last.ckpt")["sparsefl"]["identity"]["training"]
    assert settings["client sizes"] == "SpreadSizes(clients=1000000, fewest=20, most=60, seed=0)"
    assert (folder / "checkpoints" / "last.ckpt").stat().st_size < 50_000


# ---- draws and facts


@pytest.mark.parametrize("count", [1, 2, 7, 300, 40_000, MILLION])
def test_a_cohort_is_the_front_of_a_whole_permutation(count):
    for round_ in range(3):
        whole = torch.randperm(count, generator=generator(5, round_, "cohort"))
        drawn = uniform_cohort(5, round_, range(count), 300)
        assert drawn == sorted(whole[:300].tolist())


def test_who_trains_is_told_from_who_does_not():
    for unseen in ([], [0], [9], [0, 1, 2], [3, 5, 6, 9], list(range(10))):
        slow = [client for client in range(10) if client not in unseen]
        fast = Training(10, unseen)
        assert list(fast) == slow
        assert fast[1:4] == slow[1:4]
        assert [fast[-place] for place in range(1, len(fast) + 1)] == slow[::-1]


def test_capacities_are_those_of_a_list():
    for shuffle in (False, True):
        federation = Federation(capacities=[0.25, 0.5, 1.0], shuffle_capacities=shuffle)
        dealt = [0.25] * 4 + [0.5] * 4 + [1.0] * 4
        order = torch.randperm(12, generator=generator(3, "capacities")) if shuffle else range(12)
        capacities = federation.fleet_capacities(12, seed=3)
        assert [capacities[client] for client in range(12)] == [dealt[place] for place in order]


def test_epochs_and_times_follow_the_order_of_the_capacities():
    order = torch.randperm(12, generator=generator(3, "capacities"))
    for capacities in (None, [0.25, 1.0]):
        times = Availability(intervals=[[[0, 1]], [[1, 2]]], period=2)
        federation = Federation(
            capacities=capacities, local_epochs=[1, 2, 3], availability=times, shuffle_capacities=True
        )
        epochs, intervals = federation.fleet_epochs(12, seed=3), federation.fleet_intervals(12, seed=3)
        assert [epochs[client][0] for client in range(12)] == [1 + int(place) // 4 for place in order]
        assert [intervals[client] for client in range(12)] == [times.intervals[int(place) // 6] for place in order]


def test_views_are_made_when_they_are_looked_at():
    made = []

    def view(client):
        made.append(client)
        return ClientView(client, client + 1, 1.0, 0, 3, 7)

    fleet = Fleet(LazyClientViews(range(10, 10 + MILLION), view), frozenset(), CPU)
    assert (len(fleet), fleet.seed, fleet.max_rounds) == (MILLION, 7, 3)
    assert [v.id for v in fleet.views[5:7]] == [15, 16]
    assert made == [10, 10, 15, 16]


def test_sizes_of_many_clients_become_a_short_fact():
    class Data:
        def __init__(self, sizes):
            self.client_sizes, self.num_clients = sizes, len(sizes)

        def num_examples(self, client):
            return self.client_sizes[client]

    many = [7] * 5000
    assert sizes_fact(Data([3, 4])) == [3, 4]
    assert sizes_fact(Data(many)) == sizes_fact(Data(tuple(many)))
    assert sizes_fact(Data(many)) != sizes_fact(Data([*many[:-1], 8]))
    assert len(sizes_fact(Data(many))) < 50


def test_fedavg_profile_of_a_million_clients_asks_for_no_list():
    data = FederatedBlobsOnDemand(num_clients=2000, num_classes=4, sample_shape=(1, 1, 8), seed=0)
    trainer = FederatedTrainer(algorithm=FedAvg(), max_rounds=2, accelerator="cpu", logger=False, seed=0)
    assert trainer.profile(MLP(num_classes=4, sample_shape=(1, 1, 8), hidden=(8,)), data).content["rounds"] == 2
