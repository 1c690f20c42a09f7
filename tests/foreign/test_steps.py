"""Masks hold within and after every step, whatever the optimizer does in it; or the fit is refused in one message."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_sparsefl.callbacks import DynamicPruningWithFeedback, mask_owner
from lightning_sparsefl.errors import InvalidOption

CLOSELY = ["StaticMask", "RigL", "GradualPruning", "DynamicPruningWithFeedback", "LotteryRewind"]
"""Kinds that differ in how they hold masks; the others are GradualPruning's and StaticMask's siblings."""


def noise(optimizer: Any, *_: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.add_(0.01)


def gradient_noise(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.add_(0.1)


def with_post_hook(parameters: Any) -> Any:
    optimizer = SGD(parameters, 0.1, momentum=0.9)
    optimizer.register_step_post_hook(noise)
    return optimizer


def with_pre_hook(parameters: Any) -> Any:
    optimizer = SGD(parameters, 0.1, momentum=0.9)
    optimizer.register_step_pre_hook(gradient_noise)
    return optimizer


class Langevin(SGD):
    """Writes after the step of its base class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        noise(self)
        return loss


class SharpnessAware(torch.optim.Optimizer):
    """SAM, with the names of its reference implementation."""

    def __init__(self, parameters: Any, rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho})
        self.base_optimizer = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["old"] = parameter.data.clone()
                    parameter.add_(parameter.grad, alpha=group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = self.state[parameter]["old"]
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss


class Minimal:
    """An optimizer that has what Lightning asks for, and nothing else."""

    def __init__(self, parameters: Any) -> None:
        self._inner = SGD(parameters, 0.1, momentum=0.9)
        self.defaults, self.param_groups, self.state = self._inner.defaults, self._inner.param_groups, self._inner.state

    def state_dict(self) -> Any:
        return self._inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._inner.load_state_dict(state)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self._inner.zero_grad(*args, **kwargs)

    def step(self, closure: Any = None) -> Any:
        return self._inner.step(closure)


OPTIMIZERS = {
    "post hook": with_post_hook,
    "pre hook": with_pre_hook,
    "writes after its base's step": Langevin,
    "SAM": SharpnessAware,
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.05, max_iter=3),
    "no torch optimizer": Minimal,
}


