"""The fits of several clients as one, in Lightning's order, with the user's own step, optimizer and schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn

from lightning_sparsefl.callbacks import LayerFreezing
from lightning_sparsefl.callbacks.layers import stepped_by
from lightning_sparsefl.callbacks.stacking import StackedCallback, stacked
from lightning_sparsefl.federated.exchange.flat import weight_parameters
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.fast.direct_calls import run_backward
from lightning_sparsefl.federated.local.fast.steps import StepCaller, step_schedulers
from lightning_sparsefl.federated.local.isolation import Settings, restore_trainer_refs
from lightning_sparsefl.federated.local.round_lr import ScaleLearningRates
from lightning_sparsefl.federated.local.stacked.batch_pass import BatchPass
from lightning_sparsefl.federated.local.stacked.fitting.accumulated import AccumulatedGradients
from lightning_sparsefl.federated.local.stacked.fitting.asked_loop import AskedLoop
from lightning_sparsefl.federated.local.stacked.fitting.hooks import (
    BATCH_HOOKS,
    BEFORE_BACKWARD,
    GRADIENT_HOOKS,
    TRAINING_HOOKS,
    ClientView,
    call_for_each,
    call_hook,
    call_with_gradients,
    require_plain,
    to_device,
)
from lightning_sparsefl.federated.local.stacked.fitting.optimizers import StackedOptimizer, clip, options_of
from lightning_sparsefl.federated.local.stacked.fitting.own_step import CLAUSE as OWN_STEP
from lightning_sparsefl.federated.local.stacked.fitting.own_step import OwnStep
from lightning_sparsefl.federated.local.stacked.fitting.stack_trainer import StackTrainer, require_elementwise
from lightning_sparsefl.federated.local.stacked.logs import ChangesAttribute, NotStackable, SeesOneClient, StackedLog
from lightning_sparsefl.federated.local.stacked.metrics.functional import functions_for_clients
from lightning_sparsefl.federated.local.stacked.metrics.states import MetricRows, MetricStates
from lightning_sparsefl.federated.local.stacked.reading.reader import ClientReader
from lightning_sparsefl.federated.local.stacked.reading.stack_reader import equal_ranges, samples_of, stack_reader
from lightning_sparsefl.federated.local.stacked.recording.recorded_step import TrainingPass
from lightning_sparsefl.federated.local.stacked.recording.recorder import PassRecorder, is_same_structure, structure_of
from lightning_sparsefl.federated.local.stacked.rules import KEPT_ELSEWHERE, OtherTensors
from lightning_sparsefl.federated.local.stacked.states.findings import Findings
from lightning_sparsefl.federated.local.stacked.states.leaves import StackedModule, shared_names, tensors_of
from lightning_sparsefl.federated.local.stacked.states.undo import ModuleStates, require_same_settings
from lightning_sparsefl.seeds import seed_all
from lightning_sparsefl.types import Masks, Weights

_SCHEDULER_READS = "is followed by a scheduler that reads"
_BACKWARD_READS = "has a backward pass that reads"


@dataclass
class StackedRequest:
    """What one client asks of the stacked engine, and what it gets."""

    client: int
    """Number of the client."""
    key: tuple[int | str, ...]
    """Key of the fit's randomness."""
    weights: Weights
    """Weights to start from, with every name of the model."""
    callbacks: list[Callback]
    reader: ClientReader
    epochs: int
    units: Masks | None = None
    """Units of each group that the narrow model of the fit has; None for the whole model."""
    result: dict[str, Tensor] = field(default_factory=dict)
    """Weights after the fit: views of the stack's leaves."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Last value of each logged key."""
    steps: int = 0
    """Number of optimizer steps taken."""


class _Part(NamedTuple):
    """Clients of a stack that step together."""

    module: StackedModule
    """Their tensors."""
    rows: Mapping[Tensor, Tensor] | None
    """Their leaves by those of all clients; None if they are all."""
    metrics: MetricRows
    """Their states of the module's metric objects."""


class _Started(NamedTuple):
    """A batch of several clients before its pass."""

    one: BatchPass
    callbacks: Sequence[StackedCallback]
    """Those of its clients."""
    clients: _Part


