"""The evaluations of several clients as one, each with its own weights, samples, logged values and metric objects."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor

from lightning_sparsefl.data.examples import Examples, Normalize, reads_all_in_order, reads_here
from lightning_sparsefl.federated.exchange.orders import Split
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.fast.batches import num_batches
from lightning_sparsefl.federated.local.fast.steps import StepCaller
from lightning_sparsefl.federated.local.isolation import Settings, isolate_metrics, restore_trainer_refs
from lightning_sparsefl.federated.local.stacked.fitting.hooks import (
    BATCH_HOOKS,
    EVALUATION_HOOKS,
    call_hook,
    require_plain,
    to_device,
)
from lightning_sparsefl.federated.local.stacked.fitting.stack_trainer import StackTrainer
from lightning_sparsefl.federated.local.stacked.logs import EvaluationLog
from lightning_sparsefl.federated.local.stacked.metrics.functional import functions_for_clients
from lightning_sparsefl.federated.local.stacked.metrics.states import MetricRows, MetricStates
from lightning_sparsefl.federated.local.stacked.reading.reader import ClientReader, reading_key
from lightning_sparsefl.federated.local.stacked.reading.stack_reader import StackReader, equal_ranges, samples_of
from lightning_sparsefl.federated.local.stacked.recording.recorded_evaluation import EvaluationPass
from lightning_sparsefl.federated.local.stacked.recording.recorder import PassRecorder
from lightning_sparsefl.federated.local.stacked.states.findings import Findings
from lightning_sparsefl.federated.local.stacked.states.leaves import StackedModule, shared_names
from lightning_sparsefl.federated.local.stacked.states.undo import ModuleStates, require_same_settings
from lightning_sparsefl.seeds import seed_all
from lightning_sparsefl.sparse.modes import modes_restored
from lightning_sparsefl.types import Weights

_STAGES = {"val": RunningStage.VALIDATING, "train": RunningStage.VALIDATING, "test": RunningStage.TESTING}


def readable_in_order(loader: Any) -> bool:
    """Return whether several clients' batches of such a loader can be read together.

    Args:
        loader: Loader of a client's validation or test data.
    """
    return reads_here(loader) and reads_all_in_order(loader)


@dataclass
class EvaluationRequest:
    """One evaluation that a client asks for, and its result."""

    client: int
    """Number of the client."""
    key: tuple[int | str, ...]
    """Key of the randomness of a stack that begins with this client."""
    weights: Weights
    """Weights to evaluate, with every name of the model."""
    loader: Any
    """Loader that is :func:`readable_in_order`."""
    split: Split
    own_key: Callable[[], tuple[int | str, ...]] = tuple
    """Function that returns the key of the randomness of this client's samples."""
    result: dict[str, float] = field(default_factory=dict)
    """Value of each logged key."""

    @cached_property
    def examples(self) -> Examples | None:
        """Samples of the client, if they are tensors of which slices are batches."""
        examples: Examples = self.loader.dataset
        if not Examples.are_read_by(self.loader) or type(examples.transform) not in (type(None), Normalize):
            return None
        return examples

    @property
    def reading_key(self) -> Hashable:
        """What must agree for clients to be read together."""
        return "items" if self.examples is None else reading_key(self.examples)

    @property
    def batch_size(self) -> int:
        """Number of samples in a whole batch."""
        size: int = self.loader.batch_sampler.batch_size
        return size

    @property
    def num_examples(self) -> int:
        """Number of samples."""
        return len(self.loader.dataset)

    def reader(self) -> ClientReader:
        """Return a reader of the samples, after seeding all generators as for this client alone."""
        seed_all(*self.own_key())
        return ClientReader(self.loader, 1.0)

    def size(self, number: int) -> int:
        """Return the number of samples of a batch; 0 after the last one.

        Args:
            number: Number of the batch, from 0.
        """
        return max(0, min(self.batch_size, self.num_examples - number * self.batch_size))


