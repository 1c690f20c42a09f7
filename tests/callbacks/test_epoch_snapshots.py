from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.callbacks import EpochSnapshots, StaticMask
from lightning_sparsefl.errors import InvalidOption


class Watch(L.Callback):
    def __init__(self):
        self.ends = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.ends.append({name: value.detach().clone() for name, value in pl_module.named_parameters()})


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def loader():
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=4)


def fit(callbacks, module=None, epochs=4, ckpt_path=None):
    module = module or Net()
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.parametrize("epochs", [[0], [1, -1]])
def test_epochs_count_from_1(epochs):
    with pytest.raises(InvalidOption, match=r"`EpochSnapshots\(epochs=.*\)`: expected whole numbers >= 1"):
        EpochSnapshots(epochs)


def test_copies_are_those_of_the_ends_of_the_epochs():
    callback, watch = EpochSnapshots([1, 3, 9]), Watch()
    fit([callback, watch])
    assert list(callback.snapshots) == [1, 3]
    for epoch, copy in callback.snapshots.items():
        assert copy.keys() == watch.ends[epoch - 1].keys()
        assert all(torch.equal(copy[name], value) for name, value in watch.ends[epoch - 1].items())
    assert not torch.equal(callback.snapshots[1]["net.0.weight"], callback.snapshots[3]["net.0.weight"])


def test_a_second_fit_counts_its_own_epochs():
    callback = EpochSnapshots([1, 2])
    module, trainer = fit([callback], epochs=2)
    first = callback.snapshots[1]["net.0.weight"]
    trainer.fit_loop.max_epochs = 4
    watch = Watch()
    trainer.callbacks.append(watch)
    trainer.fit(module, loader())
    assert list(callback.snapshots) == [1, 2]
    assert torch.equal(callback.snapshots[1]["net.0.weight"], watch.ends[0]["net.0.weight"])
    assert not torch.equal(callback.snapshots[1]["net.0.weight"], first)


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_fit_that_is_resumed_after_the_last_batch_of_an_epoch_has_all_copies(last, tmp_path):
    class Save(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.is_last_batch and trainer.current_epoch == last:
                trainer.save_checkpoint(tmp_path / "last.ckpt")

    expected, callback = EpochSnapshots([1, 2, 3]), EpochSnapshots([1, 2, 3])
    fit([expected, Save()])
    fit([callback], ckpt_path=tmp_path / "last.ckpt")
    assert sorted(callback.snapshots) == [1, 2, 3]
    for epoch, copy in callback.snapshots.items():
        assert all(torch.equal(copy[name], value) for name, value in expected.snapshots[epoch].items())


def test_copies_are_masked():
    mask = torch.eye(4, 3, dtype=torch.bool)
    callback = EpochSnapshots([1])
    fit([callback, StaticMask(masks={"net.0.weight": mask})])
    copy = callback.snapshots[1]["net.0.weight"]
    assert not copy[~mask].any()
    assert copy[mask].all()
