"""The module's passes over one batch of each of several clients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.callbacks.trial import copy_of
from lightning_sparsefl.federated.local.fast.steps import StepCaller
from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.logs import NotStackable, StackedLog
from lightning_sparsefl.federated.local.stacked.metrics.states import MetricRows
from lightning_sparsefl.federated.local.stacked.states.leaves import StackedModule, unwrapped
from lightning_sparsefl.sparse.modes import random_restored


class BatchPass:
    """One batch of each of several clients, as the counterparts of callbacks see it.

    See :class:`~lightning_sparsefl.callbacks.stacking.StackedPass`.

    Args:
        part: Tensors of the clients.
        caller: Caller of the module's training step.
        batch: Batch whose tensors have the clients in dimension 0.
        number: Number of the batch in the epoch.
        log: Receiver of what the training step logs.
        steps: Number of optimizer steps that each client has taken.
        metrics: States of the module's metric objects.
    """

    def __init__(
        self,
        part: StackedModule,
        caller: StepCaller,
        batch: Any,
        number: int,
        log: StackedLog,
        steps: Sequence[int],
        metrics: MetricRows,
    ) -> None:
        self.part, self.batch, self.number, self.log, self.steps = part, batch, number, log, steps
        self.metrics = metrics
        self._caller, self._level = caller, 0
        self.parts = 1
        """Number of batches whose gradients make one optimizer step, by which Lightning divides the loss."""
        self.losses = torch.empty(0)
        """Losses of the training step, one for each client, divided by :attr:`parts`."""
        self.outputs: dict[str, Any] = {}
        """What a hook sees of what the training step returns, if :attr:`has_outputs`."""
        self.has_outputs = False
        """Whether a hook sees what the training step returns."""
        self.has_own_gradients = False
        """Whether a hook has assigned gradients in the place of those of the backward pass."""

    @property
    def leaves(self) -> Mapping[str, Tensor]:
        """Weights of the clients."""
        return self.part.leaves

    def train(self) -> Tensor:
        """Run the training step, and return the losses.

        Raises:
            NotStackable: If the training step does something that has no meaning for several clients at once.
        """
        losses, beside = self._run(self.part, self.batch)
        self.losses = losses if self.parts == 1 else losses / self.parts
        if self.has_outputs:
            self.outputs = {**beside, "loss": self.losses.detach().clone()}
        return self.losses

    def _run(self, part: StackedModule, given: Any) -> tuple[Tensor, Mapping[str, Any]]:
        """Return the losses of the training step, and what it returns beside them."""

        def run(batch: Any, level: int) -> Any:
            self._level = self.log.level = level
            with self.metrics.shown(level):
                return self._caller(batch, self.number)

        output = part.call(run, given)
        outputs = output if isinstance(output, Mapping) else {"loss": output}
        loss = outputs["loss"]
        if not isinstance(loss, Tensor):
            raise NotStackable(f"returns {loss!r} instead of a loss")
        if loss.shape != (part.size,):
            raise NotStackable(f"returns a loss of shape {tuple(loss.shape[1:])}")
        return loss, outputs

    def gradient(
        self,
        weights: Mapping[str, Tensor] | None = None,
        loss: Callable[[], Tensor] | None = None,
        batch: Any = None,
    ) -> dict[str, Tensor]:
        """Return the gradients of a further pass, which leaves no trace: no logs, no statistics, no random numbers.

        Args:
            weights: Weights to take the gradients at; names that are missing, and None, are those of the clients.
            loss: Function that is called after the pass and returns one loss for each client; None = the loss that
                `training_step` returns.
            batch: Batches to pass, a copy from before the training step; None = a copy of the present ones.
        """
        part = copy.copy(self.part)
        other = {name: value.detach().requires_grad_() for name, value in (weights or {}).items()}
        part.leaves, part.shared = {**self.part.leaves, **other}, self.part.shared - other.keys()
        wanted = {name: leaf for name, leaf in part.leaves.items() if leaf.requires_grad}
        with self.leaving_no_trace(), torch.enable_grad():
            losses, _ = self._run(part, copy_of(self.batch) if batch is None else batch)
            value = losses if loss is None else loss()
            found = torch.autograd.grad(value.sum(), list(wanted.values()), allow_unused=True)
        return {name: slope for name, slope in zip(wanted, found, strict=True) if slope is not None}

    @contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        """Restore statistics, counters, metrics and random numbers after a pass, and discard what it has logged."""
        counters = [tensor for tensor in self.part.module.buffers() if not tensor.is_floating_point()]
        leaves = ((name, leaf) for name, leaf in self.part.leaves.items() if name not in self.part.shared)
        fixed = [leaf for _, leaf in leaves if not leaf.requires_grad]
        before = [(tensor, tensor._version, tensor.clone()) for tensor in (*counters, *fixed)]
        try:
            kept = (self.metrics.kept(), self.part.attributes.kept())
            with self.log.aside(), kept[0], kept[1], random_restored(self.part.leaves.values()):
                yield
        finally:
            for tensor, version, value in before:
                # a batch norm writes its means without a new version; for a counter, a write would look like the step's
                if tensor.is_floating_point() or tensor._version != version:
                    tensor.copy_(value)

    def plain(self, tensor: Tensor) -> Tensor:
        """Return a tensor of a pass with the clients in dimension 0, for use in a hook of a layer."""
        if self.part.size == 1:
            return tensor.unsqueeze(0)
        return unwrapped(tensor, self._level, self.part.size)

    def clients(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the clients in dimension 0 as what a layer sees; the inverse of :meth:`plain`."""
        return tensor.squeeze(0) if self.part.size == 1 else functorch.wrap(tensor, 0, self._level)

    def on_gradient(self, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        """Change the gradient of a tensor of a pass.

        Args:
            tensor: Tensor that a layer sees.
            change: Function of the gradients, with the clients in dimension 0.
        """
        if self.part.size == 1:
            tensor.register_hook(lambda slope: change(slope.unsqueeze(0)).squeeze(0))
            return
        value, dim = functorch.unwrap(tensor, self._level) if functorch.is_batched(tensor) else (tensor, None)
        if dim is None:
            raise NotStackable("returns outputs that do not depend on the client's weights")
        value.register_hook(lambda slope: change(slope.movedim(dim, 0)).movedim(0, dim))
