"""A module's own `optimizer_step`: called once for all clients that step together, or they train one after another."""

from __future__ import annotations

import contextvars
import itertools

import pytest
import torch

from lightning_sparsefl import (
    APFL,
    SCAFFOLD,
    FedDIP,
    FedDyn,
    FedLPS,
    FedNova,
    FedProx,
    FedSpa,
    FjORD,
    HeteroFL,
    PFedMe,
)
from lightning_sparsefl.federated.local.round_lr import ExponentialRoundLR
from tests.federated.local.stacked import test_odd_modules as odd
from tests.federated.local.stacked.test_odd_modules import Plain, check, check_alone, check_found, said_alone


class WarmsUp(Plain):
    """Raises the learning rate in the first steps, as the documentation of Lightning shows."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 6:
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * min(1.0, (self.trainer.global_step + 1) / 6)


class SetsBefore(Plain):
    """Sets options before the step, which the training step sees, and logs them."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def training_step(self, batch, batch_idx):
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return self.loss(batch)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        assert isinstance(optimizer, torch.optim.SGD)
        group = self.trainer.optimizers[0].param_groups[0]
        group["lr"], group["momentum"] = 0.1 / (1 + epoch + batch_idx), 0.5 + 0.1 * epoch
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.log("momentum", optimizer.param_groups[0]["momentum"], on_step=False, on_epoch=True)


class Decays(Plain):
    """Multiplies the learning rate in every step."""

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.log("train_acc", (logits.argmax(1) == batch[1]).double().mean(), on_step=False, on_epoch=True)
        return torch.nn.functional.cross_entropy(logits, batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).double().mean())

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


class BesideASchedule(WarmsUp):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class SeesItBefore(Decays):
    """Reads the rate of a batch in the hooks before it."""

    def on_train_batch_start(self, batch, batch_idx):
        self.log("start", self.optimizers().param_groups[0]["lr"], on_step=False, on_epoch=True)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        scale = self.optimizers().param_groups[0]["lr"] if self.trainer.training else 1.0
        return [batch[0] * scale, batch[1]]


class TensorRate(Plain):
    """Changes a learning rate in place, which is also that of `optimizer.defaults`."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=torch.tensor(0.02, dtype=torch.float64))

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        optimizer.param_groups[0]["lr"].mul_(0.8)


class ComparesOptimizers(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if optimizer is self.optimizers() and optimizer.optimizer is self.trainer.optimizers[0]:
            optimizer.param_groups[0]["lr"] *= 0.7


class StepsASchedule(Plain):
    """Steps a scheduler, whose rate stays for some steps, so that the options do not tell how often it was called."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 6, gamma=0.1)]

    def lr_scheduler_step(self, scheduler, metric):
        pass

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        self.lr_schedulers().step()


class ScalesASchedule(BesideASchedule):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        schedule = self.lr_schedulers()
        schedule.base_lrs = [rate * 0.9 for rate in schedule.base_lrs]


class SetsAttributes(Plain):
    """Sets attributes that the training step, other hooks and the log read."""

    def __init__(self):
        super().__init__()
        self.scale, self.rate, self.within = 1.0, 0.0, False

    def training_step(self, batch, batch_idx):
        self.log("within", float(self.within), on_step=False, on_epoch=True)
        self.log("rate", self.rate, on_step=False, on_epoch=True)
        return self.loss(batch) * self.scale

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.scale, self.within = min(1.0, (self.trainer.global_step + 1) / 6), True
        optimizer.step(closure=optimizer_closure)
        self.rate, self.within = optimizer.param_groups[0]["lr"], False

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("at_end", self.scale + self.within, on_step=False, on_epoch=True)


class CountsByItself(Plain):
    """Keeps a count where no engine sees it, which a call for each part of the clients would increase."""

    def configure_optimizers(self):
        rates = itertools.chain([0.1] * 7, itertools.repeat(0.01))
        self.next_rate = rates.__next__
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.param_groups[0]["lr"] = self.next_rate()
        optimizer.step(closure=optimizer_closure)
        self.log("step", float(self.trainer.global_step), on_step=False, on_epoch=True)


SCALE = [1.0]


