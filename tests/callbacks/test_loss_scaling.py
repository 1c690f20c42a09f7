"""Steps that loss scaling skips, since a gradient overflows: callbacks leave them out."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl import callbacks
from lightning_sparsefl.callbacks import MetaStep, MoreauEnvelope, PersonalMixture, StepMeter
from lightning_sparsefl.callbacks.magnitude_gate import MagnitudeGate
from lightning_sparsefl.callbacks.stochastic_mask import StochasticMask
from lightning_sparsefl.callbacks.unit_scores import UnitScores
from lightning_sparsefl.callbacks.unit_thresholds import UnitThresholds
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.testing.small_fit import Net, SmallFit

SCALE = 2.0**127
"""Scale of the loss at which a gradient of 2 or more is infinite in single precision, and at half of it is not."""


class Steep(L.LightningModule):
    """Has the loss 3 (w + 1)^2 / 2, whose gradient is 3 at w = 0, and is above 2 in the steps of these tests."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def training_step(self, batch):
        return (1.5 * (self.w + batch[0]) ** 2).sum()

    def configure_optimizers(self):
        return SGD(self.parameters(), 0.1)


@pytest.fixture
def trained(tmp_path):
    """Trains with a callback, with loss scaling that skips every other batch if `skips`; returns the module."""

    def run(callback, batches, skips=False):
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1)
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[callback],
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)] if skips else None,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        module = Steep()
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(batches, 1)), batch_size=1))
        return module

    return run


EVERY = {
    "meter": (lambda: StepMeter(mu=0), 1),
    "mixture": (lambda: PersonalMixture(alpha=0.5, adaptive=True), 1),
    "envelope": (lambda: MoreauEnvelope(strength=1.0, lr=0.01, steps=1), 2),
    "meta, first": (lambda: MetaStep(lr=0.1), 2),
    "meta, hessian": (lambda: MetaStep(lr=0.1, order="hessian", delta=0.1), 3),
}


@pytest.mark.parametrize(("make", "batches"), EVERY.values(), ids=EVERY)
def test_a_step_that_loss_scaling_skips_changes_nothing(make, batches, trained):
    plain, scaled = make(), make()
    expected = trained(plain, batches).w.item()
    assert trained(scaled, 2 * batches, skips=True).w.item() == pytest.approx(expected, rel=1e-6)
    assert expected != 0
    assert list(scaled.state_dict()) == list(plain.state_dict())
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(scaled.state_dict()[key], value)


def make_fused(parameters):
    return SGD(parameters, 0.05, fused=True)


INTERNAL = {kind.__name__: kind for kind in (MagnitudeGate, StochasticMask, UnitScores, UnitThresholds)}
GIVEN = {
    "BudgetAwareExtrusion": {"strength": 0.1},
    "DynamicMask": {"every_n_steps": 3},
    "EpochSnapshots": {"epochs": (1,)},
    "GradientOffset": {"offset": {"net.0.weight": torch.full((8, 5), 0.01)}},
    "LayerFreezing": {"trainable": {"net.0.weight": torch.eye(8, 5, dtype=torch.bool)}},
    "MagnitudeGate": {"thresholds": 0.1},
    "MetaStep": {"lr": 0.1},
    "MoreauEnvelope": {"strength": 2.0, "lr": 0.1},
    "PersonalMixture": {"alpha": 0.4},
    "StepMeter": {"mu": 0.1},
    "UnitScores": {"steps": None, "groups": (), "kept": {}, "weights": {}},
}
REFUSING = {
    *("BudgetAwareExtrusion", "GradientOffset", "GradientSum", "GroupPenalty", "LearnedImportance", "MetaStep"),
    *("MoreauEnvelope", "ProximalTerm", "UnitScores", "UnitThresholds"),
}


@pytest.mark.parametrize("name", [*callbacks.__all__, *INTERNAL])
def test_a_fused_optimizer_is_refused_or_trains_as_another(name, tmp_path):
    """It unscales gradients within its step, so that callbacks would see them multiplied by the scale."""

    def trained(kind, *optimizer, **options):
        module, callback = Net(*optimizer), kind(**GIVEN.get(name, {}))
        SmallFit(tmp_path, options=options).fit(module, [callback], max_epochs=2)
        return dict(module.named_parameters())

    def scaling():
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))

    kind = INTERNAL.get(name) or getattr(callbacks, name)
    if name in REFUSING:
        with pytest.raises(InvalidOption, match=f"`{name}` reads or changes gradients, .*`fused=False`"):
            trained(kind, make_fused, plugins=[scaling()])
        return
    expected = trained(kind, lambda parameters: SGD(parameters, 0.05), plugins=[scaling()])
    torch.testing.assert_close(trained(kind, make_fused, plugins=[scaling()]), expected, rtol=1e-3, atol=1e-5)


def test_a_fused_optimizer_is_not_refused_without_loss_scaling(tmp_path):
    ends = []
    for optimizer in (make_fused, lambda parameters: SGD(parameters, 0.05)):
        module = Net(optimizer)
        SmallFit(tmp_path, options={"precision": "bf16-mixed"}).fit(module, [callbacks.ProximalTerm(5.0)])
        ends.append(dict(module.named_parameters()))
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-5)


def test_without_loss_scaling_a_training_that_diverges_shows(trained):
    class Broken(StepMeter):
        def on_after_backward(self, trainer, pl_module):
            pl_module.w.grad.fill_(torch.inf)

    meter = Broken(mu=0)
    assert not trained(meter, 2).w.isfinite()
    assert meter.steps == 2
