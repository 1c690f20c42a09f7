"""Hooks of a module that see batches: they run once for all clients of a stack that step together."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from lightning_sparsefl import FedAvg, FedDIP, FedLPS, FedSpa, PerFedAvg, PerFedMask, SplitMix
from tests.federated.local.stacked import test_odd_modules as odd
from tests.federated.local.stacked.fitting.test_module_hooks import Raised
from tests.federated.local.stacked.test_odd_modules import Plain, check, check_alone, said_alone


class Smoothed(Plain):
    """Moves the weights of a second network after those of the first one, and trains by it."""

    def __init__(self):
        super().__init__()
        self.slow = self.layers().requires_grad_(False)

    def on_train_start(self):
        for slow, own in zip(self.slow.parameters(), self.net.parameters(), strict=True):
            slow.copy_(own.detach())

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for slow, own in zip(self.slow.parameters(), self.net.parameters(), strict=True):
            slow.mul_(0.9).add_(0.1 * own)

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        return F.cross_entropy(logits, batch[1]) + F.mse_loss(logits, self.slow(batch[0]))


class CollectsOutputs(Plain):
    def __init__(self):
        super().__init__()
        self.right, self.losses = [], []

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits.detach(), "number": batch_idx}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["number"] == batch_idx
        self.right.append((outputs["logits"].argmax(1) == batch[1]).double())
        self.losses.append(outputs["loss"])
        self.log("loss", outputs["loss"])
        self.log("both", outputs["loss"], on_step=True, on_epoch=True)
        self.log("steps", float(self.global_step))

    def on_train_epoch_end(self):
        self.log("right", torch.cat(self.right).mean())
        self.log("mean", torch.stack(self.losses).mean())
        self.right.clear()
        self.losses.clear()


class WarmsUp(Plain):
    """Sets the learning rate before each batch, by the number of steps."""

    def on_train_batch_start(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1 * min(1.0, (self.global_step + 1) / 4)


class Noted(Plain):
    """Logs the learning rate after each batch, which a scheduler changes between epochs."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("rate", self.optimizers().param_groups[0]["lr"], on_step=True, on_epoch=True)
        self.log("epoch", float(self.current_epoch), on_step=False, on_epoch=True)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class NotedByStep(Noted):
    def configure_optimizers(self):
        optimizer = Plain.configure_optimizers(self)
        rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
        return [optimizer], [{"scheduler": rates, "interval": "step"}]


class RatesByEpoch(Plain):
    """The scheduler asks for the epoch, which is the one that ends."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 / (1 + self.current_epoch))]


class WritesIntoTheBatch(Plain):
    def on_train_batch_start(self, batch, batch_idx):
        batch[0].mul_(0.5).add_(self.net[0].bias.detach().mean())


class Begins(Plain):
    """Has values of each client from the start of a fit, and counts in a metric object."""

    def __init__(self):
        super().__init__()
        self.loss_of = MeanMetric()

    def on_fit_start(self):
        self.first = self.net[0].weight.detach().clone()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.loss_of.update(outputs["loss"])
        self.log("drift", (self.net[0].weight - self.first).detach().norm())
        self.log("loss_of", self.loss_of, on_step=False, on_epoch=True)


class Scored(Plain):
    """Computes scores in the hooks of an evaluation's batches."""

    def __init__(self):
        super().__init__()
        self.found = []

    def test_step(self, batch, batch_idx):
        return {"logits": self(batch[0]), "number": batch_idx}

    def on_test_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.number = batch_idx

    def on_test_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        assert outputs["number"] == batch_idx == self.number
        self.log("test_loss", F.cross_entropy(outputs["logits"], batch[1]))
        self.found.append(outputs["logits"].argmax(1) == batch[1])

    def on_test_epoch_end(self):
        self.log("test_acc", torch.cat(self.found).double().mean())
        self.found.clear()


RAGGED = list(odd.SIZES)
KINDS = [Smoothed, CollectsOutputs, WarmsUp, Noted, NotedByStep, RatesByEpoch, WritesIntoTheBatch, Begins, Scored]


