"""What one client's code changes in the module is not there for the next client."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.federated.local import isolation
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.isolation import ModuleState
from lightning_sparsefl.federated.local.lightning_trainer import LightningEngine
from lightning_sparsefl.federated.local.local_options import LocalOptions


class Net(L.LightningModule):
    """Does something to itself in the first batch of client 0, which has the first rounds of each rank."""

    def __init__(self, change: str = "nothing") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.change, self.scale, self.seen, self.gone = change, 1.0, [0], 1
        self.nested = nn.Module()
        self.nested.factor = 2.0
        self.on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.float())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.on and batch_idx == 0:
            CHANGES[self.change](self)
        logits = self(batch[0]) * self.scale * self.nested.factor * len(self.seen)
        return nn.functional.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def delete(module: Net) -> None:
    module.__dict__.pop("gone", None)


CHANGES = {
    "nothing": lambda module: None,
    "frozen": lambda module: module.net[1].requires_grad_(False),
    "mode": lambda module: module.net[3].eval(),
    "forward hook": lambda module: module.net.register_forward_hook(lambda m, i, out: out * 2),
    "pre-hook": lambda module: module.net[1].register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
    "gradient hook": lambda module: module.net[1].weight.register_hook(lambda grad: grad * 2),
    "number": lambda module: setattr(module, "scale", 3.0),
    "submodule's number": lambda module: setattr(module.nested, "factor", 3.0),
    "layer's option": lambda module: setattr(module.net[3], "p", 0.9),
    "momentum": lambda module: setattr(module.net[2], "momentum", 0.9),
    "new attribute": lambda module: setattr(module, "fresh", torch.ones(3)),
    "deleted": delete,
    "another list": lambda module: setattr(module, "seen", [0, 1, 2]),
}


def facts(module: Net) -> dict[str, Any]:
    """Everything that a client could leave behind."""
    return {
        "flags": [p.requires_grad for p in module.parameters()],
        "gradient hooks": [len(p._backward_hooks or {}) for p in module.parameters()],
        "modes": [m.training for m in module.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()],
        "own": {key: value for key, value in vars(module).items() if key[0] != "_"},
        "others": (module.nested.factor, module.net[3].p, module.net[2].momentum),
    }


@pytest.fixture
def loader() -> DataLoader:
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(8, 8), torch.randint(4, (8,))), batch_size=4)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("engine", [FastEngine, LightningEngine])
@pytest.mark.filterwarnings("ignore")  # a real Trainer has some of its own
def test_a_module_comes_back_as_it_was(engine: Any, change: str, loader: DataLoader) -> None:
    module = Net(change)
    module.net[1].register_forward_hook(lambda *_: None)  # one of the user's
    before = facts(module)
    engine(Fabric(accelerator="cpu", devices=1), LocalOptions()).fit(module, loader)
    assert facts(module) == before


def test_a_hook_that_a_client_removes_comes_back() -> None:
    module, calls = Net(), []
    handle = module.net.register_forward_hook(lambda *_: calls.append(1))
    state = ModuleState(module)
    handle.remove()
    state.restore()
    module.net(torch.ones(2, 8))
    assert calls == [1]


def test_a_gradient_hook_that_a_client_removes_comes_back() -> None:
    module, calls = Net(), []
    handle = module.net[1].weight.register_hook(lambda _: calls.append(1))
    state = ModuleState(module)
    handle.remove()
    state.restore()
    module.net(torch.ones(2, 8)).sum().backward()
    assert calls == [1]


def test_a_container_that_grows_is_reported_once_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolation, "_messages", type(isolation._messages)())
    module = Net()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            state = ModuleState(module)
            module.seen.append(1)
            state.restore()
    said = [record.message for record in caplog.records if "in place" in record.message]
    assert len(said) == 1
    assert "`Net.seen`" in said[0]


@dataclass(frozen=True)
class FirstClientActs(FedAvg):
    def train(self, message: Any, client: Any) -> Any:
        client._worker.module.on = client.id == 0
        return super().train(message, client)


def weights(root: Any, change: str, devices: int) -> bytes:
    trainer = FederatedTrainer(
        algorithm=FirstClientActs(),
        federation=Federation(clients_per_round=4),
        accelerator="cpu",
        devices=devices,
        strategy="client_parallel_fork" if devices > 1 else "auto",
        max_rounds=2,
        check_val_every_n_round=2,
        default_root_dir=str(root / str(devices)),
        logger=False,
        enable_progress_bar=False,
    )
    torch.manual_seed(0)
    data = FederatedBlobs(num_train=80, num_test=20, num_clients=4, dim=8, val_fraction=0.2, batch_size=4)
    trainer.fit(Net(change), data)
    state = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return b"".join(value.numpy().tobytes() for value in state.values())


@pytest.mark.parametrize("change", ["frozen", "forward hook", "number"])
def test_what_a_client_changes_does_not_show_in_the_number_of_ranks(
    change: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # in which a launcher leaves its own
    assert weights(tmp_path, change, 1) == weights(tmp_path, change, 2)
    assert weights(tmp_path / "other", "nothing", 1) != weights(tmp_path / "again", change, 1)
