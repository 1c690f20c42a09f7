"""Ordered dropout: in each step the last units of every layer are left out.

Horvath et al., "FjORD: Fair and accurate federated learning under heterogeneous targets with ordered dropout",
NeurIPS 2021, arXiv:2102.13451, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_sparsefl.callbacks.layers import require_units
from lightning_sparsefl.callbacks.loss_scaling import loss_scale
from lightning_sparsefl.callbacks.options import check_arguments, require
from lightning_sparsefl.callbacks.reported_steps import ReportedCallback
from lightning_sparsefl.callbacks.training_units import units_in_training
from lightning_sparsefl.callbacks.trial import copy_of, trial, trial_loss
from lightning_sparsefl.callbacks.unit_gates import Gate, gates_of, with_first
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.attributes import attribute_replaced
from lightning_sparsefl.sparse.layer_groups import head_layer
from lightning_sparsefl.sparse.units import UnitGroup
from lightning_sparsefl.sparse.uses import uses_of


class OrderedDropout(ReportedCallback):
    """Draws a rate p for each optimizer step, and trains the first ``ceil(p C)`` of each layer's C units alone.

    The other units are multiplied by zero where layers put them out and where others read them, so that neither
    biases nor norms of dropped units have an effect. In evaluation all units are there. Units of recurrent layers are
    dropped where others read them, and stay in the recurrence. ``forward`` has to call the layers: where it computes
    with their weights itself, as by ``F.linear(x, self.fc.weight)``, no unit is dropped.

    With `distill`, each batch is passed twice: with the largest rate, by the module's own loss, and with the drawn one,
    by the cross-entropy against the softmax of the first pass's logits.

    Under ``torch.compile`` every rate is compiled on its own when it is first drawn, which can take more variants than
    ``torch._dynamo.config.recompile_limit`` allows; torch runs a module uncompiled beyond that limit, so raise it.

    Args:
        rates: Rates to draw from, each equally likely, in (0, 1].
        seed: Seed of the draws.
        distill: Whether the largest network teaches the drawn one.
        head: Name of the layer with the logits, for `distill`; None = the last linear layer.
        groups: The module's groups of units, if they are known; None = they are found in the first training step. If
            the module was cut to the units of the largest rate, those of the full module.

    Raises:
        InvalidOption: If an option is out of its range, the module has no units, or has them between weights that are
            not those of layers, `distill` meets manual optimization, or `training_step` steps a bare optimizer.

    Example:
        >>> OrderedDropout(rates=[0.5, 1.0]).rates
        (0.5, 1.0)
    """

    _of_a_fit = ("_handles", "_layers", "_now", "_batch", "_logits", "_undo", "log", "log_dict")

    @check_arguments
    def __init__(
        self,
        rates: Sequence[float] = (0.2, 0.4, 0.6, 0.8, 1.0),
        seed: int = 0,
        distill: bool = False,
        head: str | None = None,
        groups: Sequence[UnitGroup] | None = None,
    ) -> None:
        fits = len(rates) > 0 and all(0 < rate <= 1 for rate in rates)
        require(fits, "OrderedDropout", "rates", rates, "one or more numbers in (0, 1]")
        super().__init__()
        self.rates, self.seed, self.distill, self.head, self.groups = tuple(rates), seed, distill, head, groups
        self._drawn, self._stepped, self._rate = 0, True, max(self.rates)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the references to a fit that is under way."""
        return {name: value for name, value in vars(self).items() if name not in self._of_a_fit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the callback in the state outside of a fit."""
        vars(self).update(state)
        self._forget()

    def _forget(self) -> None:
        """Set the references to a fit's module to their values outside of a fit."""
        self._handles: list[Any] = []
        self._layers: dict[str, nn.Module] = {}
        self._now, self._batch, self._undo = max(self.rates), (None, 0), ExitStack()
        self._logits: Tensor | None = None

    def draw(self, number: int) -> float:
        """Return the rate of a step.

        Args:
            number: Number of the draw, from 0.
        """
        place = torch.randint(len(self.rates), (), generator=generator(self.seed, "ordered dropout", number))
        return self.rates[int(place)]

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Begin with the first draw, unless a checkpoint says otherwise."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._drawn, self._stepped, self._rate = 0, True, max(self.rates)

    def held(self) -> dict[str, nn.Module]:
        """Return the layers whose units are dropped."""
        return self._layers

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Refuse manual optimization where the callback adds to gradients, and bare optimizers."""
        if self.distill and not pl_module.automatic_optimization:
            raise InvalidOption(
                f"`OrderedDropout(distill=True)` does not support `{type(pl_module).__name__}`, which optimizes "
                "manually; expected `automatic_optimization = True`."
            )
        super().on_fit_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Draw a rate after each step."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if not self._handles:
            self._register(pl_module, self.groups or units_in_training(pl_module, batch, batch_idx))
        if self._stepped:
            self._rate, self._drawn, self._stepped = self.draw(self._drawn), self._drawn + 1, False
        self._now = self._rate
        if self.distill:
            self._now = max(self.rates)
            self._keep_batch(pl_module, batch_idx)

    def _keep_batch(self, module: LightningModule, batch_idx: int) -> None:
        """Copy the batch when the training step is called: after what hooks do to it, and before what the step does."""
        self._undo.close()  # after a batch that was skipped
        step = module.training_step

        @wraps(step)
        def keeping(batch: Any, *rest: Any) -> Any:
            self._undo.close()
            self._batch = (copy_of(batch), batch_idx)
            return step(batch, *rest)

        self._undo.enter_context(attribute_replaced(module, "training_step", keeping))

    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        """Add the gradient of the network with the drawn rate, which the largest one teaches."""
        if not self.distill:
            return
        teacher, self._now = self._taken(pl_module).detach(), self._rate
        scale = loss_scale(trainer) / trainer.accumulate_grad_batches
        parameters = [parameter for parameter in pl_module.parameters() if parameter.grad is not None]
        with trial(pl_module), torch.enable_grad():
            with trainer.precision_plugin.forward_context():
                trial_loss(pl_module, *self._batch)
            loss = distillation_loss(teacher, self._taken(pl_module))
            found = torch.autograd.grad(loss * scale, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, found, strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad.add_(trainer.strategy.reduce(gradient))  # the mean of several processes, as `grad` is

    def _taken(self, module: LightningModule) -> Tensor:
        """Take the logits of the last pass, so that no other pass finds them."""
        logits, self._logits = self._logits, None
        if logits is None:
            raise InvalidOption(
                f"`OrderedDropout(distill=True)` finds no logits, since `{type(module).__name__}.training_step` does "
                f"not call `{logits_of(module, self.head)}`; name the layer of the logits with `head`."
            )
        return logits

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Note that the next batch gets another rate."""
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        self._stepped = True

    # ---- gates

    def _register(self, module: LightningModule, groups: Sequence[UnitGroup]) -> None:
        require_units(groups, module, "OrderedDropout", "linear or convolutional")
        for (name, reads), gates in gates_of(module, groups, self.rates).items():
            layer = self._layers[name] = module.get_submodule(name)
            if reads:
                self._handles.append(
                    layer.register_forward_pre_hook(_Hook(partial(self._read, gates)), with_kwargs=True)
                )
            else:
                self._handles.append(layer.register_forward_hook(_Hook(partial(self._made, gates))))
        if self.distill:
            layer = module.get_submodule(logits_of(module, self.head))
            self._handles.append(layer.register_forward_hook(_Hook(self._note_logits)))

    def _read(self, gates: Sequence[Gate], layer: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        return with_first(inputs, named, lambda value: self._gated(layer, value, gates))

    def _made(self, gates: Sequence[Gate], layer: nn.Module, inputs: Any, output: Any) -> Any:
        return self._gated(layer, output, gates)

    def _gated(self, layer: nn.Module, value: Any, gates: Sequence[Gate]) -> Any:
        if layer.training and isinstance(value, Tensor):
            for gate in gates:
                value = gate(value, self._now)
        return value

    def _note_logits(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        if layer.training:
            self._logits = output

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._undo.close()
        super()._release()
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of draws and the rate of the current step."""
        return {"drawn": self._drawn, "rate": self._rate, "stepped": self._stepped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the draws of a checkpoint."""
        self._drawn, self._rate, self._stepped = state_dict["drawn"], state_dict["rate"], state_dict["stepped"]


class _Hook:
    """A hook of a layer, which a deep copy of the module shares, and which does nothing in one that was pickled.

    Args:
        function: Function to call; None = none.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *call: Any) -> Any:
        """Return what the function returns."""
        return None if self._function is None else self._function(*call)

    def __deepcopy__(self, memo: Any) -> _Hook:
        """Return this hook, as the copy of a function would be."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out the callback and its gates, which belong to a fit."""
        return _Hook, ()


def logits_of(module: nn.Module, head: str | None) -> str:
    """Return the name of the layer with the logits.

    Args:
        module: Module that is trained.
        head: Name of the layer; None = the last linear layer.
    """
    return head_layer(dict(module.named_parameters()), head, uses_of(module))


def distillation_loss(teacher: Tensor, logits: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits against the teacher's softmax.

    Args:
        teacher: Logits of the teacher, classes in the last dimension.
        logits: Logits of the taught network, of the same shape.

    Example:
        >>> distillation_loss(torch.zeros(1, 2), torch.zeros(1, 2))
        tensor(0.6931)
    """
    return -(_real(teacher).softmax(-1) * _real(logits).log_softmax(-1)).sum(-1).mean()


def _real(logits: Tensor) -> Tensor:
    """Return logits in single precision at least."""
    return logits if logits.dtype == torch.float64 else logits.float()
