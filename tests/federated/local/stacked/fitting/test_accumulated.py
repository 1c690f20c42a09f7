"""Stacks whose optimizer steps are made of the gradients of several batches."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_sparsefl import FedDIP, FedMef, FedSpa, PFedMe
from lightning_sparsefl.callbacks import StaticMask
from lightning_sparsefl.federated.local.stacked.fitting.accumulated import AccumulatedGradients
from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from tests.federated.local.stacked.test_odd_modules import Plain, check, said_alone


class LogsNorms(Plain):
    """Logs norms of the gradients of each batch and of each step."""

    def on_after_backward(self):
        norms = {f"{name} so far": norm for name, norm in grad_norm(self.net, norm_type=2).items()}
        self.log_dict(norms, on_step=False, on_epoch=True)

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self.net, norm_type=2))


class ReplacesGradients(Plain):
    """Replaces gradients that the next batch adds to."""

    def on_after_backward(self):
        weight = self.net[0].weight
        weight.grad = weight.grad - weight.grad.mean(1, keepdim=True)


class ReadsLosses(Plain):
    """Adds the loss of the last batch, as Lightning shows it, to the next one."""

    def on_train_start(self):
        self.last = torch.zeros((), dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        self.log("loss", loss := self.loss(batch) * (1 + 0.1 * self.last))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.last = outputs["loss"]


class HasTwoHeads(Plain):
    """Trains one of two heads in turn, so that each is without a gradient in some batches."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(6, 4)

    def training_step(self, batch, batch_idx):
        hidden = self.net[:2](batch[0])
        logits = self.second(hidden) if batch_idx % 2 else self.net[2](hidden)
        return nn.functional.cross_entropy(logits, batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class HasTwoHeadsOfAdam(HasTwoHeads):
    """Takes equal numbers of steps of which the same head has other numbers, from 3 and from 4 batches."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Clamp(torch.autograd.Function):
    """Limits the gradients of activations, so that a part of the loss has more than its part of them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, slope):
        return slope.clamp(-0.1, 0.1)


class Clamps(Plain):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net[2](Clamp.apply(self.net[:2](batch[0]))), batch[1])


class CountsSteps(Plain):
    """Weighs its loss by the number of optimizer steps."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / (1 + 0.5 * self.global_step)


class WarmsUp(Plain):
    """Raises the learning rate from step to step, towards the number of steps that Lightning estimates."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(
    "kind",
    [
        *(Plain, LogsNorms, ReplacesGradients, ReadsLosses, HasTwoHeads, HasTwoHeadsOfAdam, Clamps, CountsSteps),
        WarmsUp,
    ],
)
def test_gradients_are_accumulated_as_those_of_one_client(kind, parts, tmp_path):
    sizes, said = check(kind, tmp_path, max_epochs=3, accumulate_grad_batches=parts, gradient_clip_val=1.0)
    assert sum(sizes) >= 4
    assert not said_alone(said) or kind is WarmsUp  # of clients with other numbers of batches than all others


class WritesMasked(Plain):
    """Writes into a weight that a method masks, before the loss."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[2].weight.add_(0.01)
        return self.loss(batch)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("algorithm", [FedSpa(density=0.5), FedDIP(density=0.5), FedMef(density=0.3)])
def test_weights_under_masks_that_a_batch_without_a_step_writes(algorithm, parts, tmp_path):
    sizes, _ = check(WritesMasked, tmp_path, accumulate_grad_batches=parts, algorithm=algorithm)
    assert sizes


class ReadsAtEnd(Callback):
    """Decays weights by the norm of the gradients that the last batch has left."""

    stackable = True

    def on_fit_start(self, trainer, pl_module):
        self.norm = 0.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.norm = float(pl_module.net[0].weight.grad.norm())

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for parameter in pl_module.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.1 * self.norm)


def scale(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


@torch.no_grad()
def write(module):
    module.net[2].weight.add_(0.01)


def mask():
    kept = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    return StaticMask(masks={"net.2.weight": kept})


def acting(hook, act):
    """Return a class of callbacks that do something to the module in a hook."""
    return type("Acts", (Callback,), {"stackable": True, hook: lambda self, trainer, pl_module, *args: act(pl_module)})


ACTING = {
    "scales at the end": acting("on_train_batch_end", scale),
    "scales at the start": acting("on_train_batch_start", scale),
    "reads at the end": ReadsAtEnd,
    "writes at the end": acting("on_train_batch_end", write),
    "writes after the backward pass": acting("on_after_backward", write),
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ACTING.values(), ids=ACTING)
def test_callbacks_see_gradients_that_wait_and_masks_hold_what_they_write(kind, parts, tmp_path):
    for place, callbacks in enumerate(([kind(), mask()], [mask(), kind()])):
        folder = tmp_path / str(place)
        sizes, _ = check(Plain, folder, accumulate_grad_batches=parts, client_callbacks=callbacks)
        assert sizes


def test_a_method_that_acts_on_each_batch_trains_its_clients_one_after_another(tmp_path):
    sizes, said = check(Plain, tmp_path, accumulate_grad_batches=2, algorithm=PFedMe(lam=2.0))
    assert not sizes
    assert any("MoreauEnvelope" in text and "`trainer.accumulate_grad_batches: 2`" in text for text in said_alone(said))


def test_clients_of_which_some_have_a_gradient_are_not_added_up():
    sums, leaf = AccumulatedGradients(2, 2), torch.ones(2, 3)
    first = leaf.detach()[:1]
    first.grad = torch.ones(1, 3)
    sums.keep(0, 1, {"weight": first})
    leaf.grad = torch.ones(2, 3)
    with pytest.raises(NotStackable, match="`weight` for some of the clients alone"):
        sums.add_to(0, 2, {"weight": leaf})
