"""Small numbers and limits of methods with personal models, in federations whose clients have quadratic losses."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl import APFL, Ditto, FedAvg, FederatedTrainer, Federation, PerFedAvg, PFedMe
from lightning_sparsefl.federated.storage.safe_load import load_plain

F, G = (1.0, 1.0), (3.0, -1.0)
"""Curvature and minimum: (w - 1)^2 / 2 and 3 (w + 1)^2 / 2."""


class Quadratic(L.LightningModule):
    """f(w) = curvature / 2 (w - minimum)^2, from 0; a batch is a client's curvature and minimum."""

    def __init__(self, lr):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.lr, self.example_input_array = lr, torch.zeros(1, dtype=torch.float64)

    def forward(self, minimum):
        return self.w - minimum

    def training_step(self, batch):
        curvature, minimum = batch
        return (curvature / 2 * self(minimum) ** 2).sum()

    def validation_step(self, batch):
        self.log("val_w", self.w.sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class OneSample(L.LightningDataModule):
    """The same sample for training and validation."""

    def __init__(self, sample):
        super().__init__()
        self.sample = TensorDataset(*(torch.tensor([value], dtype=torch.float64) for value in sample))

    def train_dataloader(self):
        return DataLoader(self.sample)

    def val_dataloader(self):
        return DataLoader(self.sample)


@pytest.fixture
def descend(tmp_path, stored_records):
    """Runs a federation; returns the server's weight, the memory of each client, and the final table."""

    def run(algorithm, clients, *, steps, rounds=1, lr=0.1):
        module = Quadratic(lr)
        trainer = FederatedTrainer(
            algorithm=algorithm,
            federation=Federation(clients_per_round=len(clients)),
            max_rounds=rounds,
            max_epochs=steps,
            check_val_every_n_round=rounds,
            precision="64-true",
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            default_root_dir=str(tmp_path),
        )
        summary = trainer.fit(module, [OneSample(sample) for sample in clients])
        nodes = stored_records(trainer.run_folder)["nodes"]
        memory = [versions[max(versions)]["memory"] for _, versions in sorted(nodes.items())]
        content = load_plain(trainer.run_folder / "checkpoints" / "last.ckpt")
        return content["state_dict"]["w"].item(), memory, summary

    return run


def test_ditto_pulls_the_personal_model_back(descend):
    w, (memory,), _ = descend(Ditto(lam=0.5), [F], steps=3)
    assert w == pytest.approx(1 - 0.9**3)
    assert memory["weights"]["w"].item() == pytest.approx(0.25725)


def test_apfl_mixes_two_models(descend):
    w, (memory,), _ = descend(APFL(alpha=0.5), [F], steps=2)
    assert w == pytest.approx(0.19)
    assert memory["personal"]["w"].item() == pytest.approx(0.09625)
    assert memory["mixture"]["w"].item() == pytest.approx((0.19 + 0.09625) / 2)
    # at the second participation alpha moves by <v - w, grad f(mixture)>; at the first one v is w
    _, (memory,), _ = descend(APFL(alpha=0.5, adaptive=True), [F], steps=2, rounds=2)
    assert memory["alpha"] == pytest.approx(0.5 - 0.1 * 0.0803320, abs=1e-8)


@pytest.mark.parametrize(("options", "theta"), [({}, 0.06736), ({"decay": 0.001}, 0.0673598)])
def test_pfedme_moves_towards_the_envelope(descend, options, theta):
    w, (memory,), _ = descend(PFedMe(personal_lr=0.1, **options), [F], steps=1, lr=0.005)
    assert memory["weights"]["w"].item() == pytest.approx(theta, abs=5e-8)
    assert w == pytest.approx(0.005 * 15 * theta, abs=5e-9)
    w, _, _ = descend(PFedMe(personal_lr=0.1, beta=2.0, **options), [F], steps=1, lr=0.005)
    assert w == pytest.approx(2 * 0.005 * 15 * theta, abs=1e-8)


@pytest.mark.parametrize(("order", "steps", "expected"), [("first", 2, -0.21), ("hessian", 3, -0.147)])
def test_perfedavg_steps_by_the_gradient_after_a_step(descend, order, steps, expected):
    w, (memory,), summary = descend(PerFedAvg(alpha=0.1, order=order), [G], steps=steps)
    assert w == pytest.approx(expected)
    adapted = expected - 0.1 * 3 * (expected + 1)
    assert memory["weights"]["w"].item() == pytest.approx(adapted)
    assert summary["personal/val_w"] == pytest.approx(adapted, abs=1e-6)  # in float32


@pytest.mark.slow_after_first("method")
@pytest.mark.parametrize(
    ("method", "steps", "lr", "limit"),
    [
        pytest.param(FedAvg(), 1, 0.1, -0.5, id="FedAvg"),  # the minimum of the sum of both
        pytest.param(FedAvg(), 5, 0.1, -0.3402661, id="FedAvg, 5 steps"),
        # the minimum of the sum of h / 2 (1 - alpha h)^2 (w - m)^2, the losses after a step
        pytest.param(
            PerFedAvg(alpha=0.1, order="hessian"), 3, 0.3, (0.81 - 1.47) / (0.81 + 1.47), id="PerFedAvg, hessian"
        ),
        pytest.param(PerFedAvg(alpha=0.1), 2, 0.3, (0.9 - 2.1) / (0.9 + 2.1), id="PerFedAvg"),
        # the minimum of the sum of h lam / (h + lam) / 2 (w - m)^2, the envelopes
        pytest.param(PFedMe(lam=2.0, personal_lr=0.2, steps=25), 1, 0.2, -2 / 7, id="PFedMe"),
    ],
)
def test_the_server_ends_at_the_minimum_of_the_clients_objectives(descend, method, steps, lr, limit):
    w, memory, _ = descend(method, [F, G], steps=steps, lr=lr, rounds=80)
    assert w == pytest.approx(limit, abs=1e-6)
    if isinstance(method, PFedMe):
        thetas = [each["weights"]["w"].item() for each in memory]
        assert thetas == pytest.approx([(h * m + 2 * w) / (h + 2) for h, m in (F, G)], abs=1e-5)


@pytest.mark.slow
def test_personal_models_of_ditto_end_between_the_clients_minimum_and_the_server(descend):
    w, memory, _ = descend(Ditto(lam=0.5), [F, G], steps=5, rounds=40)
    own = [each["weights"]["w"].item() for each in memory]
    assert own == pytest.approx([(h * m + 0.5 * w) / (h + 0.5) for h, m in (F, G)], abs=1e-6)


@pytest.mark.slow
def test_mixtures_of_apfl_end_at_the_clients_minimum(descend):
    w, memory, _ = descend(APFL(alpha=0.9), [F, G], steps=1, lr=0.3, rounds=80)
    assert w == pytest.approx(-0.5, abs=1e-6)
    for (_, minimum), each in zip((F, G), memory, strict=True):  # a v + (1 - a) w, before the last step of w
        assert 0.9 * each["personal"]["w"].item() + 0.1 * w == pytest.approx(minimum, abs=1e-6)
