"""What every exported federated algorithm promises; a new one is tested by being exported."""

import csv
import dataclasses
import inspect
import pickle
import re
import sys

import pytest
import torch

from lightning_sparsefl import algorithms
from lightning_sparsefl.federated import FederatedAlgorithm
from lightning_sparsefl.wire import Codec, load_sparse

ALGORITHMS = [getattr(algorithms, name) for name in algorithms.__all__]
NARROW = {algorithms.SplitMix: {"bases": 2}}
"""Options for the 16 hidden units of the contracts' module, where the default leaves too little to learn with."""
VARIANTS = [
    *(algorithm(**NARROW.get(algorithm, {})) for algorithm in ALGORITHMS),
    algorithms.FedSpa(search="static", mask_init="different", layer_density="uniform", density=0.3),
    algorithms.FedSpa(mask_init="different", growth="random", merge="count", mask_pool="all"),
    algorithms.FedLPS(ratio="fixed", refresh="round", reduction="mean"),
    algorithms.FedLPS(ratio="capacity", pattern="rolling", dynamic=True, mu=0.1),
    algorithms.FedDIP(density=0.3, initial_density=1.0, reconfigure_every=1, penalty=0.01, mu=0.1, recover=False),
    algorithms.HeteroFL(rates=(0.5,), label_mask=True),
    algorithms.PerFedMask(base=algorithms.HeteroFL(rates=(0.5,))),
    algorithms.PerFedMask(base=algorithms.SplitMix(bases=2)),
]

every_algorithm = pytest.mark.parametrize("algorithm", [kind() for kind in ALGORITHMS], ids=lambda a: type(a).__name__)
every_variant = pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)


@every_algorithm
def test_is_a_frozen_value_of_hyper_parameters(algorithm):
    assert isinstance(algorithm, FederatedAlgorithm)
    assert type(algorithm).__bases__ == (FederatedAlgorithm,)
    assert dataclasses.is_dataclass(algorithm)
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
        algorithm.anything = 1
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    assert eval(repr(algorithm), vars(algorithms)) == algorithm


@every_algorithm
def test_says_what_it_is_and_where_it_departs(algorithm):
    module = inspect.getmodule(type(algorithm))
    assert re.search(r"arXiv:\d{4}\.\d{5}|Table \d", module.__doc__)
    assert "Departures" in module.__doc__
    source = inspect.getsource(type(algorithm))
    for field in dataclasses.fields(algorithm):  # each option has help on the command line
        assert re.search(rf'    {field.name}: .*\n    """', source), field.name


@every_variant
def test_learns(algorithm, federation):
    untrained = federation(algorithm, verb="validate")
    trained = federation(algorithm, rounds=8, num_train=1000)
    assert trained.summary["personal/val_acc"] > untrained.summary["personal/val_acc"] + 0.2


@every_variant
def test_several_ranks_give_the_bytes_of_one(algorithm, federation, last):
    """Other ways of starting them: test_ranks.py."""
    one = federation(algorithm, folder="one")
    for devices, placement, store in ((2, "static", "ram"), (3, "dynamic", "disk")):
        options = {"placement": placement, "store": store}
        run = federation(algorithm, devices=devices, folder=placement, federation=options)
        assert last(run) == last(one)
        assert run.summary == one.summary
        for table in ("metrics.csv", "clients.csv"):
            assert rows(run.run_folder / table) == rows(one.run_folder / table)


@every_variant
def test_encoding_every_message_changes_nothing(algorithm, federation, last, monkeypatch):
    counted = last(federation(algorithm, folder="count"))
    lengths = {"message": [], "update": []}
    for kind in lengths:
        encode = getattr(Codec, f"encode_{kind}")

        def spy(self, *args, encode=encode, kind=kind):
            payload = encode(self, *args)
            lengths[kind].append((len(payload), getattr(self, f"{kind}_size")(*args).total))
            return payload

        monkeypatch.setattr(Codec, f"encode_{kind}", spy)
    assert last(federation(algorithm, folder="encode", federation={"wire": "encode"})) == counted
    assert len(lengths["message"]) == len(lengths["update"]) == 12
    assert all(length == size for pairs in lengths.values() for length, size in pairs)


