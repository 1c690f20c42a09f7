"""Passes at a second point of a batch: gradients there, the callbacks that train by them, and what they leave alone."""

from __future__ import annotations

import copy
import itertools
import random
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim import LBFGS, SGD
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torchmetrics import MeanMetric

from lightning_sparsefl.callbacks import (
    DynamicPruningWithFeedback,
    LearnedImportance,
    MetaStep,
    MoreauEnvelope,
    OrderedDropout,
    PersonalMixture,
    PowerPropagation,
    StaticMask,
)
from lightning_sparsefl.callbacks.second_pass import gradient_at
from lightning_sparsefl.callbacks.trial import copy_of
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption

EVERY = {
    "mixture": lambda: PersonalMixture(alpha=0.5, adaptive=True),
    "envelope": lambda: MoreauEnvelope(strength=1.0, lr=0.1, steps=3),
    "meta, first": lambda: MetaStep(lr=0.1),
    "meta, hessian": lambda: MetaStep(lr=0.1, order="hessian"),
}
every_callback = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)


MAKERS = {
    "MetaStep": lambda: MetaStep(lr=0.1),
    "MoreauEnvelope": lambda: MoreauEnvelope(strength=1.0, lr=0.1),
    "PersonalMixture": lambda: PersonalMixture(alpha=0.5),
}


class Quadratic(L.LightningModule):
    """f(w) = curvature / 2 (w - minimum)^2, in float64; each batch is one sample of (curvature, minimum)."""

    def __init__(self, start=0.0, lr=0.1):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start], dtype=torch.float64))
        self.lr, self.note = lr, [].append  # the list itself would be restored after a pass

    @property
    def seen(self):
        return self.note.__self__

    def training_step(self, batch):
        self.note(self.w.item())
        curvature, minimum = batch
        return (curvature / 2 * (self.w - minimum) ** 2).sum()

    def configure_optimizers(self):
        return SGD(self.parameters(), self.lr)


@pytest.fixture
def descend(tmp_path):
    """Trains a quadratic on batches of (curvature, minimum) with a callback, or another module on other batches."""

    def run(callback, batches, start=0.0, lr=0.1, epochs=1, module=None, **options):
        module = module or Quadratic(start, lr)
        columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*batches, strict=True)]
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **options,
        )
        trainer.fit(module, DataLoader(TensorDataset(*columns), batch_size=1))
        return module

    return run


F, G = (1.0, 1.0), (3.0, -1.0)
"""(w - 1)^2 / 2 and 3 (w + 1)^2 / 2."""


def test_a_mixture_of_two_steps(descend):
    callback = PersonalMixture(alpha=0.5)
    module = descend(callback, [F, F])
    assert module.w.item() == pytest.approx(0.19)
    assert callback.personal["w"].item() == pytest.approx(0.09625)
    assert callback.alpha == 0.5
    # <v - w, grad f(mixture)> at the next step
    slope = (0.09625 - 0.19) * ((0.09625 + 0.19) / 2 - 1)
    assert slope == pytest.approx(0.0803320, abs=1e-7)
    descend_again = PersonalMixture(alpha=0.5, adaptive=True, personal=callback.personal)
    descend(descend_again, [F], start=0.19)
    assert descend_again.alpha == pytest.approx(0.5 - 0.1 * slope)


def test_the_share_moves_once_a_fit_and_stays_a_share(descend):
    far = {"w": torch.tensor([-100.0], dtype=torch.float64)}
    callback = PersonalMixture(alpha=0.5, adaptive=True, personal=far)
    descend(callback, [F, F])
    assert callback.alpha == 0.0
    near = PersonalMixture(alpha=0.5, adaptive=True, personal={"w": torch.tensor([0.5], dtype=torch.float64)})
    descend(near, [F, F, F], epochs=2)
    # <0.5 - 0, 0.25 - 1>
    assert near.alpha == pytest.approx(0.5 + 0.1 * 0.375)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_mixture_of_one_part_is_that_part(descend, alpha):
    callback = PersonalMixture(alpha=alpha)
    module = descend(callback, [F, F])
    assert module.w.item() == pytest.approx(0.19)
    assert callback.personal["w"].item() == pytest.approx(0.19 * alpha)


def test_a_second_fit_goes_on_with_the_second_weights(descend):
    callback = PersonalMixture(alpha=1.0)
    descend(callback, [F, F])
    descend(callback, [F], start=5.0)
    assert callback.personal["w"].item() == pytest.approx(1 - 0.9**3)