class StackedEvaluation:
    """One evaluation of several clients.

    Weights that are the same for all clients are stored once, and their layers take all samples as one batch.

    Args:
        trainer: Trainer that the module sees, without callbacks and loggers.
        requests: Requests of one split, by falling number of samples.
        findings: Findings about the module's steps and hooks; steps that change attributes are not recorded.
        recorder: Recorder of the module's evaluations; None = each batch calls the module's step.
    """

    def __init__(
        self,
        trainer: StackTrainer,
        requests: Sequence[EvaluationRequest],
        findings: Findings,
        recorder: PassRecorder | None = None,
    ) -> None:
        self.trainer, self.requests, self.size = trainer, requests, len(requests)
        self.module, self.stage = trainer.lightning_module, _STAGES[requests[0].split]
        examples = [request.examples for request in requests if request.examples is not None]
        self._examples = trainer.device_samples.of(examples)
        self._reader = None if examples else StackReader([request.reader() for request in requests])
        seed_all(*requests[0].key)
        self.log, self.kept = EvaluationLog(self.size), ModuleStates(self.module)
        sees_batches = BATCH_HOOKS & EVALUATION_HOOKS & trainer.hooks.overridden
        self._recorder = None if findings.attributes or sees_batches else recorder
        trees = [request.weights for request in requests]
        self.whole = StackedModule(self.module, self.size, shared_names(trees, trees[0]), findings.attributes)
        self.whole.load(trees)
        limit = getattr(trainer, f"limit_{self.stage.dataloader_prefix}_batches")
        self._batches = [num_batches(self.stage, len(request.loader), limit) for request in requests]

    @torch.no_grad()
    def run(self) -> None:
        """Evaluate, and fill each request's result.

        Raises:
            NotStackable: If the step does something that has no meaning for several clients at once.
        """
        trainer, name = self.trainer, self._name
        trainer._start(TrainerFn(self.stage.value), self.stage)
        self.metrics = MetricStates(self.module, self.size)
        settings = Settings.of_trainer(trainer)
        step = StepCaller(trainer.hooks, self.module, f"{name}_step", trainer.precision_plugin)
        with self.log.receiving(self.module), modes_restored(self.module), trainer.for_all():
            trainer.hooks.call_module(f"on_{name}_model_eval")
            if self._reader is not None:
                self._reader.start_epoch()
            self._hook(f"on_{name}_start")
            self._hook(f"on_{name}_epoch_start")
            if self._recorder is not None:
                self._recorder.start(self.whole, self.kept, name)
            for number in range(max(self._batches)):
                for low, high, batch in self._read(number):
                    self._batch(step, low, high, batch, number)
                    del batch  # so that the next one takes its memory, which is in the cache
            results = self.log.results(self.metrics)
            self._hook(f"on_{name}_epoch_end")
            for result, later in zip(results, self.log.results(self.metrics), strict=True):
                result |= later
            self._hook(f"on_{name}_end")
        self.kept.require_unchanged()
        self.metrics.require_usual()
        require_same_settings(settings)
        trainer._close()
        trainer._finish()
        self.whole.tell_contents()
        for request, result in zip(self.requests, results, strict=True):
            request.result = result
        isolate_metrics(self.module)

    @property
    def _name(self) -> str:
        return "test" if self.stage is RunningStage.TESTING else "validation"

    def _hook(self, name: str) -> None:
        """Call a hook of the module for all clients, if the module overrides it."""
        if name in self.trainer.hooks.overridden:
            for low, high in equal_ranges(self.whole.attributes.phases()):
                self._call(name, self.whole.part(low, high), self.metrics.part(low, high))

    def _batch_hook(self, time: str, one: EvaluationPass, *outputs: Any) -> None:
        """Call a hook of the module for a batch of each of several clients, if the module overrides it."""
        name = f"on_{self._name}_batch_{time}"
        if name in self.trainer.hooks.overridden:
            require_plain(outputs)
            self._call(name, one.part, one.metrics, (*outputs, one.batch), one.number)

    def _call(self, name: str, part: StackedModule, metrics: MetricRows, *args: Any) -> None:
        call_hook(name, self.trainer.hooks, part, metrics, self.log, *args)
        self.kept.require_same()

    def _ranges(self, number: int) -> Iterator[tuple[int, int]]:
        """Iterate over ranges of clients, from the first one to before the last one, whose batches have equal sizes."""
        sizes = [
            request.size(number) if number < batches else 0
            for request, batches in zip(self.requests, self._batches, strict=True)
        ]
        low = 0
        for size, group in groupby(sizes):
            high = low + len(list(group))
            if size:
                yield low, high
            low = high

    def _batch(self, step: StepCaller, low: int, high: int, batch: Any, number: int) -> None:
        """Evaluate the clients from `low` to before `high` on one batch of each."""
        trainer, log, part = self.trainer, self.log, self.whole.part(low, high)
        batch = to_device(trainer, part, batch, self.kept, nullcontext())
        log.low, log.high, log.samples = low, high, partial(samples_of, batch)
        sees = f"on_{self._name}_batch_end" in trainer.hooks.overridden
        one = EvaluationPass(part, step, batch, number, log, self.metrics.part(low, high), sees)
        self._batch_hook("start", one)
        recorded = None
        if self._recorder is None:
            one.call()
        else:
            recorded = self._recorder.do(one)
        log.collect()
        if low == number == 0:  # so that the other batches are not evaluated in vain
            self.kept.require_unchanged()
        elif recorded is None:
            self.kept.require_same()
        self._batch_hook("end", one, one.output)

    def _read(self, number: int) -> Iterator[tuple[int, int, Any]]:
        """Read one batch of each client; see :meth:`.StackReader.read`."""
        for low, high in self._ranges(number):
            if self._reader is None:
                yield low, high, self._read_examples(low, high, number)
            else:
                yield from self._reader.read(low, high, number)

    def _read_examples(self, low: int, high: int, number: int) -> tuple[Tensor, Tensor]:
        """Return inputs of shape (clients, samples, ...) and labels of shape (clients, samples)."""
        chosen, first = self._examples[low:high], number * self.requests[low].batch_size
        size = self.requests[low].size(number)
        inputs = torch.stack([examples.inputs[first : first + size] for examples in chosen])
        labels = torch.stack([examples.labels[first : first + size] for examples in chosen])
        transform = chosen[0].transform
        return (inputs if transform is None else transform(inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])), labels


def evaluate_stack(
    engine: FastEngine,
    module: LightningModule,
    datamodule: Any,
    requests: Sequence[EvaluationRequest],
    findings: Findings,
    recorder: PassRecorder | None = None,
) -> None:
    """Evaluate several clients as one.

    Args:
        engine: Engine that evaluates a client alone, whose options hold for the stack.
        module: Module of the user; left as it was.
        datamodule: Object that becomes `trainer.datamodule`.
        requests: Requests of one split, by falling number of samples.
        findings: Findings about the module's steps and hooks.
        recorder: Recorder of the module's evaluations; None = each batch calls the module's step.
    """
    trainer = StackTrainer(engine.options, engine.fabric, module, (), (), datamodule, samples=engine.samples)
    with restore_trainer_refs(module, ()), trainer.running(), functions_for_clients():
        evaluation = StackedEvaluation(trainer, requests, findings, recorder)
        try:
            evaluation.run()
        except Exception:
            evaluation.kept.restore()
            raise
