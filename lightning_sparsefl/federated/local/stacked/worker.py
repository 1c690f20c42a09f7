"""Worker that trains several clients of one rank at once."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor, nn

from lightning_sparsefl.callbacks.stacking import accumulates, stacking_key
from lightning_sparsefl.data.examples import reads_here
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.exchange.failures import is_out_of_memory
from lightning_sparsefl.federated.exchange.orders import Answer, Split
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.round_lr import ScaleLearningRates
from lightning_sparsefl.federated.local.stacked import fibers, functorch
from lightning_sparsefl.federated.local.stacked.fitting.fit import StackedRequest, fit_stack, rewind
from lightning_sparsefl.federated.local.stacked.gradients import GradientRequest, StackGradients
from lightning_sparsefl.federated.local.stacked.reading.reader import reader_of
from lightning_sparsefl.federated.local.stacked.reasons import reason_of
from lightning_sparsefl.federated.local.stacked.recording.captured import graphs_of
from lightning_sparsefl.federated.local.stacked.recording.recorder import PassRecorder
from lightning_sparsefl.federated.local.stacked.scoring.evaluation import EvaluationRequest
from lightning_sparsefl.federated.local.stacked.scoring.evaluator import StackEvaluator
from lightning_sparsefl.federated.local.stacked.states.undo import CallbackStates
from lightning_sparsefl.federated.local.stacked.trials.callback_trial import begin_together
from lightning_sparsefl.federated.local.stacked.trials.stacking_trial import StackingTrial
from lightning_sparsefl.federated.local.worker import ClientWorker, FitRequest
from lightning_sparsefl.sparse.masks import apply, check, intersect
from lightning_sparsefl.sparse.submodel import cut, keep_statistics, narrow, widen
from lightning_sparsefl.sparse.units import unit_masks
from lightning_sparsefl.types import FitResult, Masks, Weights

_messages = WarningCache()
_ON_CPU = 64 * 2**20
"""Largest number of bytes of the weights of a stack on a CPU, with gradients and an optimizer's state; measured with
LeNet5, whose stacks of 5 and 10 take equal times."""
_SIZES, _SIZES_ON_CUDA = (3, 25), (25, 50)
"""Numbers of clients that have room in one stack in any cohort, and at most; a step of a small network takes a GPU
about as long for 25 clients as for 3."""
_MOST_SCORED = 50
"""Largest number of clients that are evaluated at once."""


class StackedWorker(ClientWorker):
    """Worker whose clients wait for each other's fits and evaluations, which are then done as one.

    Fits that differ in more than numbers, and those of a module or of data that cannot be stacked, are done one after
    another as in :class:`ClientWorker`, and so are evaluations.

    Args:
        args: Arguments of :class:`ClientWorker`.
        asked: Whether the user has asked for stacks, and is told what cannot be stacked.
        records: Whether steps are recorded (`federation.record_steps`).
    """

    def __init__(self, *args: Any, asked: bool = True, records: bool = True) -> None:
        super().__init__(*args)
        self._shares: dict[int, float] = {}
        self._begun: dict[Hashable, bool] = {}
        """Whether callbacks of these keys begin a fit together."""
        self._asked = asked
        self._trial = StackingTrial(self)
        capture = graphs_of(self.device)
        self._recorders = tuple(PassRecorder(self.module, capture) if records else None for _ in range(2))
        """Recorders of the fits and of the evaluations."""
        numbers = self._trial.activations / self._trial.samples
        findings = self._trial.findings
        self._gradients = StackGradients(self, asked, findings)
        room = self._budget // self._element
        self._evaluator = StackEvaluator(self, numbers, room, asked, findings, self._recorders[1])

    @property
    def can_stack(self) -> bool:
        """Whether clients can be stacked at all."""
        return self.reason is None

    @property
    def loops(self) -> bool:
        """Whether a function of the training step, or a hook, is called for one client of a stack after another."""
        return self._trial.loops or bool(self._trial.findings.hooks)

    @property
    def reason(self) -> str | None:
        """Why clients cannot be stacked, as a clause; None if they can."""
        return self._trial.reason

    def train_alone(self, reason: str) -> None:
        """Train and evaluate clients one after another from now on.

        Args:
            reason: Why, as a clause.
        """
        self._trial.reason = reason

    def stack_size(self, cohort: int) -> int:
        """Return the number of clients in a stack by a fixed rule, so that a run repeats itself.

        Weights, gradients and an optimizer's state of a stack take a limited number of bytes, or a part of a GPU's
        memory, and activations twice as many, with their gradients. A cohort has two stacks where they can have three
        clients, on a GPU 25, so that two ranks have work.

        Args:
            cohort: Number of clients in a round.

        Returns:
            The number; 1 where two clients do not fit.
        """
        each = self._element * max(3 * self.flat.layout.size, self._trial.activations)
        fewest, most = _SIZES_ON_CUDA if self.device.type == "cuda" else _SIZES
        return max(1, min(self._budget // each, most, max(fewest, math.ceil(cohort / 2))))

    def score_size(self, clients: int) -> int:
        """Return the largest number of clients whose models are evaluated at once, by a fixed rule as well.

        Args:
            clients: Number of clients that are evaluated.

        Returns:
            The number; 1 where two models do not fit. It is lowered where their samples do not fit.
        """
        fits = self._budget // (self._element * self.flat.layout.size)
        return max(1, min(fits, _MOST_SCORED, max(3, math.ceil(clients / 2))))

    @property
    def _budget(self) -> int:
        return memory_of_stacks(self.device)

    @property
    def _element(self) -> int:
        return self.flat.vector.element_size()

    def together(self, works: Sequence[Callable[[], Answer]]) -> Iterator[Answer]:
        """Do several clients' work, where those that fit wait for each other.

        Args:
            works: Work of each client.

        Yields:
            Their answers, with the seconds of a stack shared out evenly.
        """
        if not self.can_stack or len(works) == 1:
            for work in works:
                yield work()
            return
        self._shares = {}
        for answer, seconds in fibers.run(works, self._serve):
            yield replace(answer, elapsed=seconds + self._shares.get(answer.client, 0.0))

    def do_fit(self, request: FitRequest) -> FitResult:
        """Do a fit as part of a stack, if the client's work runs beside others' and the fit can be stacked."""
        if not (_may_wait() and self.can_stack):
            return super().do_fit(request)
        full, masks = self._start(request)
        stacked = self._request(request, full, masks)
        if stacked is None or not fibers.ask(stacked):
            return super().do_fit(request)
        result: Weights = stacked.result
        layout = self.flat.layout
        if stacked.units is not None:
            result = widen(result, self.units, stacked.units, full)
        elif request.units is not None:
            result = keep_statistics(result, self.units, request.units, full, self.buffers)
        flat = torch.cat([result[name].reshape(-1).to(layout.dtype) for name in layout.names])
        return FitResult(
            weights=layout.tree(flat), metrics=stacked.metrics, steps=stacked.steps, callbacks=request.callbacks
        )

    def gradient(self, client: Client, weights: Weights) -> Weights:
        """Compute a gradient as part of a stack, if the client's work runs beside others' and it can be stacked."""
        key = client.key("gradient")
        if _may_wait() and self.can_stack:
            self.flat.require_fitting(weights)
            request = self._gradients.request(client, key, weights)
            if request is not None and fibers.ask(request):
                return request.result
        return self.differentiate(weights, self.train_loader(client, key), self.data_of(client.id))

    def evaluate(self, client: Client, weights: Weights, split: Split) -> Mapping[str, float]:
        """Evaluate as part of a stack, if the client's work runs beside others' and the evaluation can be stacked."""
        if _may_wait():
            request = self._evaluation(client, weights, split)
            if request is not None and fibers.ask(request):
                return request.result
        return super().evaluate(client, weights, split)

    def release_memory(self, error: BaseException) -> None:
        """Free what local work that ran out of memory holds, and the recorded steps, whose graphs hold memory too."""
        for recorder in filter(None, self._recorders):
            recorder.clear()
        super().release_memory(error)

    def can_evaluate(self, splits: Sequence[Split]) -> bool:
        """Return whether several clients can be evaluated at once.

        Args:
            splits: Splits to evaluate.
        """
        if "train" in splits:  # is read in an order of each client's own
            return False
        return self.can_stack and all(self._evaluator.reason(split) is None for split in splits)

    def evaluate_at_once(self, wanted: Sequence[tuple[Client, Weights, Split]]) -> list[dict[str, float]]:
        """Evaluate several clients as stacks.

        Args:
            wanted: Clients, the weights to evaluate, and the split.

        Returns:
            The value of each logged key; empty where a client has to be evaluated alone.
        """
        requests = [self._evaluation(*each) for each in wanted]
        self._evaluator.run([request for request in requests if request is not None])
        return [{} if request is None else request.result for request in requests]

    def _evaluation(self, client: Client, weights: Weights, split: Split) -> EvaluationRequest | None:
        if not self.can_evaluate([split]):
            return None
        self.flat.require_fitting(weights)
        try:
            loader = getattr(self.data, f"client_{split}_dataloader")(client.id)
        except Exception:  # which is raised again where the client is evaluated alone
            return None
        return self._evaluator.request(client, weights, split, loader)

    def _start(self, request: FitRequest) -> tuple[Weights, Masks]:
        """Return the weights that a fit starts from, with every name of the model, and the masks that are held."""
        self.flat.require_fitting(request.weights)
        weights, masks = {**self.initial, **request.weights}, request.masks
        check(masks, weights)
        check(request.trainable, weights)
        if request.units is not None:
            masks = intersect(masks, unit_masks(self.units, request.units, weights))
        return ({**weights, **apply(weights, masks)} if masks else weights), masks

    def _request(self, request: FitRequest, weights: Weights, masks: Masks) -> StackedRequest | None:
        """Return what the client asks of the stacked engine; None for a loader that it cannot read."""
        trainable, units = request.trainable, request.units if self.work.execution == "cut" else None
        if units is not None:
            weights, masks, trainable = (narrow(tree, self.units, units) for tree in (weights, masks, trainable))
            masks = {name: mask for name, mask in masks.items() if not bool(mask.all())}
        callbacks = self.callbacks_of(request.client, masks, trainable, request.callbacks)
        loader = self.train_loader(request.client, request.key)
        if not reads_here(loader):
            return None
        engine = cast(FastEngine, self.engine)
        reader = reader_of(loader, engine.options.limit_train_batches)
        epochs = engine.options.max_epochs if request.epochs is None else request.epochs
        return StackedRequest(request.client.id, request.key, weights, callbacks, reader, epochs, units)

    def _serve(self, requests: Sequence[StackedRequest | EvaluationRequest]) -> list[bool]:
        """Do fits, gradients and evaluations as stacks; return for each whether it was done."""
        started, evaluations = time.perf_counter(), [each for each in requests if isinstance(each, EvaluationRequest)]
        self._evaluator.run(evaluations)
        self._share(evaluations, started)
        started, gradients = time.perf_counter(), [each for each in requests if isinstance(each, GradientRequest)]
        self._gradients.run(gradients)
        self._share(gradients, started)
        self._fit_groups([each for each in requests if type(each) is StackedRequest])
        return [bool(request.result) for request in requests]

    def _fit_groups(self, requests: Sequence[StackedRequest]) -> None:
        """Fit the requests of equal keys as stacks."""
        groups: dict[Hashable, list[StackedRequest]] = {}
        for request in requests:
            key = self._key(request)
            groups.setdefault(id(request) if key is None else key, []).append(request)
        for group in groups.values():
            if len(group) > 1:
                self._fit_group(sorted(group, key=lambda r: (-r.reader.num_examples, r.client)))

    def _key(self, request: StackedRequest) -> Hashable | None:
        """Return what must agree for fits to be stacked; None for a fit that cannot be."""
        kinds = []
        for callback in request.callbacks:
            rates = type(callback) is ScaleLearningRates
            kind = ("rates", cast(ScaleLearningRates, callback).factor) if rates else stacking_key(callback)
            if kind is None or not (rates or self._parts == 1 or accumulates(callback)):
                where = "" if kind is None else f" with `trainer.accumulate_grad_batches: {self._parts}`"
                self._tell_alone(callback, where)
                return None
            kinds.append(kind)
        if not self._go_together(request, tuple(kinds)):
            return None  # each client's fit is refused when it starts
        length = request.reader.batches if self._trial.planned else None  # rates are those of all clients of a stack
        units = sorted((request.units or {}).items())
        narrow_layers = tuple((name, self._narrow_form(name, kept)) for name, kept in units)
        return (request.epochs, length, tuple(kinds), request.reader.key, narrow_layers)

    def _narrow_form(self, group: str, kept: Tensor) -> Hashable:
        """Return what the narrow layers of a group of units depend on: the number of units, or which ones they are."""
        return tuple(kept.tolist()) if group in self._divided_by_norms else int(kept.sum())

    @cached_property
    def _divided_by_norms(self) -> set[str]:
        """Names of the groups of units that a group norm divides, where each unit belongs to one of its groups."""
        found = ((group.name, slot.name.rpartition(".")[0]) for group in self.units for slot in group.slots)
        return {name for name, layer in found if isinstance(self.module.get_submodule(layer), nn.GroupNorm)}

    def _go_together(self, request: StackedRequest, kinds: Hashable) -> bool:
        """Return whether the callbacks of a fit begin one together, of which stacks do not call all hooks.

        One of the user alone is tried too, which the module may not fit.
        """
        several = sum(not isinstance(callback, ScaleLearningRates) for callback in request.callbacks) > 1
        if not several and not self.work.client_callbacks:
            return True
        if kinds not in self._begun:
            self.load(self.initial)
            module, engine = self.module, cast(FastEngine, self.engine).for_epochs(request.epochs)
            loader = self.data.client_train_dataloader(request.client)
            if request.units is not None:
                module = cast(LightningModule, cut(module, self.units, request.units))
            with self._warning_once():
                self._begun[kinds] = begin_together(engine, module, loader, request.callbacks, self.data)
        return self._begun[kinds]

    @property
    def _parts(self) -> int:
        """Number of batches whose gradients make one optimizer step."""
        return cast(FastEngine, self.engine).options.accumulate_grad_batches

    def _tell_alone(self, callback: Callback, where: str) -> None:
        """Tell a user who has asked for stacks that a callback prevents them."""
        if self._asked:
            _messages.warn(
                f"Clients train one after another, since the callback {type(callback).__name__} cannot act on several "
                f"of them at once{where}; set `federation.local_engine: auto`."
            )

    def _fit_group(self, group: Sequence[StackedRequest]) -> None:
        """Fit a stack; one that is out of memory is halved, and the clients of one that fails train alone."""
        started = time.perf_counter()
        before = CallbackStates(callback for request in group for callback in request.callbacks)

        def undo() -> None:
            before.restore()
            rewind(group)

        try:
            for hook in sorted(self._trial.findings.repeat(lambda: self._fit_stack(group), undo)):
                _messages.warn(
                    f"A stack was undone and done again with `{type(self.module).__name__}.{hook}` called for each of "
                    "its clients, since it cannot act on all of them at once after its first call; set "
                    "`federation.local_engine: fast` to spare the attempt."
                )
        except Exception as error:
            undo()
            if isinstance(error, InvalidOption):
                return  # each client raises it alone
            if not is_out_of_memory(error):
                _messages.warn(
                    f"{len(group)} clients train one after another, since `{type(self.module).__name__}.training_step` "
                    f"{reason_of(error)}; set `federation.local_engine: fast` to spare the attempt."
                )
                return
            self.release_memory(error)
            _messages.warn(
                f"A stack of {len(group)} clients does not fit into the memory, and is halved; lower "
                "`federation.stack_size`."
            )
            half = (len(group) + 1) // 2
            for part in (group[:half], group[half:]):
                if len(part) > 1:  # a client that is left trains alone
                    self._fit_group(part)
            return
        self._share(group, started)

    def _share(self, group: Sequence[StackedRequest | EvaluationRequest], started: float) -> None:
        """Share the seconds of a stack out evenly."""
        share = (time.perf_counter() - started) / max(len(group), 1)
        for request in group:
            self._shares[request.client] = self._shares.get(request.client, 0.0) + share

    @contextmanager
    def _warning_once(self) -> Iterator[None]:
        """Show each warning once, but for that of functions that are done in a loop, which a user cannot change."""
        with super()._warning_once():
            warnings.filterwarnings("ignore", f".*{functorch.LOOPS}")
            yield

    def _fit_stack(self, requests: Sequence[StackedRequest]) -> None:
        units, module, recorder = requests[0].units, self.module, self._recorders[0]
        if units is not None:  # narrow models of equal keys differ in their weights alone
            module, recorder = cast(LightningModule, cut(module, self.units, units)), None
        with self._warning_once():
            fit_stack(cast(FastEngine, self.engine), module, self.data, requests, self._trial.findings, recorder)


def memory_of_stacks(device: torch.device) -> int:
    """Return the largest number of bytes of the weights of a stack, with gradients and an optimizer's state.

    Args:
        device: Device of the module.
    """
    if device.type != "cuda":
        return _ON_CPU
    return int(torch.cuda.get_device_properties(device).total_memory) // 8


def _may_wait() -> bool:
    """Return whether a client's work can wait for others' here.

    Inference mode and autocast hold for a whole thread, and must not reach the other clients.
    """
    casts = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    return fibers.waiting() and not casts and not torch.is_inference_mode_enabled()