@pytest.mark.parametrize(("decay", "theta"), [(0.0, 0.06736), (0.001, 0.0673598)])
def test_an_envelope_of_one_batch(descend, decay, theta):
    callback = MoreauEnvelope(strength=15.0, lr=0.1, steps=5, decay=decay)
    module = descend(callback, [F], lr=0.005)
    assert callback.personal["w"].item() == pytest.approx(theta, abs=5e-8)
    assert module.w.item() == pytest.approx(0.005 * 15 * theta, abs=5e-9)
    assert len(module.seen) == 5


def test_an_envelope_of_many_steps_is_its_minimum(descend):
    callback = MoreauEnvelope(strength=15.0, lr=0.1, steps=60)
    module = descend(callback, [F], lr=0.005)
    assert callback.personal["w"].item() == pytest.approx(1 / 16)
    assert module.w.item() == pytest.approx(0.005 * 15 / 16)


def test_personal_weights_are_kept_between_batches_and_not_between_fits(descend):
    callback = MoreauEnvelope(strength=2.0, lr=0.1, steps=1)
    module = descend(callback, [F, F])
    theta, w = 0.1, 0.1 * 2 * 0.1
    theta -= 0.1 * ((theta - 1) + 2 * (theta - w))
    assert callback.personal["w"].item() == pytest.approx(theta)
    assert module.w.item() == pytest.approx(w + 0.1 * 2 * (theta - w))
    descend(callback, [F], start=1.0)
    assert callback.personal["w"].item() == 1.0


def test_a_step_that_passes_the_personal_weights_is_refused(descend):
    with pytest.raises(InvalidOption, match=r"times the optimizer's learning rate is 1.5; expected a product below 1"):
        descend(MoreauEnvelope(strength=15.0, lr=0.1), [F], lr=0.1)


def test_a_meta_step_of_first_order(descend):
    module = descend(MetaStep(lr=0.1), [G, G])
    assert module.seen == pytest.approx([0.0, -0.3])
    assert module.w.item() == pytest.approx(-0.21)


def test_a_meta_step_with_the_hessian(descend):
    module = descend(MetaStep(lr=0.1, order="hessian"), [G, G, G])
    assert module.w.item() == pytest.approx(-0.147)  # a difference of gradients is exact here
    slope = 2.1
    assert module.seen == pytest.approx([0.0, -0.3, -1e-3 * slope, 1e-3 * slope])


@pytest.mark.parametrize("by", ["value", "norm"])
def test_a_meta_step_is_clipped_and_the_batch_before_it_is_not(descend, by):
    options = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": by}
    module = descend(MetaStep(lr=0.1), [G, G], **options)  # the gradient of the step is 2.1
    assert module.seen == pytest.approx([0.0, -0.3])
    assert module.w.item() == pytest.approx(-0.1)
    assert module.trainer.gradient_clip_val == 1.0


class Clipped:
    clip, accumulate = 1.0, 1


def test_a_trainer_clips_again_after_a_batch_that_failed(fit, net):
    class Fails(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            raise RuntimeError(f"clips by {trainer.gradient_clip_val}")

        def on_exception(self, trainer, pl_module, exception):
            self.value = trainer.gradient_clip_val

    fails = Fails()
    with pytest.raises(RuntimeError, match="clips by None"):
        fit(net(), [MetaStep(lr=0.1), fails], Clipped())
    assert fails.value == 1.0


def test_each_batch_of_a_tuple_has_its_own_part(descend):
    module = descend(MetaStep(lr=0.1), [G, F])
    # adapted on 3 (w + 1)^2 / 2, stepped by (w' - 1)
    assert module.w.item() == pytest.approx(0.13)
    module = descend(MetaStep(lr=0.1, order="hessian"), [G, F, G])
    slope = -1.3
    assert module.w.item() == pytest.approx(-0.1 * (slope - 0.1 * 3 * slope))


class TwoParts(L.LightningModule):
    """f(w, v) = (w - 1)^2 / 2 + v^2 / 2, where some batches leave out v, and some have no loss."""

    def __init__(self):
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in (0.0, 1.0))

    def training_step(self, batch):
        kind = int(batch[0])
        loss = (self.w - 1) ** 2 / 2 + (self.v**2 / 2 if kind == 2 else 0)
        return loss.sum() if kind else None

    def configure_optimizers(self):
        return SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    ("order", "batches", "w", "v"),
    [("first", [0, 1, 0, 1], 0.09, 1.0), ("hessian", [1, 1, 2], 0.081, 1.0), ("first", [1, 2], 0.09, 0.9)],
)
def test_parts_of_batches_that_have_no_gradient(descend, order, batches, w, v):
    """A skipped batch is in no tuple, and the third batch of a triple moves nothing that the second one left out."""
    module = descend(MetaStep(lr=0.1, order=order), [(kind,) for kind in batches], module=TwoParts())
    assert (module.w.item(), module.v.item()) == (pytest.approx(w), pytest.approx(v))