class WithinAContext(Plain):
    """Trains within a context, which lasts for all clients of a batch."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * SCALE[0]

    def on_train_batch_start(self, batch, batch_idx):
        self.log("start", SCALE[0], on_step=False, on_epoch=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("end", SCALE[0], on_step=False, on_epoch=True)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        SCALE[0] = 2.0
        try:
            optimizer.step(closure=optimizer_closure)
        finally:
            SCALE[0] = 1.0


AT_ONCE = [
    WarmsUp,
    SetsBefore,
    Decays,
    BesideASchedule,
    SeesItBefore,
    ComparesOptimizers,
    StepsASchedule,
    ScalesASchedule,
    SetsAttributes,
    CountsByItself,
    WithinAContext,
]


@pytest.mark.slow_after_first("sizes")
@pytest.mark.parametrize("sizes", [list(odd.SIZES), [20] * 4, [17, 19, 20, 18]], ids=["ragged", "even", "last"])
@pytest.mark.parametrize("kind", AT_ONCE)
def test_the_hook_is_called_once_for_clients_with_equal_numbers_of_batches(kind, sizes, tmp_path, monkeypatch):
    """Where their last batches have other sizes, they step apart within one call of the hook."""
    monkeypatch.setattr(odd, "SIZES", sizes)
    stacks, said = check(kind, tmp_path)
    assert not said_alone(said)
    assert stacks == ([2, 2] if sizes == odd.SIZES and len(set(sizes)) > 1 and 6 in sizes else [4, 4])


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    "algorithm", [FedProx(mu=0.1), FedSpa(density=0.5), SCAFFOLD(), FedDIP(), FedDyn(), HeteroFL(), FedNova()]
)
def test_methods_with_a_warm_up(algorithm, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [20] * 4)
    stacks, said = check(WarmsUp, tmp_path, algorithm=algorithm)
    assert set(stacks) == {4}
    assert not said_alone(said)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("algorithm", [APFL(), PFedMe(lam=1.0), FjORD()])
def test_callbacks_that_act_before_the_hook(algorithm, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [20] * 4)
    stacks, said = check(SetsAttributes, tmp_path, algorithm=algorithm)
    assert stacks == []
    (alone,) = said_alone(said)
    assert "is followed by `optimizer_step`, beside a callback that acts in the pass of a batch" in alone


@pytest.mark.slow
def test_narrow_models_with_a_hook(tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [20] * 4)
    check(Decays, tmp_path, algorithm=FedLPS())


@pytest.mark.slow_after_first
@pytest.mark.parametrize("kind", AT_ONCE)
def test_only_steps_call_the_hook_where_gradients_are_accumulated(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [23] * 4)
    stacks, said = check(kind, tmp_path, accumulate_grad_batches=2)
    assert stacks == [4, 4]
    assert not said_alone(said)


def test_rates_of_the_round_and_clipping(tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [20] * 4)
    options = {"round_lr": ExponentialRoundLR(gamma=0.5), "gradient_clip_val": 0.1}
    assert check(Decays, tmp_path, **options)[0] == [4, 4]


class ReadsWeights(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        self.log("size", self.net[0].weight.norm())


class ReadsParameters(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.clamp_(-0.2, 0.2)


class ReadsState(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        self.log("kept", float(len(optimizer.state)))


class ReadsTheLoss(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if optimizer.step(closure=optimizer_closure) > 100:
            optimizer.param_groups[0]["lr"] = 0.0


class OtherClosure(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=lambda: optimizer_closure())


class Draws(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.param_groups[0]["lr"] = 0.1 * float(torch.rand(()))
        optimizer.step(closure=optimizer_closure)


class LogsBefore(Plain):
    """Logs before and after its step, of which Lightning keeps the last one of an epoch's first batch."""

    def training_step(self, batch, batch_idx):
        self.log("in", 1.0)
        return self.loss(batch)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.log("before", float(batch_idx), on_step=False, on_epoch=True)
        optimizer.step(closure=optimizer_closure)
        self.log("after", 1.0)


