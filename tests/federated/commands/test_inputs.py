"""Modules that make layers after they are created."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation, HeteroFL
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import MLP


class Late(MLP):
    """Makes its last layer in `configure_model`, as Lightning documents it."""

    def __init__(self, guarded=True):
        super().__init__(num_classes=3, sample_shape=(1, 1, 4), hidden=(8,), lr=0.1)
        self.net.append(nn.ReLU())
        self.guarded = guarded

    def configure_model(self):
        if len(self.net) == 5 or not self.guarded:
            self.net.append(nn.Linear(3, 3))


class InSetup(MLP):
    """Makes its last layer where clients do not share it."""

    def __init__(self, hook):
        super().__init__(num_classes=3, sample_shape=(1, 1, 4), hidden=(8,))
        self.hook = hook

    def make(self):
        if "late" not in dict(self.named_children()):
            self.late = nn.Linear(3, 3)

    def setup(self, stage):
        if self.hook == "setup":
            self.make()

    def on_train_start(self):
        if self.hook == "on_train_start":
            self.make()

    def forward(self, x):
        return self.late(super().forward(x))


def fit(module, tmp_path, algorithm=None, ckpt_path=None, **options):
    federation = {"clients_per_round": 2, "pictures_every_n_rounds": 0} | options.pop("federation", {})
    settings = {"max_rounds": 2, "accelerator": "cpu", "devices": 1, "logger": False, "seed": 1} | options
    trainer = FederatedTrainer(
        algorithm=algorithm or FedAvg(),
        federation=Federation(**federation),
        enable_progress_bar=False,
        default_root_dir=str(tmp_path),
        **settings,
    )
    data = FederatedBlobs(num_clients=4, num_classes=3, dim=4, val_fraction=0.2, batch_size=8)
    trainer.fit(module, data, ckpt_path)
    return trainer


@pytest.mark.parametrize("engine", ["fast", "trainer", "stacked"])
def test_layers_of_configure_model_are_part_of_the_federation(engine, tmp_path):
    torch.manual_seed(0)
    late = Late()
    late.configure_model()
    early = MLP(num_classes=3, sample_shape=(1, 1, 4), hidden=(8,), lr=0.1)
    early.net, late.net = copy.deepcopy(late.net), late.net[:5]
    late.configure_model()
    late.net[5].load_state_dict(early.net[5].state_dict())
    for module in (late, early):
        fit(module, tmp_path, federation={"local_engine": engine})
    for name, tensor in early.state_dict().items():
        torch.testing.assert_close(late.state_dict()[name], tensor, rtol=0, atol=0)


def test_layers_are_made_before_weights_are_shared_and_units_are_found(tmp_path):
    runs = []
    for folder in ("one", "two"):
        torch.manual_seed(0)
        module = Late()
        fit(module, tmp_path / folder, HeteroFL(), federation={"capacities": [0.5, 1.0]}, max_rounds=1)
        runs.append(module.state_dict())
    assert "net.5.weight" in runs[0]
    torch.testing.assert_close(*runs, rtol=0, atol=0)


@pytest.mark.slow
def test_layers_of_configure_model_come_back_from_other_processes(tmp_path):
    runs = []
    for devices in (1, 2):
        torch.manual_seed(0)
        module = Late()
        strategy = "client_parallel_spawn" if devices > 1 else "auto"
        fit(module, tmp_path, devices=devices, strategy=strategy)
        runs.append(module.state_dict())
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def test_layers_that_each_fit_makes_anew_are_refused(tmp_path):
    with pytest.raises(InvalidOption, match=r"`Late.configure_model` makes 'net.6.weight' anew in each call"):
        fit(Late(guarded=False), tmp_path)


@pytest.mark.filterwarnings("ignore:FLOPs are not counted")
@pytest.mark.parametrize("hook", ["setup", "on_train_start"])
def test_layers_that_clients_would_not_share_are_refused(hook, tmp_path):
    with pytest.raises(InvalidOption, match=r"Training added 'late.weight' to `InSetup`; expected its layers"):
        fit(InSetup(hook), tmp_path)