def test_tuples_run_over_epochs_and_an_open_one_is_left_out(descend):
    two, three = (descend(MetaStep(lr=0.1), [G] * count, epochs=2) for count in (2, 3))
    alone = descend(MetaStep(lr=0.1), [G] * 4)
    assert two.w.item() == alone.w.item()
    assert three.w.item() == descend(MetaStep(lr=0.1), [G] * 6).w.item()
    assert descend(MetaStep(lr=0.1), [G] * 5).w.item() == alone.w.item()
    again = MetaStep(lr=0.1)
    descend(again, [G])
    assert descend(again, [G, G]).w.item() == pytest.approx(-0.21)


def test_a_meta_step_without_adaptation_is_every_second_batch(descend):
    assert descend(MetaStep(lr=0.0), [G, F, G, F]).w.item() == pytest.approx(0.19)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_accumulated_batches_are_one(descend, accumulate):
    mixture, envelope = PersonalMixture(alpha=0.5), MoreauEnvelope(strength=2.0, lr=0.1, steps=1)
    options = {"accumulate_grad_batches": accumulate}
    for callback in (mixture, envelope, MetaStep(lr=0.1), MetaStep(lr=0.1, order="hessian")):
        many = [batch for batch in (G, F, G) for _ in range(accumulate)]
        once = copy.deepcopy(callback)
        assert descend(callback, many, **options).w.item() == pytest.approx(descend(once, [G, F, G]).w.item())
    assert mixture.personal["w"].item() == pytest.approx(descended_mixture([G, F, G]))


def descended_mixture(batches, alpha=0.5, lr=0.1):
    v = w = 0.0
    for curvature, minimum in batches:
        mixture = alpha * v + (1 - alpha) * w
        v, w = v - lr * alpha * curvature * (mixture - minimum), w - lr * curvature * (w - minimum)
    return v


class Busy(L.LightningModule):
    """Has dropout, running statistics, a metric, a frozen layer, and one that takes no part."""

    def __init__(self, dropout=0.5):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(dropout), nn.Linear(6, 3))
        self.idle, self.frozen = nn.Linear(2, 2), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.mean, self.losses, self.note = MeanMetric(), [], [].append

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.frozen(self.net(batch[0])), batch[1])
        self.mean(loss)
        self.log("mean", self.mean)
        self.losses.append(loss.item())
        self.note(loss.item())
        return {"loss": loss}

    def configure_optimizers(self):
        return SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


class Peek(Callback):
    """Takes the gradient at the module's own weights, and at others, before the training step."""

    def __init__(self):
        self.slopes, self.steps = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        before = copy.deepcopy(pl_module.state_dict())
        random, count = torch.random.get_rng_state(), pl_module.mean._update_count
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in pl_module.named_parameters()}
        elsewhere = {name: torch.zeros_like(p) for name, p in pl_module.named_parameters() if p.dim() > 1}
        gradient_at(trainer, pl_module, batch, batch_idx, elsewhere)
        self.slopes.append(gradient_at(trainer, pl_module, batch, batch_idx, {}))
        for name, p in pl_module.named_parameters():
            assert (p.grad is None and grads[name] is None) or torch.equal(p.grad, grads[name])
        assert all(torch.equal(value, before[name]) for name, value in pl_module.state_dict().items())
        assert torch.equal(torch.random.get_rng_state(), random)
        assert pl_module.mean._update_count == count

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps.append({n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None})