@pytest.mark.parametrize("sizes", [RAGGED, pytest.param([20] * 4, marks=pytest.mark.slow)], ids=["ragged", "even"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_sees_the_batch_of_each_client(kind, sizes, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", sizes)
    stacks, said = check(kind, tmp_path)
    alone = kind is WarmsUp and sizes is RAGGED  # a rate of one client is that of all
    # clients with equally many batches, whose learning rates change at the same time
    apart = kind in (Noted, NotedByStep) and sizes is RAGGED
    assert stacks == ([] if alone else [2, 2] if apart else [4, 4]), said
    assert bool(said_alone(said)) == alone


class RaisedInBatches(Raised):
    """Writes weights that a mask does not keep, before or after a batch."""

    def on_train_batch_start(self, batch, batch_idx):
        self.write("on_train_batch_start")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.write("on_train_batch_end")

    def on_train_epoch_end(self):
        self.log("size", self.net[0].weight.detach().abs().sum())


OTHERS = [FedAvg(), FedDIP(), FedLPS(ratio="fixed"), SplitMix(bases=2), PerFedAvg()]
METHODS = [FedSpa(), *(pytest.param(algorithm, marks=pytest.mark.slow) for algorithm in OTHERS)]


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize("algorithm", METHODS, ids=lambda algorithm: type(algorithm).__name__)
def test_what_a_hook_writes_under_a_mask_is_zeroed(algorithm, hook, tmp_path):
    sizes, _ = check(type("Raised", (RaisedInBatches,), {"hook": hook}), tmp_path, algorithm=algorithm)
    assert bool(sizes) == (not isinstance(algorithm, PerFedAvg))  # whose callback would act after the hook


class Decays(Plain):
    """Writes all weights by one factor, also those that are the same for all clients."""

    place = ""

    def training_step(self, batch, batch_idx):
        self.decay("training_step")
        return self.loss(batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.decay("on_train_batch_end")

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.decay("on_validation_batch_start")

    @torch.no_grad()
    def decay(self, place):
        if place == self.place:
            for parameter in self.parameters():
                parameter.mul_(0.95)


class Held(odd.Data):
    """Data of which each client holds some samples out."""

    def __init__(self, *args):
        super().__init__(*args)
        self.eval_split, self.val_fraction = "val", 0.4


@pytest.mark.parametrize("place", ["training_step", "on_train_batch_end", "on_validation_batch_start"])
def test_weights_that_are_stored_once_are_not_written_several_times(place, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [13, 22, 31, 40])
    monkeypatch.setattr(odd, "Data", Held)
    _, said = check(type("Decays", (Decays,), {"place": place}), tmp_path, algorithm=PerFedMask())
    assert any("writes into a weight that is the same for all clients" in text for text in said_alone(said))


class LowersByTheRate(Callback):
    """A callback of a user that reads the learning rate after each batch."""

    stackable = True

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(1 - 0.1 * rate)


class Scheduled(Plain):
    interval = "epoch"

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": rates, "interval": self.interval}]


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_callback_sees_the_rates_after_the_schedulers(interval, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [12] * 4)
    kind = type("Scheduled", (Scheduled,), {"interval": interval})
    sizes, said = check(kind, tmp_path, client_callbacks=[LowersByTheRate()])
    assert sizes == [4, 4]
    assert not said_alone(said)


class EndsTheEpoch(Plain):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 1 else None


class Stops(Plain):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.should_stop = self.global_step > 2


class Output:
    def __init__(self, logits):
        self.logits = logits


class ReturnsAnObject(Plain):
    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "output": Output(logits.detach())}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("size", outputs["output"].logits.norm())


class ReadsSlopes(Plain):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("slope", self.net[0].weight.grad.norm())


class SwapsALayer(Plain):
    def on_train_batch_start(self, batch, batch_idx):
        self.net[1] = nn.Sigmoid() if batch_idx % 2 else nn.Tanh()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (EndsTheEpoch, "is preceded by `on_train_batch_start`, which ends the epoch of a client"),
        (Stops, "sets `trainer.should_stop`"),
        (ReturnsAnObject, "returns a `Output` to a hook, of which each client has its own"),
        (ReadsSlopes, "is followed by `on_train_batch_end`, which reads the gradient (`grad`) of a tensor"),
        (SwapsALayer, "changes layers of the module, their modes or their hooks, which all clients share"),
    ],
)
def test_what_a_hook_cannot_do_for_all_is_named(kind, words, tmp_path):
    check_alone(kind, words, tmp_path)
