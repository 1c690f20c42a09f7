"""`trainer.deterministic`: in force while a rank works, and off again afterwards."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from helpers.networks import Classifier
from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import ClientFailed, InvalidOption
from lightning_sparsefl.federated.distributed.torch_settings import deterministic_algorithms


class Watched(Classifier):
    """Classifier that notes the mode of its training steps."""

    def training_step(self, batch, batch_idx):
        type(self).mode = torch.get_deterministic_debug_mode()
        return super().training_step(batch, batch_idx)


class Unpools(Classifier):
    """Classifier with an operation that has no deterministic form."""

    def training_step(self, batch, batch_idx):
        pooled, indices = nn.functional.max_pool1d(batch[0].flatten(1)[:, None], 2, return_indices=True)
        return super().training_step((nn.functional.max_unpool1d(pooled, indices, 2)[:, 0], batch[1]), batch_idx)


def fit(module, folder, deterministic):
    FederatedTrainer(
        algorithm=FedAvg(),
        federation=Federation(clients_per_round=2, pictures_every_n_rounds=0),
        accelerator="cpu",
        max_rounds=1,
        default_root_dir=str(folder),
        logger=False,
        enable_progress_bar=False,
        deterministic=deterministic,
    ).fit(module, FederatedBlobs(num_clients=2, num_classes=4, dim=8, eval_split="test"))


@pytest.mark.parametrize(("deterministic", "mode"), [(False, 0), ("warn", 1), (True, 2)])
def test_the_mode_is_that_of_a_run(deterministic, mode, tmp_path):
    fit(Watched(), tmp_path, deterministic)
    assert Watched.mode == mode
    assert torch.get_deterministic_debug_mode() == 0


def test_the_settings_of_the_user_come_back(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.set_deterministic_debug_mode("warn")
    try:
        with deterministic_algorithms(True):
            assert not torch.backends.cudnn.benchmark
        assert torch.get_deterministic_debug_mode() == 1
    finally:
        torch.set_deterministic_debug_mode("default")
    assert torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_step_without_a_deterministic_form_fails_with_the_way_out(tmp_path):
    with pytest.raises(ClientFailed, match=r"deterministic implementation; set `trainer.deterministic: warn`"):
        fit(Unpools(), tmp_path, True)
    with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
        fit(Unpools(), tmp_path, "warn")


def test_another_value_is_refused(tmp_path):
    with pytest.raises(InvalidOption, match=r"`trainer.deterministic` is 'always'; expected True, False or 'warn'"):
        fit(Classifier(), tmp_path, "always")