def test_a_gradient_elsewhere_leaves_no_trace_and_sees_the_same_dropout(fit):
    module, peek = Busy(), Peek()
    fit(module, [peek], epochs=2)
    for slopes, steps in zip(peek.slopes, peek.steps, strict=True):
        assert set(slopes) == set(steps) == {n for n, p in module.net.named_parameters(prefix="net")}
        assert all(torch.equal(slope, steps[name]) for name, slope in slopes.items())
    # three passes of each batch; the middle one is at the module's weights with the same dropout as its own
    every = module.note.__self__
    assert every[1::3] == every[2::3] == module.losses
    assert every[0] != every[1]


def test_a_gradient_elsewhere_leaves_hooks_that_remove_themselves(fit):
    """Hooks are in ordered dictionaries, whose order is restored too."""
    module, calls = Busy(), []
    layer = module.net[0]
    layer.register_forward_hook(lambda *_: calls.append("always"))

    def once(*_):
        calls.append("once")
        handle.remove()

    handle = layer.register_forward_hook(once)
    fit(module, [Peek()], epochs=1)
    passes = len(module.note.__self__)
    assert calls.count("always") == passes
    assert calls.count("once") == 3  # in the two passes before the first step, after each of which it is there again


class Holder(Callback):
    """At the end of each batch: the module holds what the optimizer left."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        own = pl_module.own
        for name, p in pl_module.named_parameters():
            assert torch.equal(p, own[name]), name


class Stepped(SGD):
    """Keeps a copy of the weights after each step."""

    def __init__(self, module, *args, **kwargs):
        super().__init__(module.parameters(), *args, **kwargs)
        vars(self)["module"] = module

    def step(self, closure=None):
        loss = super().step(closure)
        self.module.own = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        return loss


@every_callback
def test_the_module_holds_its_own_weights_between_batches(fit, make):
    class Module(Busy):
        def configure_optimizers(self):
            return Stepped(self, 0.1)

    module = Module()
    fit(module, [make(), Holder()], epochs=2)
    assert all(torch.isfinite(p).all() for p in module.parameters())


@every_callback
def test_skipped_batches_leave_the_module_at_its_own_weights(fit, make):
    class Skipping(Busy):
        def on_train_batch_start(self, batch, batch_idx):
            self.at = {name: p.detach().clone() for name, p in self.named_parameters()}
            return -1 if self.current_epoch == 1 and batch_idx == 2 else None

    module, callback = Skipping(dropout=0.0), make()
    fit(module, [callback], epochs=2)
    assert not callback._own
    if not isinstance(callback, PersonalMixture):  # which passes at the module's own weights
        assert any(not torch.equal(p, module.at[name]) for name, p in module.named_parameters())


@every_callback
def test_frozen_and_idle_parameters_stay(fit, make):
    module, callback = Busy(), make()
    before = copy.deepcopy(module.state_dict())
    fit(module, [callback], epochs=1)
    for name in ("frozen.weight", "frozen.bias", "idle.weight", "idle.bias"):
        assert torch.equal(module.state_dict()[name], before[name])
    assert not torch.equal(module.net[0].weight, before["net.0.weight"])


@every_callback
def test_manual_optimization_and_lbfgs_are_refused(fit, make, net):
    class Manual(Busy):
        automatic_optimization = False

    with pytest.raises(InvalidOption, match=r"does not support `Manual`, which optimizes manually"):
        fit(Manual(), [make()])
    module = net()
    module.optimizer = LBFGS
    with pytest.raises(InvalidOption, match=r"does not support LBFGS"):
        fit(module, [make()])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PersonalMixture(alpha=1.5), r"`PersonalMixture\(alpha=1.5\)`: expected a number in \[0, 1\]"),
        (lambda: MoreauEnvelope(strength=0, lr=1), r"`MoreauEnvelope\(strength=0\)`: expected a number above 0"),
        (lambda: MoreauEnvelope(strength=1, lr=0), r"`MoreauEnvelope\(lr=0\)`: expected a number above 0"),
        (lambda: MoreauEnvelope(strength=1, lr=1, steps=0), r"steps=0\)`: expected a whole number >= 1"),
        (lambda: MoreauEnvelope(strength=1, lr=1, decay=-1), r"decay=-1\)`: expected a number >= 0"),
        (lambda: MetaStep(lr=-1), r"`MetaStep\(lr=-1\)`: expected a number >= 0"),
        (lambda: MetaStep(lr=1, order="second"), r"order='second'\)`: expected 'first' or 'hessian'"),
        (lambda: MetaStep(lr=1, delta=0), r"delta=0\)`: expected a number above 0"),
    ],
)
def test_options_out_of_range_are_refused(make, message):
    with pytest.raises(InvalidOption, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("net.0.weight", r"`net.0.weight` in `personal` has shape \(2,\), expected \(6, 4\)"),
        ("net.0.wight", "`net.0.wight` in `personal` is not a tensor of the module"),
    ],
)
def test_second_weights_that_do_not_fit_are_refused(name, message, fit):
    with pytest.raises(IncompatibleMasks, match=message):
        fit(Busy(), [PersonalMixture(alpha=0.5, personal={name: torch.zeros(2)})])


@pytest.mark.parametrize("second", MAKERS)
@pytest.mark.parametrize("first", MAKERS)
def test_two_callbacks_that_pass_batches_elsewhere_are_refused(first, second, fit, net):
    message = rf"`{first}` and `{second}` both pass batches at weights of their own; expected one of them"
    with pytest.raises(InvalidOption, match=message):
        fit(net(), [MAKERS[first](), MAKERS[second]()])


@pytest.mark.parametrize("name", MAKERS)
def test_units_are_drawn_before_a_batch_is_passed_elsewhere(name, fit, net):
    with pytest.raises(
        InvalidOption, match=f"`{name}` comes before `OrderedDropout`, which draws the units of a batch"
    ):
        fit(net(), [MAKERS[name](), OrderedDropout()])
    fit(net(), [OrderedDropout(), MAKERS[name]()])


MASKS = {"StaticMask": lambda: StaticMask(0.5), "LearnedImportance": lambda: LearnedImportance(density=0.5, lr=1.0)}


PAIRS = sorted({*itertools.product(MAKERS, MASKS)} - {("MetaStep", "StaticMask")})


@pytest.mark.parametrize(("name", "owner"), PAIRS)
@pytest.mark.parametrize("first", [True, False])
def test_weights_that_no_mask_holds_are_refused(name, owner, first, fit, net):
    pair = [MASKS[owner](), MAKERS[name]()]
    with pytest.raises(
        InvalidOption, match=f"`{name}` passes .* which `{owner}` does not mask; expected one of the two"
    ):
        fit(net(), pair if first else pair[::-1])


KEEPERS = {
    "PowerPropagation": PowerPropagation,
    "DynamicPruningWithFeedback": lambda: DynamicPruningWithFeedback(density=0.5),
}


@pytest.mark.parametrize(
    ("name", "keeper"), [("MetaStep", kind) for kind in KEEPERS] + [("MoreauEnvelope", "PowerPropagation")]
)
def test_numbers_beside_weights_that_are_returned_are_refused(name, keeper, fit, net):
    with pytest.raises(InvalidOption, match=f"`{keeper}` comes before `{name}` and keeps numbers beside the weights"):
        fit(net(), [KEEPERS[keeper](), MAKERS[name]()])
    if keeper == "PowerPropagation":
        fit(net(), [MAKERS[name](), KEEPERS[keeper]()])


@pytest.mark.parametrize("order", ["first", "hessian"])
def test_a_meta_step_passes_batches_under_the_masks_before_it(order, fit):
    class Watched(Busy):
        def training_step(self, batch, batch_idx):
            assert torch.count_nonzero(self.net[0].weight) == 4
            return super().training_step(batch, batch_idx)

    mask = {"net.0.weight": torch.eye(6, 4, dtype=torch.bool)}
    fit(Watched(), [StaticMask(masks=mask), MetaStep(lr=0.1, order=order)])
    with pytest.raises(InvalidOption, match=r"`MetaStep` passes .* does not mask; expected the masks before it\."):
        fit(Watched(), [MetaStep(lr=0.1, order=order), StaticMask(masks=mask)])


class Averages(Busy):
    """Replaces a buffer, and draws from NumPy and Python, in each step."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.register_buffer("average", torch.zeros(()))
        self.drawn = []

    def training_step(self, batch, batch_idx):
        self.average = 0.9 * self.average + 1
        self.drawn.append((np.random.rand(), random.random()))
        return super().training_step(batch, batch_idx)


