"""The gradients of one batch of each of several clients, for methods that choose weights by them."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import WarningCache

from lightning_sparsefl.data.examples import reads_here
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.exchange.failures import is_out_of_memory
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.stacked.fitting.fit import StackedRequest, rewind, stacked_fit
from lightning_sparsefl.federated.local.stacked.reading.reader import reader_of
from lightning_sparsefl.federated.local.stacked.reasons import reason_of
from lightning_sparsefl.federated.local.stacked.states.findings import Findings
from lightning_sparsefl.federated.local.stacked.states.undo import attributes_kept
from lightning_sparsefl.federated.local.stacked.trials.draws import drawing_as_found
from lightning_sparsefl.federated.local.stacked.trials.step_trial import EXACT, ROUNDED, difference, moved_weights
from lightning_sparsefl.federated.local.worker import ClientWorker
from lightning_sparsefl.seeds import seed_all
from lightning_sparsefl.sparse.modes import modes_restored
from lightning_sparsefl.types import Weights

_messages = WarningCache()


class GradientRequest(StackedRequest):
    """What a client asks for that needs the gradient of its first batch; the result is the gradients."""


class StackGradients:
    """Computes the gradients of clients as stacks, where a trial has found that they are those of one by one.

    Args:
        worker: Worker whose engine, module and data are used.
        asked: Whether the user has asked for stacks, and is told what cannot be stacked.
        findings: Findings about the module's steps and hooks; what else is found is added.
    """

    def __init__(self, worker: ClientWorker, asked: bool, findings: Findings) -> None:
        self._worker, self._asked, self._findings, self._tried = worker, asked, findings, False
        self._reason: str | None = None
        """Why gradients are not computed as stacks, as a clause; None if they are."""

    def request(self, client: Client, key: tuple[int | str, ...], weights: Weights) -> GradientRequest | None:
        """Return what a client asks for; None if its gradient has to be computed alone.

        Args:
            client: The client.
            key: Key of the randomness of the batch.
            weights: Weights to take the gradient at; missing names take the run's initial values.
        """
        if not self._tried:
            self._tried, self._reason = True, self._try()
            if self._reason is not None and self._asked:
                self._tell(f"`{type(self._worker.module).__name__}.training_step` in evaluation mode {self._reason}")
        if self._reason is not None:
            return None
        loader = self._worker.train_loader(client, key)
        if not reads_here(loader):
            return None
        return _request(client.id, key, {**self._worker.initial, **weights}, loader)

    def run(self, requests: Sequence[GradientRequest]) -> None:
        """Compute the gradients of requests that fit together as stacks; the others keep an empty result.

        Args:
            requests: Requests of different clients.
        """
        groups: dict[Hashable, list[GradientRequest]] = {}
        for request in requests:
            reader = request.reader
            groups.setdefault((reader.batch_samples, reader.key), []).append(request)
        for group in groups.values():
            if len(group) > 1:
                self._run_group(group)

    def _run_group(self, group: Sequence[GradientRequest]) -> None:
        worker = self._worker
        try:
            with worker._warning_once():
                self._differentiate(group)
        except Exception as error:  # each client raises its own alone
            for request in group:
                request.result = {}
            if is_out_of_memory(error):
                worker.release_memory(error)
                self._tell(f"those of {len(group)} do not fit into the memory; lower `federation.stack_size`")
            elif not isinstance(error, InvalidOption):
                self._tell(f"`{type(worker.module).__name__}.training_step` {reason_of(error)}")

    def _differentiate(self, requests: Sequence[GradientRequest]) -> None:
        engine, module, findings = cast(FastEngine, self._worker.engine), self._worker.module, self._findings
        findings.repeat(lambda: differentiate_stack(engine, module, requests, findings), lambda: rewind(requests))

    def _tell(self, clause: str) -> None:
        _messages.warn(f"The clients' gradients are computed one after another, since {clause}.")

    def _try(self) -> str | None:
        """Return how the gradients of two models on client 0's first batch differ alone and as a stack, or None."""
        worker, random = self._worker, torch.get_rng_state()
        first: Weights = dict(worker.initial)
        models = (first, moved_weights(first, worker.flat.layout.buffers))
        try:
            with attributes_kept(worker.module), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                alone = [self._alone(place, model) for place, model in enumerate(models)]
                requests = [_request(place, ("trial",), model, self._loader()) for place, model in enumerate(models)]
                worker.load({name: torch.full_like(tensor, torch.nan) for name, tensor in first.items()})  # not for use
                with drawing_as_found(worker.module, self._findings, *range(len(models))):
                    self._differentiate(requests)
        except Exception as error:
            return reason_of(error)
        finally:
            worker.load(first)
            torch.set_rng_state(random)
        tolerance = EXACT if alone[0][next(iter(alone[0]))].dtype is torch.float64 else ROUNDED
        zeros = {name: torch.zeros_like(slope) for name, slope in alone[0].items()}
        pairs = zip(requests, alone, strict=True)
        clauses = (difference(request.result, own, zeros, tolerance) for request, own in pairs)
        return next((clause for clause in clauses if clause is not None), None)

    def _alone(self, place: int, weights: Weights) -> Weights:
        with drawing_as_found(self._worker.module, self._findings, place):
            return self._worker.differentiate(weights, self._loader())

    def _loader(self) -> Any:
        seed_all("trial")
        return self._worker.data.client_train_dataloader(0)


def _request(client: int, key: tuple[int | str, ...], weights: Weights, loader: Any) -> GradientRequest:
    return GradientRequest(client, key, weights, [], reader_of(loader, 1.0), 1)


def differentiate_stack(
    engine: FastEngine, module: LightningModule, requests: Sequence[GradientRequest], findings: Findings
) -> None:
    """Compute the gradients of several clients as one, in evaluation mode.

    Args:
        engine: Engine that computes the gradient of a client alone, whose options hold for the stack.
        module: Module of the user; left as it was.
        requests: Requests of the clients.
        findings: Findings about the module's steps and hooks.
    """
    with modes_restored(module):
        module.eval()
        with stacked_fit(engine, module, None, requests, findings) as fit:
            fit.differentiate()