class CountsInTheOptimizer(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.calls = getattr(optimizer, "calls", 0) + 1
        optimizer.param_groups[0]["lr"] = 0.1 if optimizer.calls < 4 else 0.01
        optimizer.step(closure=optimizer_closure)


class CountsInDefaults(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        optimizer.defaults["calls"] = optimizer.defaults.get("calls", 0) + 1
        optimizer.param_groups[0]["lr"] = 0.1 / optimizer.defaults["calls"]


class AsksForATensor(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        loss = optimizer.step(closure=optimizer_closure)
        if isinstance(loss, torch.Tensor):
            optimizer.param_groups[0]["lr"] *= 0.5


class SwallowsErrors(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        loss = optimizer.step(closure=optimizer_closure)
        try:
            large = float(loss) > 1.0
        except Exception:
            large = False
        optimizer.param_groups[0]["lr"] = 0.05 if large else 0.2


class WithoutTheWrapper(Plain):
    """Steps the optimizer itself, so that Lightning neither clips gradients nor calls hooks of the step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.optimizer.step(optimizer_closure)


class ChangesModes(Plain):
    def layers(self):
        return torch.nn.Sequential(*super().layers(), torch.nn.Dropout(0.0))

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        self.net[3].train(not self.net[3].training)


class Counts(Plain):
    """Sets the learning rate by an attribute of its own."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.count += 1
        optimizer.param_groups[0]["lr"] = 0.1 / self.count
        optimizer.step(closure=optimizer_closure)


class SetsATensor(Plain):
    def __init__(self):
        super().__init__()
        self.scale = None

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1.0 if self.scale is None else self.scale)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.scale = torch.tensor(1.0 / (1 + batch_idx))
        optimizer.step(closure=optimizer_closure)


class SetsAnAttributeToAnother(Counts):
    def __init__(self):
        super().__init__()
        self.last = 0

    def on_after_backward(self):
        self.count = 1 if self.net[0].weight.grad.norm() > 0.5 else 2

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        self.last = self.count


FACTOR = contextvars.ContextVar("FACTOR", default=1.0)


class SetsAContextVariable(Plain):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * FACTOR.get()

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        token = FACTOR.set(3.0)
        optimizer.step(closure=optimizer_closure)
        FACTOR.reset(token)


class Freezes(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        self.net[0].weight.requires_grad_(batch_idx % 2 == 0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ReadsWeights, "is followed by `optimizer_step`, which reads weights, of which each client has its own"),
        (ReadsParameters, "is followed by `optimizer_step`, which reads the optimizer's parameters"),
        (ReadsState, "is followed by `optimizer_step`, which reads the optimizer's state"),
        (ReadsTheLoss, "is followed by `optimizer_step`, which reads the loss that the step returns"),
        (OtherClosure, "is followed by `optimizer_step`, which steps with another closure than its own"),
        (WithoutTheWrapper, "is followed by `optimizer_step`, which steps the optimizer without its wrapper"),
        (Draws, "is followed by `optimizer_step`, which draws random numbers of torch"),
        (CountsInTheOptimizer, "is followed by `optimizer_step`, which changes attributes of the optimizer"),
        (CountsInDefaults, "is followed by `optimizer_step`, which changes attributes of the optimizer"),
        (TensorRate, "is followed by `optimizer_step`, which changes attributes of the optimizer"),
        (SetsATensor, "is followed by `optimizer_step`, which sets `self.scale` to a `Tensor`, of which each client"),
        (SetsAnAttributeToAnother, "is followed by `optimizer_step`, which reads `self.count`, of which each client"),
        (SetsAContextVariable, "is followed by `optimizer_step`, which sets a context variable"),
        (LogsBefore, "is followed by `optimizer_step`, which logs before its step"),
        (AsksForATensor, "is followed by `optimizer_step`, which reads the loss that the step returns"),
        (SwallowsErrors, "is followed by `optimizer_step`, which reads the loss that the step returns"),
        (ChangesModes, "changes layers of the module, their modes or their hooks"),
        (Counts, "count"),
        (Freezes, ""),
    ],
)
def test_what_has_no_meaning_for_several_clients_is_found_before_the_first_round(kind, words, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [20] * 4)
    check_alone(kind, words, tmp_path)


class SkipsSteps(Plain):
    """Accumulates gradients by calling the closure alone."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class StepsTwice(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for _ in range(1 + batch_idx % 2):
            optimizer.step(closure=optimizer_closure)


class FailsLater(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if epoch == 1 and float(self.net[0].weight.norm()) > 0:
            optimizer.param_groups[0]["lr"] = 0.05


class TurnsMomentumOn(Plain):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, dampening=0.5)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx == 3:
            optimizer.param_groups[0]["momentum"] = 0.9
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (TurnsMomentumOn, "which turns momentum on or off"),
        (SkipsSteps, "which calls its closure itself"),
        (StepsTwice, "which steps twice"),
        (FailsLater, "reads weights"),
    ],
)
def test_what_shows_in_a_later_step_undoes_the_stack(kind, words, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [17, 19, 20, 18])
    check_found(kind, words, tmp_path)