def test_a_gradient_elsewhere_restores_replaced_buffers_and_other_random_states(fit):
    module, peek = Averages(), Peek()
    np.random.seed(0)
    random.seed(0)
    fit(module, [peek], epochs=1)
    assert float(module.average) == pytest.approx(sum(0.9**power for power in range(len(peek.steps))))
    np.random.seed(0)
    random.seed(0)
    assert module.drawn == [(np.random.rand(), random.random()) for _ in peek.steps]


class Altering(L.LightningModule):
    """A linear classifier of batches that are mappings, which its training step alters in a way of `kind`."""

    def __init__(self, kind):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 3))
        self.kind = kind

    def training_step(self, batch, batch_idx):
        if self.kind == "writes":
            x, y = batch["x"].mul_(1.5).add_(0.1), batch["y"]
        elif self.kind == "replaces":
            batch["x"] = batch["x"] * 1.5 + 0.1
            x, y = batch["x"], batch["y"]
        elif self.kind == "takes out":
            x, y = batch.pop("x") * 1.5 + 0.1, batch.pop("y")
        else:
            x, y = batch["x"] * 1.5 + 0.1, batch["y"]
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return SGD(self.parameters(), 0.2)


@dataclass
class Tally:
    """What a user's class keeps."""

    number: int = 0
    seen: list = field(default_factory=list)