@every_variant
def test_stop_and_resume_equals_the_straight_run(algorithm, federation, last, monkeypatch):
    straight = federation(algorithm, rounds=4, folder="straight")
    calls = []
    train = type(algorithm).train

    def dies_in_the_third_round(self, message, client):
        calls.append(client.id)
        if len(calls) == 11:
            raise KeyboardInterrupt
        return train(self, message, client)

    with monkeypatch.context() as patch:
        patch.setattr(type(algorithm), "train", dies_in_the_third_round)
        with pytest.raises(KeyboardInterrupt):
            federation(algorithm, rounds=4, folder="resumed")
    resumed = federation(algorithm, rounds=4, folder="resumed", ckpt_path="last")
    assert resumed.run_folder.name == "version_0"
    assert last(resumed) == last(straight)
    assert resumed.summary == straight.summary
    for table in ("metrics.csv", "clients.csv"):
        assert rows(resumed.run_folder / table) == rows(straight.run_folder / table)


def rows(path):
    """A table without its timings."""
    with path.open() as file:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]


@every_algorithm
def test_a_real_trainer_per_client_gives_the_same_bytes(algorithm, federation, last):
    fast = last(federation(algorithm, rounds=2, folder="fast", federation={"local_engine": "fast"}))
    assert last(federation(algorithm, rounds=2, folder="stock", federation={"local_engine": "trainer"})) == fast


@every_variant
def test_a_client_that_fails_is_left_out(algorithm, federation, monkeypatch):
    train = type(algorithm).train

    def fails_for_one(self, message, client):
        if client.id == 1:
            raise ValueError("no luck")
        return train(self, message, client)

    monkeypatch.setattr(type(algorithm), "train", fails_for_one)
    trainer = federation(algorithm, federation={"on_client_error": "skip"})
    table = rows(trainer.run_folder / "clients.csv")
    failed = [row for row in table if row["client"] == "1" and row["failure"]]
    assert failed
    assert all(row["trained"] == "0" and row["failure"] == "ValueError: no luck" for row in failed)
    assert sum(float(row["clients/failed"]) for row in rows(trainer.run_folder / "metrics.csv")) == len(failed)


@every_algorithm
def test_what_is_exported_loads_into_the_users_module_and_scores_as_in_the_run(algorithm, federation):
    trainer = federation(algorithm, rounds=2)
    scored = {row["client"]: row for row in rows(trainer.run_folder / "clients.csv") if row["round"] == "1"}
    for client in (None, 1):
        arguments = {"client": client, "check": True}
        exported = federation(algorithm, rounds=2, verb="export", ckpt_path="last", arguments=arguments).summary
        expected = trainer.summary["global/val_acc"] if client is None else float(scored["1"]["personal/val_acc"])
        assert exported.scores == {name: {"val_acc": expected} for name in ("in memory", "ckpt", "safetensors")}
        state = torch.load(exported.files["ckpt"], weights_only=True)["state_dict"]
        module = federation.module()
        changed = state.keys() != module.state_dict().keys()
        assert changed == any("call `algorithm.adapt(module)`" in note for note in exported.notes)
        if changed:
            algorithm.adapt(module)
            module.load_state_dict(state, strict=True)
        else:
            module = federation.module.load_from_checkpoint(exported.files["ckpt"], weights_only=True)
        sparse = load_sparse(exported.files["safetensors"])
        assert all(torch.equal(sparse[name], value) for name, value in module.state_dict().items())


def test_the_twins_cover_every_algorithm():
    """A method without a slow twin is not finished."""
    path = sys.modules[__name__].__file__.replace("contract/test_algorithms.py", "reference/test_algorithm_twins.py")
    with open(path) as file:
        text = file.read()
    assert all(kind.__name__ in text for kind in ALGORITHMS)
