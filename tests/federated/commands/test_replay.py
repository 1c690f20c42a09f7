"""Replay of rounds from the checkpoints of a run; a failed fit is replayed in rounds/test_failures.py."""

import re

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_sparsefl import FedAvg, FedSpa, Local
from lightning_sparsefl.errors import ClientFailed, InvalidOption
from lightning_sparsefl.federated.local.stacked.worker import StackedWorker


@pytest.mark.parametrize("store", ["ram", "disk"])
def test_a_finished_run_repeats_its_last_round_from_the_previous_checkpoint(store, federation, tmp_path):
    options = {"federation": {"store": store}, "arguments": {"client": 99}}
    run = federation(FedSpa(density=0.5), federation={"store": store})
    norms = []
    for ckpt_path, round in ((run.run_folder, None), (run.run_folder / "checkpoints" / "last.ckpt", 2)):
        options["arguments"] = {"client": 99, "round": round}
        with pytest.raises(InvalidOption, match="does not train in round 2") as refused:
            federation(FedSpa(density=0.5), verb="replay", ckpt_path=str(ckpt_path), **options)
        client = int(re.findall(r"\d+", str(refused.value))[-1])
        options["arguments"] = {"client": client, "round": round}
        again = federation(FedSpa(density=0.5), verb="replay", ckpt_path=str(ckpt_path), **options).summary
        assert again.round == 2
        norms.append(again.norm)
    assert norms[0] == norms[1] > 0


def test_an_earlier_round_needs_a_checkpoint_that_was_kept(federation, tmp_path):
    kept = ModelCheckpoint(tmp_path / "kept", filename="{epoch}", save_top_k=-1)
    run = federation(FedSpa(density=0.5), callbacks=[kept])
    arguments = {"client": 99, "round": 1}
    with pytest.raises(InvalidOption, match=r"`round` is 1, .* are: 2; .*`ModelCheckpoint\(save_top_k=-1\)`"):
        federation(FedSpa(density=0.5), verb="replay", ckpt_path=str(run.run_folder), arguments=arguments)
    early = str(tmp_path / "kept" / "epoch=0.ckpt")
    with pytest.raises(InvalidOption, match="does not train in round 1") as refused:
        federation(FedSpa(density=0.5), verb="replay", ckpt_path=early, arguments=arguments)
    arguments["client"] = int(re.findall(r"\d+", str(refused.value))[-1])
    again = federation(FedSpa(density=0.5), verb="replay", ckpt_path=early, arguments=arguments).summary
    assert again.round == 1


@pytest.mark.filterwarnings("ignore:Clients train one after another, since each has a time limit")
def test_a_client_that_had_a_time_limit_trains_alone_again(federation, monkeypatch):
    monkeypatch.delattr(StackedWorker, "_fit_stack")
    options = {"clients_per_round": 6, "local_engine": "stacked", "client_timeout": 100.0}
    folder = str(federation(FedAvg(), federation=options).run_folder)
    options = {"federation": options, "arguments": {"client": 0}}
    assert federation(FedAvg(), verb="replay", ckpt_path=folder, **options).summary.norm > 0


@pytest.mark.parametrize(("algorithm", "merges"), [(FedAvg(), True), (Local(), False)], ids=["FedAvg", "Local"])
def test_the_table_has_votes_where_weights_are_sent(algorithm, merges, federation):
    options = {"clients_per_round": 6}
    run = federation(algorithm, rounds=2, federation=options)
    arguments = {"client": 0}
    path = str(run.run_folder)
    again = federation(algorithm, verb="replay", ckpt_path=path, federation=options, arguments=arguments, rounds=2)
    names = [name for name, _ in again.summary.rows()]
    assert ("weights it votes on" in names, "norm of the update (weights)" in names) == (merges, merges)
    assert names[-3:] == ["bytes down", "bytes up", "seconds"]


class StopAfterTwo(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch == 1


@pytest.mark.parametrize(
    ("fit", "last"),
    [
        ({"rounds": 6, "federation": {"checkpoint_every_n_rounds": 4}}, 5),
        ({"rounds": 6, "callbacks": [StopAfterTwo()]}, 1),
    ],
    ids=["last checkpoint but one", "stopped by a callback"],
)
def test_the_default_is_the_last_round_of_a_run_that_has_ended(fit, last, federation):
    options = {**fit, "federation": {"clients_per_round": 6, **fit.get("federation", {})}}
    folder = str(federation(FedAvg(), **options).run_folder)
    again = federation(FedAvg(), verb="replay", ckpt_path=folder, arguments={"client": 0}, **options).summary
    assert again.round == last


def test_a_run_of_another_folder_is_replayed(federation, tmp_path):
    runs = [federation(FedAvg(), run_dir=tmp_path / name, federation={"clients_per_round": 6}) for name in "ab"]
    options = {"run_dir": tmp_path / "b", "federation": {"clients_per_round": 6}, "arguments": {"client": 0}}
    again = federation(FedAvg(), verb="replay", ckpt_path=str(runs[0].run_folder), **options).summary
    assert again.round == 2


class Failing(FedAvg):
    def train(self, message, client):
        if client.id == 3:
            raise RuntimeError("no data today")
        return super().train(message, client)


def test_failures_of_others_in_rounds_in_between_are_skipped_as_in_the_run(federation):
    options = {"clients_per_round": 6, "on_client_error": "skip", "checkpoint_every_n_rounds": 3}
    folder = str(federation(Failing(), rounds=5, federation=options).run_folder)
    again = {"verb": "replay", "rounds": 5, "ckpt_path": folder, "federation": options}
    assert federation(Failing(), **again, arguments={"client": 0, "round": 4}).summary.round == 4
    with pytest.raises(ClientFailed, match=r"Client 3 failed in round 4.*no data today"):
        federation(Failing(), **again, arguments={"client": 3, "round": 4})