class Notes(Quadratic):
    """Notes each step in values of many kinds, in place."""

    def __init__(self):
        super().__init__()
        self.number, self.tensor, self.array = 0, torch.zeros(1), np.zeros(1)
        self.held = {"tensor": torch.zeros(1), "list": [torch.zeros(1)]}
        self.words = [str(i) for i in range(20_000)]
        self.tally, self.generator = Tally(), torch.Generator().manual_seed(0)

    def training_step(self, batch):
        self.number += 1
        for each in (self.tensor, self.array, self.held["tensor"], self.held["list"][0]):
            each += 1
        self.words.append("new")
        self.tally.number += 1
        self.tally.seen.append(1)
        self.last = torch.rand(1, generator=self.generator)
        return super().training_step(batch)


@every_callback
def test_further_passes_leave_what_attributes_hold(make, descend):
    module = descend(make(), [F, G, F, G], module=Notes())
    found = [module.number, module.tensor, module.array.item(), module.held["tensor"], module.held["list"][0]]
    found += [len(module.words) - 20_000, module.tally.number, len(module.tally.seen)]
    assert list(map(float, found)) == [4.0] * 8
    generator = torch.Generator().manual_seed(0)
    assert module.last == [torch.rand(1, generator=generator) for _ in range(4)][-1]


def fitted(module, callbacks, loader, tmp_path):
    """Weights after two epochs."""
    torch.manual_seed(0)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=2, callbacks=callbacks, default_root_dir=tmp_path, **options)
    trainer.fit(module, loader)
    return module.state_dict()


PASSING_TWICE = {
    **EVERY,
    "ordered": lambda: OrderedDropout(rates=(0.5, 1.0)),
    "ordered, distilled": lambda: OrderedDropout(rates=(0.5, 1.0), distill=True),
    "learned": lambda: LearnedImportance(0.5),
}


@pytest.mark.parametrize("make", PASSING_TWICE.values(), ids=PASSING_TWICE)
@pytest.mark.parametrize("kind", ["writes", "replaces", "takes out"])
def test_each_pass_has_the_samples_as_they_were_read(kind, make, tmp_path):
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    items = [{"x": row, "y": int(row[:3].argmax())} for row in x]
    found = [fitted(Altering(each), [make()], DataLoader(items, batch_size=4), tmp_path) for each in (kind, "plain")]
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


class HalvesBefore(Altering):
    """Halves the inputs in a hook before its training step."""

    def on_train_batch_start(self, batch, batch_idx):
        batch["x"].mul_(0.5)


class Halves(Callback):
    """Halves the inputs in place, or as a new entry."""

    def __init__(self, replaces):
        self.replaces = replaces

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.replaces:
            batch["x"] = 0.5 * batch["x"]
        else:
            batch["x"].mul_(0.5)


@pytest.mark.parametrize("kind", ["writes", "replaces", "takes out"])
@pytest.mark.parametrize(
    ("make", "further"),
    [(HalvesBefore, ()), (Altering, (Halves(True),)), (Altering, (Halves(False),))],
    ids=["of the module", "replaces", "writes"],
)
def test_the_pass_that_is_taught_has_what_hooks_have_made_of_the_batch(make, further, kind, tmp_path):
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    found = []
    for each, hooks, scale in ((kind, (make, further), 1.0), ("plain", (Altering, ()), 0.5)):
        items = [{"x": scale * row, "y": int(row[:3].argmax())} for row in x]
        module, callbacks = hooks[0](each), [OrderedDropout(rates=(0.5, 1.0), distill=True), *hooks[1]]
        found.append(fitted(module, callbacks, DataLoader(items, batch_size=4), tmp_path))
        assert "training_step" not in vars(module)
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


