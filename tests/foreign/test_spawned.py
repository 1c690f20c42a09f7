"""Masks of processes that Lightning spawns are in the main process when the fit returns."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_sparsefl.callbacks.spawned import ReturnedState
from lightning_sparsefl.sparse.masks import kept, same

LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def launcher(monkeypatch):
    """Leave no variables of a launcher behind."""
    for name in LAUNCHER:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_notebook"])
def test_masks_come_back_and_the_next_fit_goes_on_from_them(kind, strategy, project):
    train_in_processes(kind, strategy, project)


@pytest.mark.slow
def test_masks_come_back_from_processes_that_import_everything_anew(project):
    train_in_processes("RigL", "ddp_spawn", project)


def train_in_processes(kind, strategy, project):
    """Train in two processes, which watch the masks, and again in this one."""
    callback, module = project.make(kind), project.Net()
    watch = project.Watch(callback, in_process=True)
    project.trainer([callback, watch], devices=2, strategy=strategy).fit(module, project.loader())
    path = callback._returned.path
    masks = {name: mask.clone() for name, mask in callback.masks.items()}
    assert not os.path.exists(path)
    assert masks
    for name, mask in masks.items():
        weight = module.get_parameter(name)
        assert not weight[~mask].any()
        assert kind in ("RigL", "SET") or weight[mask].all() or weight.dim() == 1  # these two have just let some grow
    if kind == "DynamicPruningWithFeedback":
        assert all(callback.pruned[name][~mask].any() for name, mask in masks.items())
    if kind == "LearnedImportance":
        assert callback.kept
    watch = project.Watch(callback)
    seen = []
    watch.on_train_batch_start = lambda *_: seen.append({name: mask.clone() for name, mask in callback.masks.items()})
    project.trainer([callback, watch], max_epochs=1).fit(module, project.loader())
    assert watch.dense == 0
    if kind == "GlobalMagnitudePruning":  # which compounds
        assert kept(seen[0]) < kept(masks)
    elif kind != "LearnedImportance":  # which chooses anew in the first batch
        assert same(seen[0], masks)


def test_a_returned_state_is_read_once_and_only_where_it_was_sent_from():
    first = ReturnedState()
    second, third = copy.deepcopy(first), pickle.loads(pickle.dumps(first))
    first.send({"masks": torch.ones(2)})
    assert os.stat(first.path).st_mode & 0o777 == 0o600
    assert second.receive() is None
    assert third.receive() is None
    assert first.receive()["masks"].tolist() == [1, 1]
    assert first.receive() is None


def test_a_state_that_nobody_reads_is_deleted_with_its_callback():
    state = ReturnedState()
    path = state.path
    state.send({})
    assert os.path.exists(path)
    del state
    assert not os.path.exists(path)


def test_a_copy_of_a_callback_in_a_fit_is_a_callback_outside_of_one(project):
    copies = []

    class Copying(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            if trainer.global_step == 3:
                copies.extend((copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))))

    callback = project.make("RigL")
    project.fit(callback, project.Net(), beside=[Copying()])
    for each in copies:
        assert each.masks
        module = project.Net()
        project.trainer([each], max_epochs=1).fit(module, project.loader())
        assert all(not module.get_parameter(name)[~mask].any() for name, mask in each.masks.items())