class StackedFit:
    """One fit of several clients.

    Args:
        trainer: Trainer that the module sees, without callbacks and loggers.
        requests: Requests of the clients, by falling number of samples.
        findings: Findings about the module's steps and hooks; steps that change attributes are not recorded.
        recorder: Recorder of the module's steps; None = each batch calls the training step.
    """

    def __init__(
        self,
        trainer: StackTrainer,
        requests: Sequence[StackedRequest],
        findings: Findings,
        recorder: PassRecorder | None = None,
    ) -> None:
        self.trainer, self.requests = trainer, requests
        self.module, self.size = trainer.lightning_module, len(requests)
        self.reader = stack_reader([request.reader for request in requests], trainer.device_samples)
        self.log = StackedLog(self.size)
        parts = trainer.accumulate_grad_batches
        self._accumulated = None if parts == 1 else AccumulatedGradients(parts, self.size)
        totals = [math.ceil(request.reader.batches / parts) * request.epochs for request in requests]
        chains = zip(*(request.callbacks for request in requests), strict=True)
        kinds = [(chain, type(chain[0])) for chain in chains]
        self._rates = [chain[0] for chain, kind in kinds if kind is ScaleLearningRates]
        self._callbacks: list[tuple[StackedCallback, Sequence[Callback]]] = [
            (stacked(chain, self.module, totals), chain) for chain, kind in kinds if kind is not ScaleLearningRates
        ]
        self._called_for_each = frozenset(findings.hooks)
        """Hooks of the module that are called for each client."""
        views = any(callback.views_module for callback, _ in self._callbacks)
        self.whole = StackedModule(self.module, self.size, self._shared(), () if views else findings.attributes)
        self._batches = max(request.reader.batches for request in requests)
        self.loop = AskedLoop(trainer, None, None, requests[0].epochs, -1)
        acts = any(callback.acts_in_pass for callback, _ in self._callbacks)
        sees_batches = BATCH_HOOKS & TRAINING_HOOKS & trainer.hooks.overridden
        if acts and "on_train_batch_start" in sees_batches:
            raise NotStackable("is preceded by `on_train_batch_start`, which follows what a callback does to a batch")
        if acts and "optimizer_step" in trainer.hooks.overridden:  # whose start would precede what the callback does
            raise NotStackable(f"{OWN_STEP}, beside a callback that acts in the pass of a batch")
        own_rates = any(callback.changes_rates for callback, _ in self._callbacks)
        if own_rates and (GRADIENT_HOOKS | {"optimizer_step"}) & trainer.hooks.overridden:
            raise NotStackable("is followed by a hook that sees learning rates, of which each client has its own")
        self._clears = not trainer.hooks.overridden.isdisjoint(BEFORE_BACKWARD)
        """Whether the module has a hook between its step and the backward pass."""
        self._recorder = None if acts or findings.attributes or sees_batches or self._clears else recorder
        self._parts: dict[tuple[int, int], _Part] = {}
        """Clients that have stepped together, by the first place and the place after the last one."""
        self._hooked = False
        """Whether hooks of the module have been called since the last batch."""
        self._states: ModuleStates | None = None
        """Attributes of the module before the first step, after callbacks and `configure_optimizers`."""
        self._own_step: OwnStep | None = None
        """The module's `optimizer_step`; None if it does not override it."""
        self._settings: Settings | None = None
        """Those of the trainer, of its parts and of the optimizer at that time."""
        self.checked = False
        """Whether what the first step has left in the module and its gradients has been checked."""

    def run(self) -> None:
        """Train, and fill each request's result, metrics and steps.

        Raises:
            NotStackable: If the training step does something that has no meaning for several clients at once.
        """
        with self._started(self._batches):
            self._hook("on_fit_start")
            self._hook("on_train_start")
            self._epochs()
            logged = self.log.metrics(self._metrics)  # before a hook that may reset metric objects
            self._hook("on_train_end")
            self._after_hooks()
            self._require_alike()
        self.trainer._close()
        self.trainer._finish()
        self.whole.tell_contents()
        for callback, chain in self._callbacks:
            callback.finish(chain)
        for place, (request, metrics) in enumerate(zip(self.requests, logged, strict=True)):
            request.result, request.metrics = self.whole.row(place), metrics
            request.steps = self.optimizer.taken[place]

    def differentiate(self) -> None:
        """Fill each request's result with the gradients of its first batch; no client takes a step.

        Raises:
            NotStackable: If the training step does something that has no meaning for several clients at once.
        """
        with self._started(1):
            self.reader.start_epoch()
            for name in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
                self._hook(name)
            self._after_hooks()
            self.loop._ready, self.loop.is_last_batch = 1, True
            low, high, batch = next(self.reader.read(0, self.size, 0))
            if high < self.size:
                raise NotStackable("gets batches of other shapes from other clients")
            one = self._pass_of(self._caller(), self._part(low, high), low, high, batch, 0)
            self._batch_hook("on_train_batch_start", one)
            self._backward(one, steps=False)
            self.log.collect()
            self._gradient_hook("on_after_backward", one)
            self._require_no_gradients()
        self.trainer._finish()
        leaves = {name: self.whole.leaves[name] for name in weight_parameters(self.module)}
        slopes = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
        for place, request in enumerate(self.requests):
            rows = {name: slope.detach()[place] for name, slope in slopes.items()}
            request.result = {name: row.clone(memory_format=torch.contiguous_format) for name, row in rows.items()}

    @contextmanager
    def _started(self, batches: int) -> Iterator[None]:
        """Do what precedes the first batch, and check afterwards that the module's attributes have not changed."""
        trainer, whole = self.trainer, self.whole
        whole.load([request.weights for request in self.requests])
        trainer.fit_loop = self.loop
        self.loop.max_batches = batches
        for tensor in whole.own.values():
            tensor.grad = None
        trainer._start(TrainerFn.FITTING, RunningStage.TRAINING)
        with self.log.receiving(self.module), torch.enable_grad():
            self._make_optimizer()
            companions = [request.callbacks for request in self.requests]
            counts = [request.reader.batches for request in self.requests]
            for callback, _ in self._callbacks:
                callback.join(companions, counts)
            for callback, _ in sorted(self._callbacks, key=lambda pair: not pair[0].makes_masks):
                callback.start(whole.leaves)
            self._stack_optimizer()
            transforms = (request.reader.transform for request in self.requests)
            self._states = ModuleStates(self.module, {"transform": [each for each in transforms if each is not None]})
            self._settings = Settings.of_trainer(trainer, **{"self.optimizers()": self.optimizer.optimizer})
            self._metrics = MetricStates(self.module, self.size)
            if self._recorder is not None:
                self._recorder.start(whole, self._states)
            with self._metrics.guarded():
                yield
            self._require_unchanged()

    @property
    def _begun_with(self) -> ModuleStates:
        """Attributes of the module before the first step, once the fit has started."""
        assert self._states is not None
        return self._states

    def _require_unchanged(self) -> None:
        """Raise :class:`NotStackable` if steps have changed something that all clients share."""
        assert self._settings is not None
        self._begun_with.require_unchanged()
        self._metrics.require_usual()
        require_same_settings(self._settings)

    def restore(self) -> None:
        """Undo what steps have changed in the module's attributes."""
        if self._states is not None:
            self._states.restore()

    def release(self) -> None:
        """Let the callbacks leave the module as it was."""
        if self._own_step is not None:
            self._own_step.close()
        for callback, _ in self._callbacks:
            callback.release()

    def _make_optimizer(self) -> None:
        """Make the user's optimizer on the module's own tensors, so that its rules see them."""
        trainer, own, leaves = self.trainer, self.whole.own, self.whole.leaves
        frozen = [name for name in self._frozen() if own[name].requires_grad]
        for name in frozen:
            own[name].requires_grad_(False)
            leaves[name].requires_grad_(False)
        try:
            trainer.strategy.setup_optimizers(trainer)  # type: ignore[arg-type]
        finally:
            for name in frozen:
                own[name].requires_grad_(True)
        require_elementwise(trainer)

    def _stack_optimizer(self) -> None:
        """Point the optimizer at the leaves, and at those of callbacks."""
        trainer, own, leaves = self.trainer, self.whole.own, self.whole.leaves
        by_identity = {id(tensor): leaves[name] for name, tensor in own.items()}
        by_identity |= {id(tensor): leaf for tensor, leaf in self._add_further(trainer.optimizers[0])}
        if not stepped_by(trainer.optimizers[0]) <= by_identity.keys():
            raise NotStackable("is followed by an optimizer of other tensors than the module's real parameters")
        accumulates = self._accumulated is not None
        self.optimizer = StackedOptimizer(trainer.optimizers[0], by_identity, self.size, accumulates)
        stepped = stepped_by(trainer.optimizers[0])
        self._stepped = [name for name, leaf in leaves.items() if id(leaf) in stepped]
        chain = [callback for callback, _ in self._callbacks]
        for each in chain:
            each.prepare(self.optimizer.optimizer, bool(trainer.gradient_clip_val), chain)
        for callback in self._rates:
            callback.on_fit_start(trainer, self.module)
        if "optimizer_step" in trainer.hooks.overridden:
            self._own_step = OwnStep(trainer, self.optimizer.optimizer, self._in_own_step)

    def _add_further(self, optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, Tensor]]:
        """Add the leaves of callbacks to the optimizer; return each with the parameter that stands for it there."""
        added: list[tuple[Tensor, Tensor]] = []
        for callback, _ in self._callbacks:
            for name, (leaf, beside) in callback.further().items():
                self.whole.leaves[name], weight = leaf, self.whole.own[beside]
                for group in optimizer.param_groups:
                    if any(each is weight for each in group["params"]):
                        parameter = nn.Parameter(leaf.detach()[0])
                        group["params"].append(parameter)
                        added.append((parameter, leaf))
        return added

    def _frozen(self) -> list[str]:
        """Return the names of tensors of which no client may change any entry."""
        callbacks = [each for each in self.requests[0].callbacks if isinstance(each, LayerFreezing)]
        return [name for each in callbacks for name, mask in each.trainable.items() if not bool(mask.any())]

    def _shared(self) -> list[str]:
        """Return the names of frozen tensors that are the same for all clients, and that none of them can write."""
        if self._called_for_each:  # with views of the weights, which have one row for each client
            return []
        frozen = [name for name in self._frozen() if not any(each.writes(name) for each, _ in self._callbacks)]
        return shared_names([request.weights for request in self.requests], frozen)

    def _require_alike(self) -> None:
        """Raise :class:`NotStackable` if something has been used that the clients do not have in common."""
        if self.loop.asked and len({request.reader.batches for request in self.requests}) > 1:
            raise NotStackable("asks for the number of batches, of which each client has its own")
        self._require_no_gradients()

    def _require_no_gradients(self) -> None:
        """Raise :class:`NotStackable` if gradients have reached the module's own parameters."""
        if any(tensor.grad is not None for tensor in self.whole.own.values()):
            raise NotStackable(KEPT_ELSEWHERE)

    def _epochs(self) -> None:
        loop, step = self.loop, self._caller()
        for _ in range(self.requests[0].epochs):
            loop._ready_before, loop._ready = loop._ready_before + loop._ready, 0
            self.reader.start_epoch()
            self.log.start_epoch(self._metrics)
            for callback, _ in self._callbacks:
                callback.start_epoch()
            self._hook("on_train_epoch_start")
            self._after_hooks()
            for numbers, ranges in self.reader.runs(self._phases()):
                for number in numbers:
                    self._batch_of_each(step, ranges, number)
            loop.epochs_processed += 1
            for callback, _ in self._callbacks:
                callback.end_epoch()
            self._hook("on_train_epoch_end")
            loop.epochs_completed += 1

    def _batch_of_each(self, step: StepCaller, ranges: Sequence[tuple[int, int]], number: int) -> None:
        """Train the clients in some ranges on one batch of each, and step the schedulers that are due."""
        loop, is_last, ends = self.loop, number + 1 == self._batches, list[_Started]()
        own = self._own_step if self._is_step(0, number) else None
        loop._ready, loop.is_last_batch = number + 1, is_last
        started: Iterable[_Started] = self._starting(step, self._stepping_alike(ranges, number), number)
        if own is not None:
            started = list(started)
            self._run_own(started, lambda: own.start(number), logs=False)
        for each in started:
            self._train(each)
            if own is not None or self.trainer.lr_scheduler_configs:
                ends.append(each)
            else:
                self._end_batch(each)
            del each  # so that the next batch takes the memory of this one, which is in the cache
        if own is not None:
            self._run_own(ends, own.finish)
        if self._is_step(0, number):  # of the longest epoch; where a scheduler steps by batches, all are as long
            self._schedule("step", number)
        if is_last:
            self._schedule("epoch", loop.epochs_processed)
        for each in ends:  # which see the rates of the next batch
            self._end_batch(each)

    def _starting(self, step: StepCaller, ranges: Sequence[tuple[int, int]], number: int) -> Iterator[_Started]:
        """Read a batch of each of the clients in some ranges, and do what precedes its pass."""
        for low, high, batch in self._read(ranges, number):
            started = self._start(step, low, high, batch, number)
            del batch
            yield started
            del started

    def _is_step(self, place: int, number: int) -> bool:
        """Return whether a client takes an optimizer step after a batch."""
        return self._accumulated is None or self._accumulated.is_step(number, self.requests[place].reader.batches)

    def _stepping_alike(self, ranges: Sequence[tuple[int, int]], number: int) -> Sequence[tuple[int, int]]:
        """Divide ranges of clients into those that take an optimizer step after a batch, and those that do not."""
        if self._accumulated is None:
            return ranges
        steps = [self._is_step(place, number) for place in range(self.size)]
        return [(low + first, low + end) for low, high in ranges for first, end in equal_ranges(steps[low:high])]

    def _hook(self, name: str) -> None:
        """Call a hook of the module for all clients, if the module overrides it."""
        if name in self.trainer.hooks.overridden:
            for low, high in equal_ranges(self.whole.attributes.phases()):
                self._call(name, self._part(low, high))

    def _batch_hook(self, name: str, one: BatchPass, *outputs: Any) -> Any:
        """Call a hook of the module for a batch of each of several clients, if the module overrides it."""
        if name not in self.trainer.hooks.overridden:
            return None
        require_plain(outputs)
        part = self._part(one.metrics.low, one.metrics.high)
        return self._call(name, part, (*outputs, one.batch), one.number)

    def _call(self, name: str, part: _Part, *args: Any, **options: Any) -> Any:
        """Call a hook of the module for several clients; the arguments are those of :func:`.call_hook`."""
        low, high = part.metrics.low, part.metrics.high
        self.loop.set_steps(self.optimizer.taken[low:high])
        with self._acting(low, high):
            output = call_hook(name, self.trainer.hooks, part.module, part.metrics, self.log, *args, **options)
        self._begun_with.require_same()
        self._hooked = True
        return output

    def _gradient_hook(self, name: str, one: BatchPass, **options: Any) -> None:
        """Call a hook of the module that sees gradients for the clients of a batch, if the module overrides it."""
        if name not in self.trainer.hooks.overridden:
            return
        hooks, samples, leaves = self.trainer.hooks, partial(samples_of, one.batch), one.leaves.values()
        view = None if name == "on_after_backward" else self.optimizer.view()  # the argument of the other hooks
        optimizers, written = list[torch.optim.Optimizer](), _versions(leaves)

        def given(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
            if view is None:
                return ()
            optimizers.append(view({leaf: tensors[key] for key, leaf in self.whole.leaves.items()}))
            return (optimizers[-1],)

        with self._seeing_all(name):
            with self._for_all(), self._structure_kept() as require_kept:
                if name in self._called_for_each:
                    views = self._views(one, given, require_kept)
                    call_for_each(name, hooks, one.part, views, self.log, samples, **options)
                elif call_with_gradients(name, hooks, one.part, one.metrics, self.log, samples, given, **options):
                    one.has_own_gradients = True
            for leaf, before, now in zip(one.part.leaves, written, _versions(leaves), strict=True):
                if now != before:
                    raise NotStackable(f"is followed by `{name}`, which writes into `{leaf}`")
            if any(options_of(each) != options_of(self.optimizer.optimizer) for each in optimizers):
                raise NotStackable(
                    f"is followed by `{name}`, which sets options of the optimizer, which all clients share"
                )
        self.loop.set_steps(self.optimizer.taken[one.metrics.low : one.metrics.high])
        self._begun_with.require_same()
        self._hooked = True

    @contextmanager
    def _seeing_all(self, name: str) -> Iterator[None]:
        """Raise :class:`SeesOneClient` if a hook that is called for all clients at once fails within the context."""
        try:
            yield
        except NotStackable as error:
            if name in self._called_for_each or isinstance(error, ChangesAttribute):
                raise
            raise SeesOneClient(str(error), name) from error

    def _views(
        self,
        one: BatchPass,
        given: Callable[[Mapping[str, Tensor]], tuple[Any, ...]],
        require_kept: Callable[[], None],
    ) -> Iterator[ClientView]:
        """Iterate over what a hook gets for each client of a batch, whose number of steps the module then sees.

        What the first call changes for all clients is found before the second one, which may change it back.
        """
        for place in range(one.metrics.low, one.metrics.high):
            if place == one.metrics.low + 1:
                require_kept()
                self._begun_with.require_same()
            self.loop.set_steps(self.optimizer.taken[place : place + 1])
            rows = self.whole.attributes.states.part(place, place + 1), self._metrics.part(place, place + 1)
            tensors = one.part.view(place - one.metrics.low)
            yield ClientView(tensors, *rows, given(tensors))

    def _after_hooks(self) -> None:
        """Act on what hooks of the module may have changed: weights under masks, layers and their modes."""
        hooked = self._hooked
        self._mask_after_hooks()
        if hooked and self._recorder is not None:
            self._recorder.start(self.whole, self._begun_with)

    def _phases(self) -> list[Hashable]:
        """Return what must agree for clients to step together, besides the sizes of their batches."""
        callbacks, counted = [callback for callback, _ in self._callbacks], self.loop.counted
        clients = enumerate(zip(self.optimizer.taken, self.whole.attributes.phases(), strict=True))
        return [
            (own, steps if counted else None, self._metrics.phase(place), *(each.phase(steps) for each in callbacks))
            for place, (steps, own) in clients
        ]

    def _schedule(self, interval: Literal["step", "epoch"], number: int) -> None:
        if not self.trainer.lr_scheduler_configs:
            return
        with self._hidden(_SCHEDULER_READS) as written:
            step_schedulers(self.trainer, self.trainer.hooks, interval, number, plateau=False)
        self.whole.attributes.states.assign(0, self.size, written)

    @contextmanager
    def _hidden(self, reads: str) -> Iterator[Mapping[int, Any]]:
        """Refuse to read what each client has of its own, such as weights, in what runs once for several clients.

        Yields:
            What attributes have been set to, at the end; see :meth:`.AttributeStates.hidden`.
        """
        self.loop.for_all = True
        attributes = self.whole.attributes.states.hidden(reads)
        weights = OtherTensors(self.whole.own_ids, f"{reads} weights, of which each client has its own")
        try:
            with attributes as written, self._for_all(reads), weights:
                yield written
        finally:
            self.loop.for_all = False

    @contextmanager
    def _for_all(self, reads: str = "reads") -> Iterator[None]:
        """Refuse to read logged values and the optimizer's tensors in what runs once for several clients."""
        with self.optimizer.hidden(reads), self.trainer.for_all():
            yield

    def _caller(self) -> StepCaller:
        """Return the caller of the module's training step."""
        trainer = self.trainer
        return StepCaller(trainer.hooks, self.module, "training_step", trainer.precision_plugin)

    def _read(self, ranges: Sequence[tuple[int, int]], number: int) -> Iterator[tuple[int, int, Any]]:
        """Read one batch of each of the clients in some ranges; see :meth:`.StackReader.read`."""
        for low, high in ranges:
            yield from self.reader.read(low, high, number)

    def _pass_of(self, step: StepCaller, part: _Part, low: int, high: int, batch: Any, number: int) -> BatchPass:
        """Return the pass of one batch of each of the clients of a part, those from `low` to before `high`."""
        trainer, log, taken = self.trainer, self.log, self.optimizer.taken[low:high]
        self.loop.set_steps(taken)
        batch = to_device(trainer, part.module, batch, self._begun_with, self._acting(low, high))
        if trainer.hooks.override_transfer and any(tensor.requires_grad for tensor in tensors_of(batch)):
            self._recorder = None  # since the graph of such a batch serves for one pass
        log.low, log.high, log.samples = low, high, partial(samples_of, batch)
        return BatchPass(part.module, step, batch, number, log, taken, part.metrics)

    def _part(self, low: int, high: int) -> _Part:
        """Return the clients from `low` to before `high`, which take many steps."""
        if (low, high) not in self._parts:
            part = self.whole.part(low, high)
            rows = {leaf: part.leaves[name] for name, leaf in self.whole.leaves.items()}
            self._parts[low, high] = _Part(part, None if part is self.whole else rows, self._metrics.part(low, high))
        return self._parts[low, high]

    def _start(self, step: StepCaller, low: int, high: int, batch: Any, number: int) -> _Started:
        """Do what precedes the pass of a batch of each of the clients from `low` to before `high`."""
        clients, callbacks = self._part(low, high), [callback for callback, _ in self._callbacks]
        if clients.module is not self.whole:
            callbacks = [callback.rows(low, high) for callback in callbacks]
        one = self._pass_of(step, clients, low, high, batch, number)
        one.parts = self.trainer.accumulate_grad_batches
        one.has_outputs = "on_train_batch_end" in self.trainer.hooks.overridden
        self._start_batch(callbacks, one)
        return _Started(one, callbacks, clients)

    def _train(self, started: _Started) -> None:
        """Train several clients on one batch of each."""
        one, callbacks, clients = started
        log, part, recorded = self.log, clients.module, None
        low, high = self._turn_to(one)
        if self._recorder is None:
            self._pass(one, callbacks)
        else:
            training = TrainingPass(one, self.module, self.optimizer.optimizer, lambda: self._pass(one, callbacks))
            recorded = self._recorder.do(training)
        if self._accumulated is not None:
            self._accumulated.add_to(low, high, part.leaves)
            one.has_own_gradients = True
        for callback in callbacks:
            callback.after_backward(one)
        log.collect()
        self._gradient_hook("on_after_backward", one)
        if self._is_step(low, one.number):
            self._step(callbacks, one, clients.rows, None if one.has_own_gradients else recorded)
        elif self._accumulated is not None:
            self._accumulated.keep(low, high, part.leaves)
            for callback in callbacks:
                callback.without_step(part.leaves)
        self._mask_after_hooks()  # hooks may have written gradients under masks

    def _turn_to(self, one: BatchPass) -> tuple[int, int]:
        """Let the trainer and the log be those of the clients of a batch; return the first, and that after the last."""
        low, high = one.metrics.low, one.metrics.high
        self.loop.set_steps(self.optimizer.taken[low:high])
        self.log.low, self.log.high, self.log.samples = low, high, partial(samples_of, one.batch)
        return low, high

    def _step(
        self,
        callbacks: Sequence[StackedCallback],
        one: BatchPass,
        rows: Mapping[Tensor, Tensor] | None,
        recorded: object | None,
    ) -> None:
        """Take an optimizer step of the clients of a batch."""
        low, high = one.metrics.low, one.metrics.high
        self._prepare_step(callbacks, one)
        self.optimizer.step(low, high, rows, recorded)
        if self._accumulated is not None:
            self._accumulated.clear(low, high)
        self.loop.set_steps(self.optimizer.taken[low:high])  # as schedulers see it
        for callback in callbacks:
            callback.after_step(one.leaves)

    def _run_own(self, batches: Sequence[_Started], part: Callable[[], Mapping[int, Any]], logs: bool = True) -> None:
        """Run a part of the module's `optimizer_step`, once for all clients.

        It may set options of the optimizer and attributes, and log after its step: of what is logged before it,
        Lightning keeps nothing if the hook logs after it as well.
        """
        first, log = batches[0].one, self.log
        low, high = self._turn_to(first)
        self.loop.set_steps(first.steps)  # as before the step, also after it
        with log.of_hook("optimizer_step", low, high, log.samples):
            log.level = 0
            written = part()
            logged = list(log.pending), list(log.pending_objects)
            if not logs and any(logged):
                raise NotStackable(f"{OWN_STEP}, which logs before its step")
        for each in batches:
            low, high = self._turn_to(each.one)
            self.whole.attributes.states.assign(low, high, written)
            if each.one is not first:
                with log.of_hook("optimizer_step", low, high, log.samples):
                    log.repeat(*logged)
        self._begun_with.require_same()

    @contextmanager
    def _in_own_step(self, reads: str) -> Iterator[Mapping[int, Any]]:
        """Refuse to read what each client has of its own, and to change layers of the module."""
        structure = structure_of(self.module)
        with self._hidden(reads) as written:
            yield written
        self._require_structure(structure)

    def _end_batch(self, started: _Started) -> None:
        """Let callbacks and the module act after a batch."""
        one = started.one
        self.loop.set_steps(self.optimizer.taken[one.metrics.low : one.metrics.high])
        for callback in started.callbacks:
            callback.after_batch(one)
        for leaf in one.part.leaves.values():
            leaf.grad = None
        self._batch_hook("on_train_batch_end", one, one.outputs)

    def _start_batch(self, callbacks: Sequence[StackedCallback], one: BatchPass) -> None:
        """Let callbacks and the module act before a batch."""
        self._mask_after_hooks()
        for callback in callbacks:
            callback.before_batch(one)
        self._hooked = self._hooked or any(callback.writes_between for callback in callbacks)
        if self._batch_hook("on_train_batch_start", one) == -1:
            raise NotStackable("is preceded by `on_train_batch_start`, which ends the epoch of a client")
        self._mask_after_hooks()

    def _mask_after_hooks(self) -> None:
        """Let callbacks act on weights that hooks of the module may have written."""
        if self._hooked:
            self._hooked = False
            for callback, _ in self._callbacks:
                callback.after_hooks()

    def _prepare_step(self, callbacks: Sequence[StackedCallback], one: BatchPass) -> None:
        """Let callbacks and the module act on the gradients, and clip them."""
        trainer, leaves = self.trainer, one.leaves
        limit, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        for callback in callbacks:
            callback.before_step(leaves, one.steps)
        self._gradient_hook("on_before_optimizer_step", one)
        if "configure_gradient_clipping" in trainer.hooks.overridden:
            options = {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}
            self._gradient_hook("configure_gradient_clipping", one, **options)
        elif limit:
            clip([leaves[name] for name in self._stepped], limit, algorithm == GradClipAlgorithmType.VALUE)
        for callback in callbacks:
            callback.before_update(leaves)

    def _pass(self, one: BatchPass, callbacks: Sequence[StackedCallback]) -> None:
        """Give the clients of a batch their gradients by calling the module's training step."""
        for callback in callbacks:
            callback.before_pass(one)
        self._backward(one)
        if not self.checked:
            self._require_alike()
            self.checked = True

    @contextmanager
    def _acting(self, low: int, high: int) -> Iterator[None]:
        """Refuse to read or change what all clients share in the context, in which those from `low` to `high` act."""
        with self._for_all(), nullcontext() if (low, high) == (0, self.size) else self._structure_kept():
            yield

    @contextmanager
    def _structure_kept(self) -> Iterator[Callable[[], None]]:
        """Refuse to change the optimizer's options, and layers of the module, within the context.

        Yields:
            Function that does so in the midst of it.
        """
        optimizer = self.optimizer.optimizer
        options, structure = options_of(optimizer), structure_of(self.module)

        def require_kept() -> None:
            if options_of(optimizer) != options:
                raise NotStackable("sets options of the optimizer, which all clients share")
            self._require_structure(structure)

        yield require_kept
        require_kept()

    def _require_structure(self, before: list[tuple[Any, ...]]) -> None:
        """Raise :class:`NotStackable` if layers of the module are others than before."""
        if not is_same_structure(structure_of(self.module), before):
            raise NotStackable("changes layers of the module, their modes or their hooks, which all clients share")

    def _backward(self, one: BatchPass, steps: bool = True) -> None:
        """Call the training step, and give the leaves their gradients, from which an optimizer step may follow."""
        loss = self._losses(one).sum()
        if steps and self._clears and one.number % one.parts == 0:
            self._clear_gradients(one)
        with self.whole.attributes.states.hidden(_BACKWARD_READS) as written:
            run_backward(loss)
        if written:  # by what the gradients of all clients may tell
            raise NotStackable("has a backward pass that sets attributes, of which each client needs its own")

    def _clear_gradients(self, one: BatchPass) -> None:
        """Call hooks of the module about gradients that are cleared, of which a stack keeps none after a batch."""
        before, zero = BEFORE_BACKWARD
        part, overridden = self._part(one.metrics.low, one.metrics.high), self.trainer.hooks.overridden
        optimizer, samples, cleared = self.optimizer.optimizer, partial(samples_of, one.batch), list[bool]()
        kernels = [leaf for leaf in part.module.leaves.values() if leaf.dim() > 4]
        written = _versions(kernels)
        self.log.collect()  # values of the step, before those of the hooks
        if before in overridden:
            self._call(before, part, (optimizer,), samples=samples)
        if zero in overridden:
            given = (self.trainer.current_epoch, one.number, optimizer)
            vars(optimizer)["zero_grad"] = lambda set_to_none=True: cleared.append(set_to_none)
            try:
                self._call(zero, part, given, samples=samples)
            finally:
                del vars(optimizer)["zero_grad"]
            if cleared != [True]:
                raise NotStackable(f"is followed by `{zero}`, which does something else than to set gradients to None")
        if _versions(kernels) != written:  # in whose place the pass may have a copy of another layout
            raise NotStackable("writes into a kernel of a convolution before the backward pass")

    def _losses(self, one: BatchPass) -> Tensor:
        """Return the losses of a batch of each client."""
        with self._acting(self.log.low, self.log.high):
            losses = one.train()
        if self.trainer.should_stop:
            raise NotStackable("sets `trainer.should_stop`, which stops all clients")
        if self.checked:
            self._begun_with.require_same()
        else:
            self._require_unchanged()
        return losses


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def rewind(requests: Sequence[StackedRequest]) -> None:
    """Let the readers of requests begin anew, after a fit that failed.

    Args:
        requests: Requests of the clients.
    """
    for request in requests:
        request.result = {}
        request.reader.rewind()


def fit_stack(
    engine: FastEngine,
    module: LightningModule,
    datamodule: Any,
    requests: Sequence[StackedRequest],
    findings: Findings,
    recorder: PassRecorder | None = None,
) -> bool:
    """Fit several clients as one.

    Args:
        engine: Engine that fits a client alone, whose options hold for the stack.
        module: Module of the user; left as it was.
        datamodule: Object that becomes `trainer.datamodule`.
        requests: Requests of the clients, by falling number of samples.
        findings: Findings about the module's steps and hooks.
        recorder: Recorder of the module's steps; None = each batch calls the training step.

    Returns:
        Whether the module has asked for the number of batches.
    """
    with stacked_fit(engine.for_epochs(requests[0].epochs), module, datamodule, requests, findings, recorder) as fit:
        fit.run()
    return fit.loop.asked


@contextmanager
def stacked_fit(
    engine: FastEngine,
    module: LightningModule,
    datamodule: Any,
    requests: Sequence[StackedRequest],
    findings: Findings,
    recorder: PassRecorder | None = None,
) -> Iterator[StackedFit]:
    """Return a fit of several clients, whose changes of the module's attributes are undone if it fails.

    Args:
        engine: Engine that fits a client alone, whose options hold for the stack.
        module: Module of the user; left as it was.
        datamodule: Object that becomes `trainer.datamodule`.
        requests: Requests of the clients, by falling number of samples.
        findings: Findings about the module's steps and hooks.
        recorder: Recorder of the module's steps; None = each batch calls the training step.
    """
    trainer = StackTrainer(engine.options, engine.fabric, module, (), (), datamodule, engine.precision, engine.samples)
    seed_all(*requests[0].key, "stack")
    with restore_trainer_refs(module, ()), trainer.running(), functions_for_clients():
        fit = StackedFit(trainer, requests, findings, recorder)
        try:
            yield fit
        except Exception:
            fit.restore()
            raise
        finally:
            fit.release()