@dataclass
class Pieces:
    """A batch whose entries are attributes."""

    x: torch.Tensor
    y: torch.Tensor

    def __getitem__(self, key):
        return getattr(self, key)


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor

    def to(self, *args, **options):
        return Frozen(self.x.to(*args, **options))


class Scaled(dict):
    """A mapping with an attribute."""

    scale = None


class Kept(MutableMapping):
    """A mapping with its entries in an attribute."""

    def __init__(self, entries):
        self.entries = dict(entries)

    def __getitem__(self, key):
        return self.entries[key]

    def __setitem__(self, key, value):
        self.entries[key] = value

    def __delitem__(self, key):
        del self.entries[key]

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


class Locked(dict):
    """A mapping whose entries are fixed."""

    def __setitem__(self, key, value):
        raise RuntimeError("locked")


class Numbered(list):
    """A list that is made in another way."""

    def __init__(self, first, *rest):
        super().__init__([first, *rest])


Pair = namedtuple("Pair", ["x", "y"], defaults=[None])


def test_copies_of_batches_keep_what_they_are():
    x = torch.zeros(2)
    scaled = Scaled(x=x)
    scaled.scale = 3.0
    held = (
        Frozen(x),
        scaled,
        Numbered(x, 1),
        Pair(x),
        UserDict(x=x),
        OrderedDict(x=x),
        [x, None, "name"],
        Kept({"x": x}),
    )
    copied = copy_of(held)
    assert [type(each) for each in copied] == [type(each) for each in held]
    assert copied[0] is not held[0]
    assert copied[1].scale == 3.0
    own = [copied[0].x, *(copied[i]["x"] for i in (1, 4, 5, 7)), copied[2][0], copied[3].x, copied[6][0]]
    assert all(torch.equal(each, x) and each is not x for each in own)
    copied[2].pop()
    copied[4].pop("x")
    copied[7].pop("x")
    assert (len(held[2]), list(held[4]), list(held[7]), copied[6][1:]) == (2, ["x"], ["x"], [None, "name"])
    largest = torch.ones(2, 2).max(0)
    assert copy_of(largest).values is not largest.values


@pytest.mark.parametrize(
    "make", [PASSING_TWICE["ordered, distilled"], PASSING_TWICE["learned"]], ids=["ordered", "learned"]
)
@pytest.mark.parametrize(
    ("made", "kind"),
    [(lambda entries: Pieces(**entries), "writes"), (Kept, "writes"), (Kept, "takes out")],
    ids=["dataclass, writes", "mapping, writes", "mapping, takes out"],
)
def test_each_pass_has_the_samples_of_a_batch_of_an_own_class(made, kind, make, tmp_path):
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    items = [{"x": row, "y": int(row[:3].argmax())} for row in x]
    found = []
    for each in (kind, "plain"):
        loader = DataLoader(items, batch_size=4, collate_fn=lambda rows: made(default_collate(rows)))
        found.append(fitted(Altering(each), [make()], loader, tmp_path))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


@dataclass
class Node:
    """A batch whose parts know it."""

    x: torch.Tensor
    parts: list = field(default_factory=list)

    def __post_init__(self):
        self.parent = None

    def with_part(self, x):
        self.parts.append(Node(x))
        self.parts[-1].parent = self
        return self


class Slotted(Kept):
    """A mapping without a `__dict__` of its own entries."""

    __slots__ = ("entries",)


def test_copies_of_batches_have_one_copy_of_what_is_in_several_places():
    x = torch.zeros(2)
    whole = Node(x).with_part(x)
    copied, pair = copy_of([whole, (x, x)])
    assert copied.parts[0].parent is copied is not whole
    assert copied.x is copied.parts[0].x is pair[0] is pair[1] is not x
    slotted = Slotted({"x": x})
    copy_of(slotted).pop("x")
    assert list(slotted) == ["x"]


def test_a_copy_that_has_no_memory_fails(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "clone", mock.Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        copy_of([{"x": torch.zeros(1)}])


@pytest.mark.parametrize("held", [(number for number in range(3)), Locked(x=1)], ids=["generator", "locked"])
def test_what_cannot_be_copied_is_shared(held):
    assert copy_of(held) is held
