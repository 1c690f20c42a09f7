"""Trial of one training step: what two clients get from a batch alone and as a stack."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_sparsefl.data.examples import reads_here
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.stacked.fitting.fit import StackedRequest, fit_stack, rewind
from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.reading.reader import ClientReader, reader_of
from lightning_sparsefl.federated.local.stacked.states.findings import Findings
from lightning_sparsefl.federated.local.stacked.states.leaves import layout_of
from lightning_sparsefl.federated.local.stacked.states.undo import objects_kept
from lightning_sparsefl.federated.local.stacked.trials.draws import drawing_as_found, drawing_nothing
from lightning_sparsefl.federated.local.worker import ClientWorker
from lightning_sparsefl.seeds import seed_all
from lightning_sparsefl.sparse.attributes import attributes_replaced
from lightning_sparsefl.sparse.modes import modes_restored
from lightning_sparsefl.types import Weights

_LOGGED = 2e-3
"""Largest difference of two logged values, relative to the value."""


@dataclass(frozen=True)
class Tolerance:
    """Largest difference of a tensor in two results of a step that is attributed to rounding; norms are Euclidean."""

    change: float
    """Fraction of the norm of the tensor's change in the step."""
    tensor: float
    """Fraction of the norm of the tensor, by which the difference may be larger."""
    others: float
    """Fraction of the norm of all tensors' changes, by which the difference may be larger, since the gradient of a bias
    before a batch norm is 0 but for the rounding of the others."""


ALONE = Tolerance(1e-3, 1e-5, 1e-6)
"""Tolerance in single precision, if nothing is known from double precision."""
ROUNDED = Tolerance(0.2, 1e-5, 1e-2)
"""Tolerance in single precision of a step that agrees in double precision.

Behind batch norms rounding decides which activations are cut off: the gradients of MobileNet differed by up to 0.06 of
their norm, those of PreResNet18 and ResNet18 by 0.007. A wrong kernel of torch differs by more.
"""
_MOST = 100
"""Number of clients among which the second one of a trial is chosen."""
EXACT = Tolerance(1e-9, 1e-13, 1e-12)
"""Tolerance in double precision."""

Result = tuple[Weights, Mapping[str, float]]
"""Weights after a step, and its logged values."""


