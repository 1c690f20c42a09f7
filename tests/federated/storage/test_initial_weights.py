"""The weights that a run began with, where a later process makes a module with others."""

from __future__ import annotations

import shutil

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_sparsefl import FederatedTrainer, Federation, FedPer
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.storage.initial_weights import INITIAL
from lightning_sparsefl.federated.storage.safe_load import load_plain
from lightning_sparsefl.models import MLP


def mlp(seed):
    torch.manual_seed(seed)
    return MLP(num_classes=4, sample_shape=(1, 1, 8), hidden=(8,), lr=0.1)


def trainer(root, rounds=2, callbacks=None):
    return FederatedTrainer(
        algorithm=FedPer(),
        federation=Federation(clients_per_round=2),
        max_rounds=rounds,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=str(root),
        accelerator="cpu",
        seed=0,
    )


def blobs():
    return FederatedBlobs(num_clients=6, dim=8, num_train=300, val_fraction=0.2)


def scores(root, path, seed):
    """Personal scores; most clients have not trained, so that their heads are the run's first."""
    return trainer(root).validate(mlp(seed), blobs(), str(path))["personal/val_loss"]


@pytest.fixture
def run(tmp_path):
    trainer(tmp_path, callbacks=[ModelCheckpoint(dirpath=str(tmp_path / "own"), monitor="global/val_acc")]).fit(
        mlp(0), blobs()
    )
    return tmp_path / "FedPer" / "version_0"


def test_clients_are_scored_with_the_heads_that_the_run_began_with(run, tmp_path):
    (alone,) = (tmp_path / "own").iterdir()  # it holds the weights itself
    for path in (run, alone):
        assert scores(tmp_path, path, 0) == scores(tmp_path, path, 1)


def test_the_file_holds_the_weights_of_the_module(run):
    content = load_plain(run / "checkpoints" / INITIAL)
    state = mlp(0).state_dict()
    assert content.keys() == state.keys()
    assert all(torch.equal(content[name], state[name]) for name in state)


def test_a_copy_of_a_checkpoint_alone_says_what_it_lacks(run, tmp_path):
    shutil.copytree(run / "checkpoints", copy := tmp_path / "copy")
    (copy / INITIAL).unlink()
    expected = scores(tmp_path, run, 0)
    assert scores(tmp_path, copy / "last.ckpt", 0) == expected  # the module begins as the run did
    with pytest.warns(UserWarning, match=rf"last\.ckpt has no {INITIAL} beside it.* copy {INITIAL} too, or seed"):
        assert scores(tmp_path, copy / "last.ckpt", 1) != expected


@pytest.mark.parametrize("damage", ["cut", "of another run", "of another model"])
def test_a_damaged_file_is_refused(damage, run, tmp_path):
    path = run / "checkpoints" / INITIAL
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        state = mlp(7).state_dict() if damage == "of another run" else {"w": torch.ones(2)}
        torch.save({name: tensor.clone() for name, tensor in state.items()}, path)
    with pytest.raises(CheckpointMismatch, match=INITIAL):
        scores(tmp_path, run, 1)


def test_a_copied_run_that_goes_on_in_a_folder_of_its_own_takes_the_weights_along(run, tmp_path):
    shutil.copytree(run / "checkpoints", copy := tmp_path / "copy")
    straight = trainer(tmp_path / "straight", rounds=3)
    straight.fit(mlp(0), blobs())
    moved = trainer(tmp_path / "moved", rounds=3)
    moved.fit(mlp(1), blobs(), str(copy / "last.ckpt"))
    files = [each.run_folder / "checkpoints" / INITIAL for each in (straight, moved)]
    one, other = map(load_plain, files)
    assert all(torch.equal(one[name], other[name]) for name in one)
    paths = [each.run_folder for each in (straight, moved)]
    assert scores(tmp_path, paths[0], 2) == scores(tmp_path, paths[1], 3)
