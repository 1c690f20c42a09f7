"""Trial that finds before a run whether a module's clients can be stacked, and says why not.

Two clients with different weights take a step of plain gradient descent, alone and stacked. Their weights, which then
differ from the first ones by the gradients, and their buffers must agree. What has no meaning for several clients at
once, such as reading a number out of a tensor, raises in the stacked step.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.fast.support import STEPS, overridden
from lightning_sparsefl.federated.local.fast.trainer import FastTrainer
from lightning_sparsefl.federated.local.isolation import restore_trainer_refs
from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.asked_loop import AskedLoop
from lightning_sparsefl.federated.local.stacked.fit import StackedRequest, fit_stack, require_elementwise
from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.reader import ClientReader, readable
from lightning_sparsefl.federated.local.stacked.undo import attributes_kept
from lightning_sparsefl.federated.local.worker import ClientWorker
from lightning_sparsefl.seeds import seed_all
from lightning_sparsefl.types import Weights

_PRECISIONS = ("32-true", "64-true")

_CLAUSES = (
    (r"\.item\(\)", "reads a number out of a tensor (`.item()`, `float()`, `int()`)"),
    (r"data-dependent control flow|bool\(\)", "branches on the value of a tensor"),
    (
        r"autograd.Function with functorch",
        "uses an `autograd.Function` without a batched form (`generate_vmap_rule = True` gives it one)",
    ),
    (r"inplace|in-place|match the broadcast shape", "writes in place into a tensor that all clients share"),
    (r"Batching rule not implemented for ([\w:]+(?:\.\w+)*)", "uses `{}`, which has no batched form"),
    (r"dynamic shape|nonzero|masked_select|data-dependent", "makes tensors whose shape depends on values"),
    (r"numpy|storage", "leaves torch (`.numpy()`)"),
)
"""Patterns of the errors of ``torch.func``, and clauses that say what a training step does to cause them."""

TOLERANCE = 2e-3
"""Largest difference of two results, relative to the largest number of the tensor."""


def reason_of(error: Exception) -> str:
    """Return what a training step does to cause an error when stacked, as a clause.

    Args:
        error: Error of a stacked step.

    Example:
        >>> reason_of(RuntimeError("vmap: It looks like you're calling .item() on a Tensor."))
        'reads a number out of a tensor (`.item()`, `float()`, `int()`)'
    """
    text = str(error)
    if isinstance(error, NotStackable):
        return text
    for pattern, clause in _CLAUSES:
        found = re.search(pattern, text)
        if found:
            return clause.format(*found.groups())
    first = text.splitlines()[0][:120] if text else ""
    return f"fails for several clients at once ({type(error).__name__}: {first})"


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> str | None:
    """Return what differs between two results of a step, as a clause, or None.

    Args:
        ours: Tensors by name after a stacked step.
        theirs: The same after the step of a client alone.
        before: The same before the step.
    """
    for name, tensor in theirs.items():
        change = tensor - before[name]
        scale = TOLERANCE * float(change.abs().max()) + 1e-5 * float(tensor.abs().max()) + 1e-12
        if not bool(((ours[name] - tensor).abs() <= scale).all()):
            return (
                f"changes `{name}` otherwise for several clients at once than for one, as random numbers and hooks do"
            )
    return None


def logged_difference(ours: Mapping[str, float], theirs: Mapping[str, float]) -> str | None:
    """Return what differs between the logged values of a stack and those of a client alone, as a clause, or None.

    Args:
        ours: Values by key of the stack.
        theirs: Values by key of the client alone.
    """
    if ours.keys() != theirs.keys():
        return f"logs {sorted(ours)} for several clients at once and {sorted(theirs)} for one"
    for name, value in theirs.items():
        both_undefined = math.isnan(ours[name]) and math.isnan(value)
        if not both_undefined and not abs(ours[name] - value) <= TOLERANCE * max(abs(value), 1e-2):
            return f"logs another {name!r} for several clients at once than for one"
    return None


class StackingTrial:
    """Finds out whether a worker's clients can be stacked.

    Args:
        worker: Worker whose engine, module and data are tried; its module is left as it was.

    Attributes:
        reason: Why clients cannot be stacked, as a clause; None if they can.
        planned: Whether a step or the learning rates depend on the numbers of batches, so that only clients with equal
            ones are a stack.
        activations: Numbers that the module's layers return for one batch.
        samples: Number of samples in that batch.
    """

    def __init__(self, worker: ClientWorker) -> None:
        self._worker, self._module, self._data = worker, worker.module, worker.data
        self.planned, self.activations, self.samples = False, 0, 1
        self.reason = self._reason_of_settings() or self._reason_of_module() or self._reason_of_step()

    def _reason_of_settings(self) -> str | None:
        missing, engine, work = functorch.missing_name(), self._worker.engine, self._worker.work
        if missing is not None:
            return f"torch {torch.__version__} has no `torch._C._functorch.{missing}`"
        if not isinstance(engine, FastEngine):
            return "they need a real Trainer"
        options, precision = engine.options, str(engine.fabric.strategy.precision.precision)
        if work.client_callbacks:
            return f"`trainer.client_callbacks` has a {type(work.client_callbacks[0]).__name__}"
        if work.validate:
            return "`trainer.validate_locally` is set"
        if options.accumulate_grad_batches != 1:
            return f"`trainer.accumulate_grad_batches` is {options.accumulate_grad_batches}, not 1"
        if precision not in _PRECISIONS:
            return f"`trainer.precision` is {precision!r}, not one of {list(_PRECISIONS)}"
        return None

    def _reason_of_module(self) -> str | None:
        module, name = self._module, type(self._module).__name__
        if not module.automatic_optimization:
            return f"`{name}` optimizes manually"
        further = sorted(overridden(module) - STEPS)
        if further:
            return f"`{name}` overrides `{further[0]}`, which is written for one client"
        if type(module).log is not LightningModule.log or type(module).log_dict is not LightningModule.log_dict:
            return f"`{name}` overrides `log`"
        for child_name, child in module.named_modules():
            if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.momentum is None:
                return f"`{child_name}` averages over all batches (`momentum=None`)"
        for weight, parameter in module.named_parameters():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                return f"the parameter `{weight}` has a hook for its gradient"
        loader = self._data.client_train_dataloader(0)
        if not readable(loader):
            kind = type(loader.dataset).__name__
            return (
                f"client 0's loader reads a `{kind}` in a way of its own, and not `Examples` in memory, as those of a "
                "`TensorDataset` of two tensors without `collate_fn` and workers"
            )
        if any(hook is not None for hook in self._trainer().hooks._transfers.values()):
            return "the data module overrides a hook of the batch transfer"
        return None

    def _reason_of_step(self) -> str | None:
        """Train two clients on one batch, alone and stacked; return why the results differ, or None."""
        random, worker = torch.get_rng_state(), self._worker
        first = dict(worker.initial)
        starts = (first, moved_weights(first, worker.flat.layout.buffers))
        try:
            with attributes_kept(self._module), _gradient_descent(self._module), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as those of vmap about slow functions
                alone, stacked = self._alone(starts), self._stacked(starts)
            for ours, theirs, before in zip(stacked, alone, starts, strict=True):
                clause = difference(ours[0], theirs[0], before) or logged_difference(ours[1], theirs[1])
                if clause is not None:
                    return f"`{type(self._module).__name__}.training_step` {clause}"
            self._try_optimizers()
        except Exception as error:
            return f"`{type(self._module).__name__}.training_step` {reason_of(error)}"
        finally:
            worker.load(first)
            torch.set_rng_state(random)
            self._module.zero_grad()
        return None

    def _state_of_parameters(self) -> list[tuple[bool, int]]:
        """Return for each parameter whether it is trained, and a number that changes when it is written."""
        return [(parameter.requires_grad, parameter._version) for parameter in self._module.parameters()]

    def _engine(self) -> FastEngine:
        engine = cast(FastEngine, self._worker.engine)
        return FastEngine(engine.fabric, replace(engine.options, max_epochs=1, limit_train_batches=1))

    def _trainer(self) -> FastTrainer:
        engine = self._engine()
        return FastTrainer(engine.options, engine.fabric, self._module, (), (), self._data)

    def _alone(self, starts: Sequence[Weights]) -> Sequence[tuple[Weights, Mapping[str, float]]]:
        """Return the weights and the logged values of each client."""
        results = []
        for weights in starts:
            self._worker.load(weights)
            seed_all("trial")
            with self._counting_activations():
                loader = self._data.client_train_dataloader(0)
                logged = self._engine().fit(self._module, loader, datamodule=self._data)
            weights = {name: tensor.detach().clone() for name, tensor in self._worker.flat.read().items()}
            results.append((weights, {name: float(value) for name, value in logged.items()}))
        return results

    def _stacked(self, starts: Sequence[Weights]) -> Sequence[tuple[Weights, Mapping[str, float]]]:
        requests = []
        for place, weights in enumerate(starts):
            seed_all("trial")
            reader = ClientReader(self._data.client_train_dataloader(0), 1)
            self.samples = reader.batch_samples
            requests.append(StackedRequest(place, ("trial",), weights, {}, [], reader, 1))
        self._worker.load(starts[0])
        self.planned = fit_stack(self._engine(), self._module, self._data, requests)
        return [(request.result, request.metrics) for request in requests]

    @contextmanager
    def _counting_activations(self) -> Iterator[None]:
        self.activations = 0

        def count(module: Any, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                self.activations += output.numel()

        leaves = [child for child in self._module.modules() if not any(child.children())]
        handles = [leaf.register_forward_hook(count) for leaf in leaves]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _try_optimizers(self) -> None:
        """Make the module's own optimizers; raise if they cannot be stacked."""
        trainer, before = self._trainer(), self._state_of_parameters()
        trainer.fit_loop = loop = AskedLoop(trainer, None, None, 1, -1)
        loop.max_batches = 1
        with restore_trainer_refs(self._module, ()), trainer.running():
            trainer.strategy.setup_optimizers(trainer)  # type: ignore[arg-type]
            require_elementwise(trainer)
            if self._state_of_parameters() != before:
                for parameter, (required, _) in zip(self._module.parameters(), before, strict=True):
                    parameter.requires_grad_(required)
                raise NotStackable("is preceded by `configure_optimizers`, which freezes, unfreezes or sets weights")
            by_step = any(config.interval == "step" for config in trainer.lr_scheduler_configs)
            self.planned = self.planned or by_step or loop.asked


def moved_weights(weights: Weights, fixed: Collection[str]) -> dict[str, Tensor]:
    """Return other weights for the second client of a trial, with the same buffers.

    Args:
        weights: Weights of the first client.
        fixed: Names of buffers.
    """
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor if name in fixed else tensor + 0.02 * torch.randn(tensor.shape, generator=generator).to(tensor)
        for name, tensor in weights.items()
    }


def _descent(module: Any) -> Any:
    """Configure plain gradient descent, whose steps show the gradients."""
    return torch.optim.SGD([parameter for parameter in module.parameters() if parameter.requires_grad], lr=1.0)


@contextmanager
def _gradient_descent(module: nn.Module) -> Iterator[None]:
    """Let a module configure plain gradient descent inside, and turn off dropout."""
    vars(module)["configure_optimizers"] = MethodType(_descent, module)
    modes = [(child, child.training) for child in module.modules() if isinstance(child, nn.modules.dropout._DropoutNd)]
    for child, _ in modes:
        child.training = False
    try:
        yield
    finally:
        vars(module).pop("configure_optimizers", None)
        for child, mode in modes:
            child.training = mode