def difference(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], before: Mapping[str, Tensor], tolerance: Tolerance
) -> str | None:
    """Return what differs between two results of a step, as a clause, or None.

    Args:
        ours: Tensors by name after a stacked step.
        theirs: The same after the step of a client alone.
        before: The same before the step.
        tolerance: Largest difference that is attributed to rounding.
    """
    changes = {name: (tensor - before[name]).norm() for name, tensor in theirs.items()}
    total = torch.stack([change.double() for change in changes.values()]).norm()
    for name, tensor in theirs.items():
        allowed = tolerance.change * changes[name] + tolerance.tensor * tensor.norm() + tolerance.others * total
        if not bool((ours[name] - tensor).norm() <= allowed):
            return (
                f"changes `{name}` otherwise for several clients at once than for one, as random numbers, hooks and "
                "counts of batches do"
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
        same = ours[name] == value or (math.isnan(ours[name]) and math.isnan(value))
        if not same and not abs(ours[name] - value) <= _LOGGED * max(abs(value), 1e-2):
            return f"logs another {name!r} for several clients at once than for one"
    return None


class StepTrial:
    """Plain gradient descent of two clients with different weights on a batch, whose steps show the gradients.

    They have the first batches of client 0 and of another client, if those have equal numbers of samples.

    Args:
        worker: Worker whose engine, module and data are used; its module is left with other weights.
        findings: Findings about the module's steps and hooks.

    Attributes:
        planned: Whether the step asks for the number of batches.
        activations: Numbers that the module's layers return for the batch.
        samples: Number of samples in the batch.
    """

    def __init__(self, worker: ClientWorker, findings: Findings) -> None:
        self._worker, self._module, self._data = worker, worker.module, worker.data
        self._findings = findings
        self.planned, self.activations, self.samples = False, 0, 1
        first = dict(worker.initial)
        self._starts = (first, moved_weights(first, worker.flat.layout.buffers))
        self._clients = (0, self._other_client())
        self._transforms = [self._reader(client).transform for client in self._clients]
        engine = cast(FastEngine, worker.engine)
        options = replace(engine.options, max_epochs=1, limit_train_batches=1)
        self._engine = FastEngine(engine.fabric, options, engine.precision)

    def alone(self) -> Sequence[Result]:
        """Return the results of each client alone."""
        with gradient_descent(self._module), objects_kept(self._transforms):
            return [self._alone(place) for place in range(len(self._clients))]

    def _other_client(self) -> int:
        """Return the client with the most samples of the first hundred; client 0 if its first batch has others."""
        sizes = {client: self._data.num_examples(client) for client in range(min(self._data.num_clients, _MOST))}
        other = max(sizes, key=lambda client: (sizes[client], client))
        loader = self._data.client_train_dataloader(other)
        return other if reads_here(loader) and self._reader(other).batch_samples == self._reader(0).batch_samples else 0

    def _reader(self, client: int) -> ClientReader:
        seed_all("trial")
        return reader_of(self._data.client_train_dataloader(client), 1)

    def _layout(self, client: int) -> Hashable:
        """Return the layout of a client's first batch."""
        reader = self._reader(client)
        reader.start_epoch()
        return layout_of(reader.read(0))

    def _alone(self, place: int) -> Result:
        client = self._clients[place]
        self._worker.load(self._starts[place])
        seed_all("trial")
        with self._counting_activations(), drawing_as_found(self._module, self._findings, place):
            loader = self._data.client_train_dataloader(client)
            logged = self._engine.fit(self._module, loader, datamodule=self._worker.data_of(client))
        after = {name: tensor.detach().clone() for name, tensor in self._worker.flat.read().items()}
        return after, {name: float(value) for name, value in logged.items()}

    def stacked(self) -> Sequence[Result]:
        """Return the results of each client of the stack."""
        requests = self._requests()
        self._worker.load(self._starts[0])
        kept = objects_kept(self._transforms)
        with gradient_descent(self._module), _other_counts(self._module), kept:
            self._findings.repeat(lambda: self._fit(requests), lambda: rewind(requests))
        return [(request.result, request.metrics) for request in requests]

    def step_as_configured(self) -> None:
        """Train the stack with the module's own optimizer and `optimizer_step`; raise if they cannot be stacked."""
        requests = self._requests()
        self._worker.load(self._starts[0])
        with modes_restored(self._module), objects_kept(self._transforms):
            self._findings.repeat(lambda: self._run(requests), lambda: rewind(requests))

    def _requests(self) -> list[StackedRequest]:
        requests = []
        for place, (client, weights) in enumerate(zip(self._clients, self._starts, strict=True)):
            reader = self._reader(client)
            self.samples = reader.batch_samples
            requests.append(StackedRequest(place, ("trial",), weights, [], reader, 1))
        with objects_kept(self._transforms):
            if len({self._layout(client) for client in self._clients}) > 1:
                raise NotStackable("gets batches of other shapes from other clients")
        return requests

    def _fit(self, requests: Sequence[StackedRequest]) -> None:
        with drawing_nothing(*requests[0].key, "stack"), drawing_as_found(self._module, self._findings, 0, 1):
            self._run(requests)

    def _run(self, requests: Sequence[StackedRequest]) -> None:
        self.planned = fit_stack(self._engine, self._module, self._data, requests, self._findings)

    def clause(self, stacked: Sequence[Result], alone: Sequence[Result], tolerance: Tolerance) -> str | None:
        """Return what differs between the results, as a clause, or None.

        Args:
            stacked: Results of the stack.
            alone: Results of the clients alone.
            tolerance: Largest difference that is attributed to rounding.
        """
        for ours, theirs, before in zip(stacked, alone, self._starts, strict=True):
            clause = difference(ours[0], theirs[0], before, tolerance) or logged_difference(ours[1], theirs[1])
            if clause is not None:
                return clause
        return None

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


@contextmanager
def in_double(module: nn.Module) -> Iterator[None]:
    """Convert a module to double precision within the context, and restore its tensors afterwards.

    Args:
        module: The module.
    """
    tensors = [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers())]
    tables = [(child._buffers, dict(child._buffers)) for child in module.modules()]
    types = [(child, child._dtype) for child in module.modules() if isinstance(child, LightningModule)]
    try:
        module.double()
        yield
    finally:
        for table, before in tables:
            table.update(before)
        for tensor, data in tensors:
            tensor.data, tensor.grad = data, None
        for child, dtype in types:
            child._dtype = dtype


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


@contextmanager
def _other_counts(module: nn.Module) -> Iterator[None]:
    """Let batch norms have counted other batches within the context: clients of a stack share the counts.

    Args:
        module: Module whose step gives other results than before if it reads a count.
    """
    counts = [child.num_batches_tracked for child in module.modules() if isinstance(child, _BatchNorm)]
    before = [(count, count.clone()) for count in counts if count is not None]
    try:
        for count, _ in before:
            count.add_(1009)  # a prime number, so that a step which reads a remainder shows
        yield
    finally:
        for count, value in before:
            count.copy_(value)


def _descent(module: Any) -> Any:
    """Configure plain gradient descent, whose steps show the gradients, with a scheduler that hooks may read."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)]


@contextmanager
def gradient_descent(module: nn.Module) -> Iterator[None]:
    """Make a module configure plain gradient descent without dropout within the context."""
    values = {"configure_optimizers": MethodType(_descent, module)}
    if is_overridden("optimizer_step", module, LightningModule):  # which may step by nothing at first
        values["optimizer_step"] = MethodType(LightningModule.optimizer_step, module)
    with attributes_replaced(module, values), modes_restored(module):
        for child in module.modules():
            if isinstance(child, nn.modules.dropout._DropoutNd):
                child.training = False
        yield
