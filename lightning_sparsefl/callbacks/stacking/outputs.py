"""Hooks at the outputs of layers for several clients: scalers, masks of logits, early exits, ordered dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sparsefl.callbacks.exits import EarlyExits, deeper_layers, refusal_of, require_exits
from lightning_sparsefl.callbacks.ordered_dropout import OrderedDropout, distillation_loss, logits_of
from lightning_sparsefl.callbacks.stacking.base import Leaves, StackedCallback, StackedPass
from lightning_sparsefl.callbacks.trial import copy_of
from lightning_sparsefl.callbacks.unit_gates import Gate, gates_of, with_first
from lightning_sparsefl.callbacks.width import LabelMask, OutputScaler


@dataclass
class Now:
    """What the hooks of layers know of the batch that is passed, shared by all parts of a counterpart."""

    batch: StackedPass | None = None
    """The batch."""
    part: Any = None
    """The counterpart for the clients of the batch."""
    given: Any = None
    """A copy of the samples from before the training step, where they are passed again after it."""
    logits: dict[int, Tensor] = field(default_factory=dict)
    """Noted outputs, with the clients in dimension 0."""


class StackedOutputs(StackedCallback):
    """Base class of counterparts that register hooks at layers.

    Args:
        module: Module of the user.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._now, self._handles = Now(), list[Any]()

    def hook(self, name: str, function: Callable[..., Any], before: bool = False) -> None:
        """Register a hook.

        Args:
            name: Name of the layer.
            function: Hook in PyTorch's form.
            before: Whether it is called before the layer, with its arguments by name too.
        """
        layer = self.module.get_submodule(name)
        if before:
            self._handles.append(layer.register_forward_pre_hook(function, with_kwargs=True))
        else:
            self._handles.append(layer.register_forward_hook(function))

    def before_pass(self, batch: StackedPass) -> None:
        """Let the hooks know the batch."""
        self._now.batch, self._now.part = batch, self

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._now = Now()


class StackedScaler(StackedCallback):
    """Counterpart of :class:`OutputScaler`: the hooks of one client, which act on the outputs of all."""

    def __init__(self, callbacks: Sequence[OutputScaler], module: nn.Module) -> None:
        self.scaler, self.module = callbacks[0], module

    def start(self, leaves: Leaves) -> None:
        """Register the hooks."""
        self.scaler.register(self.module)

    def release(self) -> None:
        """Remove the hooks."""
        self.scaler.release()


class StackedLabels(StackedOutputs):
    """Counterpart of :class:`LabelMask`."""

    per_client = ("classes",)

    def __init__(self, callbacks: Sequence[LabelMask], module: Any) -> None:
        super().__init__(module)
        self.data = module.trainer.datamodule
        self.callbacks, self.classes = callbacks, dict[str, Tensor]()

    def start(self, leaves: Leaves) -> None:
        """Determine the clients' classes, and register the hook."""
        name = self.callbacks[0].layers[0]
        for callback in self.callbacks:
            callback.find(self.data, self.module)
        self.classes = {"own": torch.stack([callback.classes for callback in self.callbacks])}  # type: ignore[misc]
        self.hook(name, self._masked)

    def _masked(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if not layer.training or self._now.batch is None:
            return None
        return output * self._now.batch.clients(self._now.part.classes["own"])


class StackedExits(StackedOutputs):
    """Counterpart of :class:`EarlyExits`."""

    def __init__(self, callbacks: Sequence[EarlyExits], module: Any) -> None:
        super().__init__(module)
        self.exits, self.depth = callbacks[0], callbacks[0].depth
        parts: int = module.trainer.accumulate_grad_batches
        self._strength = callbacks[0].strength / parts  # as the loss is divided
        self._before: int | None = None

    def start(self, leaves: Leaves) -> None:
        """Limit the module's depth, and register the hooks."""
        module: Any = self.module
        require_exits(module, "`EarlyExits`")
        self._before, module.depth = module.depth, self.depth
        for place, name in enumerate(list(module.exits.values())[: self.depth]):
            self.hook(name, partial(self._note, place))
        for name in deeper_layers(module, self.depth):
            self.hook(name, refusal_of(name, self.depth), before=True)

    def _note(self, place: int, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        batch = self._now.batch
        if layer.training and batch is not None and batch.plain(output).requires_grad:
            self._now.logits[place] = batch.plain(output).detach()
            batch.on_gradient(output, partial(self._slope, place))

    def _slope(self, place: int, slope: Tensor) -> Tensor:
        """Return the gradient by the logits of an exit."""
        slope = slope * self.exits.factor(place)
        if not self.exits.distills:
            return slope
        logits = [self._now.logits[at].to(slope.dtype) for at in range(self.depth)]
        return slope + torch.vmap(self.exits.slopes)(logits)[place] * self._strength

    def release(self) -> None:
        """Remove the hooks, and restore the depth."""
        super().release()
        if self._before is not None:
            self.module.depth = self._before  # type: ignore[assignment]


class StackedDropout(StackedOutputs):
    """Counterpart of :class:`OrderedDropout`: a rate for each client in each step."""

    in_order = ("callbacks",)

    def __init__(self, callbacks: Sequence[OrderedDropout], module: nn.Module) -> None:
        super().__init__(module)
        self.callbacks = callbacks
        self.drawn: list[float] = []
        self.now: list[float] = []

    def start(self, leaves: Leaves) -> None:
        """Register the gates, and note the logits for `distill`."""
        first = self.callbacks[0]
        assert first.groups is not None
        for (name, reads), gates in gates_of(self.module, first.groups, first.rates).items():
            self.hook(name, partial(self._read if reads else self._made, gates), before=reads)
        if first.distill:
            self.hook(logits_of(self.module, first.head), self._note)

    def before_pass(self, batch: StackedPass) -> None:
        """Draw the rates of a step."""
        super().before_pass(batch)
        self.drawn = [callback.draw(step) for callback, step in zip(self.callbacks, batch.steps, strict=True)]
        self.now = self.drawn
        if self.callbacks[0].distill:
            self.now = [max(callback.rates) for callback in self.callbacks]
            self._now.given = copy_of(batch.batch)

    def _read(self, gates: Sequence[Gate], layer: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        return with_first(inputs, named, lambda value: self._gated(layer, value, gates))

    def _made(self, gates: Sequence[Gate], layer: nn.Module, inputs: Any, output: Any) -> Any:
        return self._gated(layer, output, gates)

    def _gated(self, layer: nn.Module, value: Any, gates: Sequence[Gate]) -> Any:
        batch, part = self._now.batch, self._now.part
        if batch is None or not layer.training or not isinstance(value, Tensor):
            return value
        for gate in gates:
            kept = [gate.kept(value, rate) for rate in part.now]
            present = next((units for units in kept if units is not None), None)
            if present is not None:
                units = torch.stack([torch.ones_like(present) if each is None else each for each in kept])
                value = value * batch.clients(units)
        return value

    def _note(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        if layer.training and self._now.batch is not None:
            self._now.logits[0] = self._now.batch.plain(output)

    def after_backward(self, batch: StackedPass) -> None:
        """Add the gradients of the networks with the drawn rates, which the largest ones teach."""
        if not self.callbacks[0].distill:
            return
        teacher, self.now = self._now.logits[0].detach(), self.drawn
        loss = torch.vmap(distillation_loss)
        slopes = batch.gradient(loss=lambda: loss(teacher, self._now.logits[0]), batch=self._now.given)
        for name, slope in slopes.items():
            grad = batch.leaves[name].grad
            if grad is not None:
                grad.add_(slope)