def plain() -> nn.Module:
    """A network without batch norm, whose statistics several evaluations of one batch would confuse."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", CLOSELY)
def test_optimizers_that_do_more_than_a_step(kind, name, project):
    module = project.Net(OPTIMIZERS[name], net=plain())
    if name == "LBFGS" and kind in ("RigL", "DynamicPruningWithFeedback"):
        with pytest.raises(InvalidOption, match="does not support LBFGS, wh"):
            project.fit(kind, module)
        return
    project.fit(kind, module)


def test_global_hooks_of_torch(project):
    handle = register_optimizer_step_post_hook(noise)
    try:
        project.fit("StaticMask", project.Net(lambda parameters: Adam(parameters, 0.01)))
    finally:
        handle.remove()


def test_dpf_with_sam_is_dpf_with_its_two_evaluations_written_out(project):
    """The perturbed loss is that of the pruned weights, and the step is that of the dense ones."""
    module, callback = project.Net(SharpnessAware, net=plain()), DynamicPruningWithFeedback(0.5, every_n_steps=100)
    twin = project.Net(net=plain())
    twin.load_state_dict(module.state_dict())
    masks, moves = {}, []

    class Note(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            moves.append({name: mask.clone() for name, mask in callback.masks.items()})

    project.trainer([callback, Note()], max_epochs=2).fit(module, project.loader())
    weights = dict(twin.named_parameters())
    momentum, dense = {}, {name: weight.detach().clone() for name, weight in weights.items()}
    batches = [batch for _ in range(2) for batch in project.loader()]
    for batch, after in zip(batches, moves, strict=True):

        def gradients(at: Any, batch: Any = batch, masks: Any = masks) -> Any:
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(at[name] * masks[name] if name in masks else at[name])
            twin.zero_grad()
            F.cross_entropy(twin(batch[0]), batch[1]).backward()
            return {name: weight.grad.clone() for name, weight in weights.items()}

        slopes = gradients(dense)
        slopes = gradients({name: dense[name] + 0.05 * slopes[name] for name in dense})
        momentum = {name: 0.9 * momentum.get(name, 0) + slopes[name] for name in slopes}
        dense = {name: dense[name] - 0.1 * momentum[name] for name in dense}
        masks = after
    for name, weight in module.named_parameters():
        expected = dense[name] * masks[name] if name in masks else dense[name]
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", CLOSELY)
def test_several_steps_a_batch(kind, project):
    class Manual(project.Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for _ in range(3):
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
                for optimizer in self.optimizers():
                    optimizer.step()

        def configure_optimizers(self) -> Any:
            matrices = [parameter for parameter in self.parameters() if parameter.dim() == 2]
            others = [parameter for parameter in self.parameters() if parameter.dim() != 2]
            first = torch.optim.Muon(matrices, lr=0.02) if hasattr(torch.optim, "Muon") else Langevin(matrices, 0.02)
            return [first, Adam(others, 0.01)], []

    watch = project.fit(kind, Manual())
    assert watch.forwards >= 3 * 24


@pytest.mark.parametrize("optimizer", [lambda p: SGD(p, 0.1, momentum=0.9), lambda p: Adam(p, 0.1)])
@pytest.mark.parametrize("kind", ["StaticMask", "SET"])
def test_steps_of_the_bare_optimizer(kind, optimizer, project):
    class Manual(project.Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            stepping = self.optimizers(use_pl_optimizer=False)
            stepping.zero_grad()
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            stepping.step()

    mask_owner.warning_cache.clear()
    never_moves = pytest.warns(
        UserWarning, match="`DynamicMask`: the fit ended without a move of the mask, since Light"
    )
    with never_moves if kind == "SET" else nullcontext():
        project.fit(kind, Manual(optimizer))


@pytest.mark.parametrize("kind", CLOSELY)
def test_a_module_that_changes_weights_without_a_step_is_refused(kind, project):
    class Manual(project.Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            optimizer.first_step()
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            optimizer.second_step()

    message = r"`Manual.training_step` changes `net.0.weight` without `step` .* or `optimizer.step\(closure\)`"
    with pytest.raises(InvalidOption, match=message):
        project.fit(kind, Manual(SharpnessAware))


@pytest.mark.parametrize("kind", CLOSELY)
def test_a_part_that_changes_without_a_step_is_refused_beside_one_that_steps(kind, project):
    class Both(project.Net):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__(net=plain())
            self.other = plain()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.manual_backward(F.cross_entropy(self.other(batch[0]), batch[1]))
            second.step()
            for write in (first.first_step, first.second_step):
                self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
                write()

        def configure_optimizers(self) -> Any:
            return [SharpnessAware(self.net.parameters()), SGD(self.other.parameters(), 0.1)], []

    with pytest.raises(InvalidOption, match=r"`Both.training_step` changes `net.0.weight` without `step`"):
        project.fit(kind, Both())


@pytest.mark.parametrize("kind", CLOSELY)
@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_train_batch_start"])
def test_weights_that_the_module_writes_before_a_batch(kind, hook, project):
    class Writing(project.Net):
        def write(self, *_: Any) -> None:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.add_(0.01)

    setattr(Writing, hook, Writing.write)
    project.fit(kind, Writing())


def test_guards_leave_no_trace(project):
    module, other = project.Net(), project.Net()
    trainer = project.fit("RigL", module).trainer
    assert "step" not in vars(trainer.optimizers[0])
    trainer = project.trainer([project.make("StaticMask", layers="net.0*"), project.make("SET", layers="net.3*")])
    trainer.fit(other, project.loader())
    weight = other.net[0].weight
    weight.grad = torch.ones_like(weight)
    trainer.optimizers[0].step()
    assert weight.all()
