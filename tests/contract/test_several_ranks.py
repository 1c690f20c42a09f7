"""Narrow clients on several ranks; all methods: test_algorithms.py, other ways of starting ranks: test_ranks.py."""

import pytest
import torch

from lightning_sparsefl import FederatedTrainer, Federation, HeteroFL, PerFedMask, SplitMix
from lightning_sparsefl.data import FederatedDigits
from lightning_sparsefl.models import MLP


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    "method",
    [
        HeteroFL(finetune_epochs=2),
        SplitMix(bases=4, finetune_epochs=2),
        PerFedMask(base=SplitMix(bases=4), masking="sequential", finetune_epochs=2),
    ],
)
def test_narrow_clients_that_are_cut_out_and_fine_tuned(tmp_path, method):
    """Weak and strong clients, fine-tuning at the end, and the bytes of one rank."""
    states = []
    for devices in (1, 2):
        torch.manual_seed(0)
        trainer = FederatedTrainer(
            algorithm=method,
            federation=Federation(clients_per_round=4, capacities=[0.25, 0.5, 1.0], execution="cut"),
            accelerator="cpu",
            devices=devices,
            strategy="client_parallel_fork" if devices > 1 else "auto",
            max_rounds=2,
            logger=False,
            seed=0,
            enable_progress_bar=False,
            default_root_dir=str(tmp_path / str(devices)),
        )
        summary = trainer.fit(
            MLP(hidden=(16, 8), sample_shape=(1, 8, 8)), FederatedDigits(num_clients=6, val_fraction=0.2)
        )
        assert summary["finetuned/val_loss"] < summary["selected/val_loss"]
        states.append(torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"])
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
