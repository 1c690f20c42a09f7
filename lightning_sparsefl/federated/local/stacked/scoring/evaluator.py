"""Which clients of a worker are evaluated as stacks."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, cast

import torch
from lightning.pytorch.utilities.rank_zero import WarningCache

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.exchange.failures import is_out_of_memory
from lightning_sparsefl.federated.exchange.orders import SCORING_STEPS, Split
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.fast.support import SCORING_HOOKS, overridden
from lightning_sparsefl.federated.local.stacked.fitting.hooks import EVALUATION_HOOKS
from lightning_sparsefl.federated.local.stacked.reading.reader import name_of_data
from lightning_sparsefl.federated.local.stacked.reasons import reason_of
from lightning_sparsefl.federated.local.stacked.recording.recorder import PassRecorder
from lightning_sparsefl.federated.local.stacked.scoring.evaluation import (
    EvaluationRequest,
    evaluate_stack,
    readable_in_order,
)
from lightning_sparsefl.federated.local.stacked.states.findings import Findings
from lightning_sparsefl.federated.local.stacked.states.undo import attributes_kept
from lightning_sparsefl.federated.local.stacked.trials.draws import drawing_nothing
from lightning_sparsefl.federated.local.stacked.trials.stacking_trial import reason_of_hooks
from lightning_sparsefl.federated.local.stacked.trials.step_trial import logged_difference, moved_weights
from lightning_sparsefl.federated.local.worker import ClientWorker
from lightning_sparsefl.types import Weights

_messages = WarningCache()


class StackEvaluator:
    """Evaluates clients of a worker as stacks, where a trial has found that the scores are those of one by one.

    Args:
        worker: Worker whose engine, module and data are used.
        activations: Numbers that the module's layers return for one sample.
        room: Numbers that the weights and activations of a stack may have; larger evaluations gain nothing.
        warns: Whether to warn of scores that cannot be computed as stacks.
        findings: Findings about the module's steps and hooks; what else is found is added.
        recorder: Recorder of the module's evaluations. Default: each batch calls the module's step.
    """

    def __init__(
        self,
        worker: ClientWorker,
        activations: float,
        room: int,
        warns: bool,
        findings: Findings,
        recorder: PassRecorder | None = None,
    ) -> None:
        self._worker, self._activations, self._room, self._warns = worker, activations, room, warns
        self._findings, self._recorder = findings, recorder
        self._reasons: dict[str, str | None] = {}
        """Why a step cannot be done for several clients at once, as a clause; None if it can."""

    def request(self, client: Client, weights: Weights, split: Split, loader: Any) -> EvaluationRequest | None:
        """Return what a client asks for; None if it has to be evaluated alone.

        Args:
            client: The client.
            weights: Weights to evaluate; missing names take the run's initial values.
            split: Split to evaluate.
            loader: Loader of the split.
        """
        if not readable_in_order(loader):
            return None
        initial = self._worker.initial
        if len(weights) < len(initial):
            weights = {**initial, **weights}
        key = (client.constant_seed("evaluate"), client.round)
        return EvaluationRequest(client.id, key, weights, loader, split, lambda: client.key("evaluate"))

    def run(self, requests: Sequence[EvaluationRequest]) -> None:
        """Evaluate requests that fit together as stacks; the others keep an empty result.

        Args:
            requests: Requests of different clients or splits.
        """
        groups: dict[Hashable, list[EvaluationRequest]] = {}
        for request in requests:
            key = (request.split, request.batch_size, request.loader.batch_sampler.drop_last, request.reading_key)
            groups.setdefault(key, []).append(request)
        for group in groups.values():
            for part in self._parts(sorted(group, key=lambda r: (-r.num_examples, r.client))):
                if len(part) > 1:
                    self._run_group(part)

    def _parts(self, group: Sequence[EvaluationRequest]) -> Iterator[Sequence[EvaluationRequest]]:
        """Divide a group so that each part has room; the parts follow from the requests alone."""
        first, numbers = 0, 0.0
        for place, request in enumerate(group):
            own = self._worker.flat.layout.size + self._activations * request.size(0)
            if numbers and numbers + own > self._room:
                yield group[first:place]
                first, numbers = place, 0.0
            numbers += own
        yield group[first:]

    def _run_group(self, group: Sequence[EvaluationRequest]) -> None:
        try:
            self._run(group, self._recorder)
        except Exception as error:
            for request in group:
                request.result = {}
            if isinstance(error, InvalidOption):
                return  # each client raises it alone
            if is_out_of_memory(error):
                self._worker.release_memory(error)
            _messages.warn(
                f"{len(group)} clients are evaluated one after another, since "
                f"`{self._name(group[0].split)}` {reason_of(error)}."
            )

    def _run(self, requests: Sequence[EvaluationRequest], recorder: PassRecorder | None = None) -> None:
        worker = self._worker
        engine, findings = cast(FastEngine, worker.engine), self._findings
        with worker._warning_once():
            findings.repeat(lambda: evaluate_stack(engine, worker.module, worker.data, requests, findings, recorder))

    def _name(self, split: Split) -> str:
        return f"{type(self._worker.module).__name__}.{SCORING_STEPS[split]}"

    def reason(self, split: Split) -> str | None:
        """Return why clients cannot be evaluated as stacks, as a clause; None if they can.

        Args:
            split: Split to evaluate.
        """
        name = self._name(split)
        if name not in self._reasons:
            reason = self._reasons[name] = self._reason_of_trial(split)
            if reason is not None and self._warns:
                _messages.warn(f"Clients are evaluated one after another, since {reason}.")
        return self._reasons[name]

    def _reason_of_trial(self, split: Split) -> str | None:
        """Evaluate two models on client 0's samples, alone and as one; return why the scores differ, or None."""
        worker, random = self._worker, torch.get_rng_state()
        try:
            loader = getattr(worker.data, f"client_{split}_dataloader")(0)
        except Exception as error:
            return f"client 0 has no data to try it with ({type(error).__name__}: {error})"
        if not readable_in_order(loader):
            return f"client 0's loader does not read its `{name_of_data(loader)}` in order, as a plain DataLoader does"
        step, hooks = SCORING_STEPS[split], overridden(worker.module)
        if step not in hooks:
            return f"there is no `{self._name(split)}`"
        reason = reason_of_hooks(worker.module, (hooks & SCORING_HOOKS[step]) - EVALUATION_HOOKS)
        if reason is not None:
            return reason
        first: Weights = dict(worker.initial)
        models = (first, moved_weights(first, worker.flat.layout.buffers))
        key = ("trial",)
        requests = [
            EvaluationRequest(place, key, model, loader, split, lambda: key) for place, model in enumerate(models)
        ]
        try:
            with attributes_kept(worker.module), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                alone = [worker.score(model, loader, split, key, worker.data_of(0)) for model in models]
                worker.load({name: torch.full_like(tensor, torch.nan) for name, tensor in first.items()})  # not for use
                with drawing_nothing(*key):
                    self._run(requests)
            found = (logged_difference(each.result, own) for each, own in zip(requests, alone, strict=True))
            clause = next(filter(None, found), None)
        except Exception as error:
            clause = reason_of(error)
        finally:
            worker.load(first)
            torch.set_rng_state(random)
        return None if clause is None else f"`{self._name(split)}` {clause}"
