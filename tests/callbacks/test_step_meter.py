"""The meter of steps against SGD on a constant gradient, and what it reports."""

from __future__ import annotations

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.utils.data import DataLoader

from lightning_sparsefl import SCAFFOLD, FedNova
from lightning_sparsefl.callbacks import StepMeter, step_meter
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.types import Message


def metered(steps, mu=0.0, rates=None, **sgd):
    """The path that the meter counts, and that of a weight with the gradient 1 and a proximal term."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer, meter = torch.optim.SGD([weight], **{"lr": 0.1, **sgd}), StepMeter(mu)
    for step in range(steps):
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[step]
        weight.grad = 1 + mu * weight.detach()
        meter.count(optimizer.param_groups[0])
        optimizer.step()
    return meter, -weight.item()


@pytest.mark.parametrize(
    ("options", "norm"),
    [
        ({"steps": 5}, 5.0),
        ({"steps": 5, "momentum": 0.9}, 13.1441),
        ({"steps": 3, "mu": 1.0}, 2.71),
        ({"steps": 3, "mu": 1.0, "momentum": 0.9}, 5.14),
        ({"steps": 5, "mu": 1.0, "momentum": 0.9}, 10.2916),
        ({"steps": 4, "momentum": 0.9, "nesterov": True}, None),
        ({"steps": 4, "momentum": 0.9, "nesterov": True, "mu": 0.5}, None),
        ({"steps": 4, "momentum": 0.5, "dampening": 0.3}, None),
        ({"steps": 4, "momentum": 0.5, "rates": [0.4, 0.2, 0.1, 0.05]}, None),
        ({"steps": 2, "rates": [0.4, 0.1]}, 1.25),
        ({"steps": 2, "rates": [0.0, 0.1]}, 1.0),
    ],
    ids=str,
)
def test_the_path_is_that_of_sgd(options, norm):
    meter, path = metered(**options)
    assert meter.path == pytest.approx(path, rel=1e-12)
    assert meter.steps == options["steps"]
    if norm is not None:
        assert meter.norm == pytest.approx(norm, rel=1e-12)


class Skipping(L.LightningModule):
    """Skips every second batch, after which torch's SGD moves nothing and keeps its momentum."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).sum()
        return loss if batch_idx % 2 == 0 else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_skipped_batch_is_no_step(tmp_path):
    meter, module = StepMeter(mu=0), Skipping()
    before = module.layer.bias.item()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, DataLoader(torch.ones(6, 1), batch_size=1))
    assert meter.steps == 3
    assert before - module.layer.bias.item() == pytest.approx(meter.path, rel=1e-5)


class WithFrozenGroup(Skipping):
    """Has a frozen layer, with a learning rate of its own, in the optimizer's first group."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(1, 1).requires_grad_(False)

    def configure_optimizers(self):
        groups = [{"params": list(self.frozen.parameters()), "lr": 0.01}, {"params": list(self.layer.parameters())}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def test_the_group_that_is_counted_has_gradients(monkeypatch):
    said, meter, module = [], StepMeter(0), WithFrozenGroup()
    monkeypatch.setattr(step_meter._messages, "info", said.append)
    optimizer = module.configure_optimizers()
    meter.report(optimizer)
    trainer = SimpleNamespace(optimizers=[optimizer], precision_plugin=None)
    meter.on_before_optimizer_step(trainer, module, optimizer)
    assert meter.steps == 0
    module.layer(torch.ones(1, 1)).sum().backward()
    meter.on_before_optimizer_step(trainer, module, LightningOptimizer(optimizer))
    assert (meter.steps, meter.path, said) == (1, 0.1, [])
    meter.on_before_optimizer_step(trainer, module, torch.optim.SGD(module.layer.parameters(), lr=0.1))
    assert meter.steps == 1


def test_without_steps_there_is_no_norm():
    assert (StepMeter(0).steps, StepMeter(0).path, StepMeter(0).norm) == (0, 0.0, 0.0)


def test_a_state_goes_on():
    meter, _ = metered(5, momentum=0.9)
    half, _ = metered(2, momentum=0.9)
    other = StepMeter(0)
    other.load_state_dict(half.state_dict())
    for _ in range(3):
        other.count({"lr": 0.1, "momentum": 0.9})
    assert other.state_dict() == meter.state_dict()


def test_a_negative_strength_is_refused():
    with pytest.raises(InvalidOption, match=r"`StepMeter\(mu=-1\)`: expected a number >= 0"):
        StepMeter(-1)


def test_what_the_sums_do_not_hold_for_is_reported_once(monkeypatch):
    said = []
    monkeypatch.setattr(step_meter._messages, "info", said.append)
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    StepMeter(0).report(torch.optim.SGD(weights, lr=0.1), clips=True)
    assert said == []
    StepMeter(0).report(torch.optim.Adam(weights))
    StepMeter(0).report(torch.optim.SGD([{"params": weights[:1], "lr": 0.2}, {"params": weights[1:]}], lr=0.1))
    StepMeter(0, mean_gradient=True).report(torch.optim.SGD(weights, lr=0.1), clips=True)
    assert "the steps of Adam as those of SGD" in said[0]
    assert "first group of parameters" in said[1]
    assert "Gradients are clipped" in said[2]


@pytest.mark.parametrize(("made", "name"), [(SCAFFOLD(), "SCAFFOLD"), (FedNova(), "FedNova"), (None, "StepMeter")])
def test_what_is_reported_names_what_the_user_wrote(made, name, monkeypatch):
    said, message = [], Message(weights={}, extra={"control": {}})
    monkeypatch.setattr(step_meter._messages, "info", said.append)
    meter = StepMeter(0) if made is None else made.callbacks(message, SimpleNamespace(memory={}))[-1]
    meter.report(torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]))
    assert said == [f"`{name}` counts the steps of Adam as those of SGD."]
