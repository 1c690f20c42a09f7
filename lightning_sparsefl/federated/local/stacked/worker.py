"""Worker that trains several clients of one rank at once."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import WarningCache

from lightning_sparsefl.callbacks.stacking import stacking_key
from lightning_sparsefl.federated.exchange.failures import is_out_of_memory, release_memory
from lightning_sparsefl.federated.exchange.orders import Answer
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.fast.support import overridden
from lightning_sparsefl.federated.local.fast.trainer import FastTrainer
from lightning_sparsefl.federated.local.isolation import restore_trainer_refs
from lightning_sparsefl.federated.local.round_lr import ScaleLearningRates
from lightning_sparsefl.federated.local.stacked import fibers, functorch
from lightning_sparsefl.federated.local.stacked.fit import StackedFit, StackedRequest, nothing, require_elementwise
from lightning_sparsefl.federated.local.stacked.reader import ClientReader, readable, reading_key
from lightning_sparsefl.federated.local.stacked.trial import TrialOptimizer, difference, reason_of
from lightning_sparsefl.federated.local.worker import ClientWorker, FitRequest
from lightning_sparsefl.seeds import seed_all
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.types import FitResult

_messages = WarningCache()
_SERVED_HOOKS = frozenset({"training_step", "validation_step", "test_step", "predict_step", "configure_optimizers"})
"""Hooks that a stacked fit calls, or that are not called in a fit."""
_PRECISIONS = ("32-true", "64-true")
_CACHE = 16 * 2**20
"""Bytes of a stack on a CPU."""
_MOST = 25
"""Largest number of clients in a stack."""


class StackedWorker(ClientWorker):
    """Worker whose clients wait for each other's fits, which are then done as one.

    Fits that differ in more than numbers, and those of a module or of data that cannot be stacked, are done one after
    another as in :class:`ClientWorker`.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shares: dict[int, float] = {}
        self._scheduled, self._activations = False, 0
        self._alone = self._reason()
        if self._alone is not None:
            _messages.warn(
                f"Clients train one after another, since {self._alone}; set `federation.local_engine: auto`."
            )

    @property
    def can_stack(self) -> bool:
        """Whether clients can be stacked at all."""
        return self._alone is None

    def stack_size(self, cohort: int) -> int:
        """Return the number of clients in a stack by a fixed rule, so that a run repeats itself.

        Weights, gradients and activations of a stack are to stay within a processor's cache, or a part of a GPU's
        memory, and a cohort has two stacks where they can have three clients, so that two ranks have work.

        Args:
            cohort: Number of clients in a round.

        Returns:
            The number; 1 where fewer than three clients fit.
        """
        budget = (
            _CACHE if self.device.type == "cpu" else torch.cuda.get_device_properties(self.device).total_memory // 8
        )
        element = self.flat.vector.element_size()
        fits = int(min(budget // (element * (3 * self.flat.layout.size + 2 * self._activations)), _MOST))
        size = min(fits, max(3, math.ceil(cohort / 2)))
        return size if size >= 3 else 1

    # ---- what can be stacked

    def _reason(self) -> str | None:
        """Return why clients cannot be stacked, as a clause, or None."""
        reason = self._reason_of_settings() or self._reason_of_module()
        return reason or self._trial()

    def _reason_of_settings(self) -> str | None:
        missing, engine, work = functorch.missing_name(), self.engine, self.work
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
        module, name = self.module, type(self.module).__name__
        if not module.automatic_optimization:
            return f"`{name}` optimizes manually"
        further = sorted(overridden(module) - _SERVED_HOOKS)
        if further:
            return f"`{name}` overrides `{further[0]}`, which is written for one client"
        if type(module).log is not LightningModule.log or type(module).log_dict is not LightningModule.log_dict:
            return f"`{name}` overrides `log`"
        for child_name, child in module.named_modules():
            if isinstance(child, torch.nn.modules.batchnorm._BatchNorm) and child.momentum is None:
                return f"`{child_name}` averages over all batches (`momentum=None`)"
        loader = self.data.client_train_dataloader(0)
        if not readable(loader):
            return f"client 0's loader is not one of `Examples` in memory but of `{type(loader.dataset).__name__}`"
        trainer = self._trainer()
        if any(hook is not None for hook in trainer.hooks._transfers.values()):
            return "the data module overrides a hook of the batch transfer"
        return None

    def _trial(self) -> str | None:
        """Train two clients on one batch, stacked and alone; return why the results differ, or None."""
        module, name = self.module, type(self.module).__name__
        generator = torch.Generator().manual_seed(0)
        first = dict(self.initial)
        second = {
            n: w if n in self.flat.layout.buffers else w + 0.02 * torch.randn(w.shape, generator=generator).to(w)
            for n, w in first.items()
        }
        engine = cast(FastEngine, self.engine)
        one_batch = FastEngine(engine.fabric, replace(engine.options, max_epochs=1, limit_train_batches=1))
        random = torch.get_rng_state()
        try:
            with TrialOptimizer(module), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as those of vmap about slow functions
                alone = []
                for weights in (first, second):
                    self.load(weights)
                    seed_all("trial")
                    with self._counting_activations():
                        one_batch.fit(module, self.data.client_train_dataloader(0), datamodule=self.data)
                    alone.append({n: t.detach().clone() for n, t in self.flat.read().items()})
                requests = []
                for weights in (first, second):
                    seed_all("trial")
                    reader = ClientReader(self.data.client_train_dataloader(0), 1)
                    requests.append(StackedRequest(cast(Any, None), (), weights, {}, [], reader, 1))
                self.load(first)
                self._fit_stack(requests)
            for request, theirs, before in zip(requests, alone, (first, second), strict=True):
                clause = difference(request.result, theirs, before)
                if clause is not None:
                    return f"`{name}.training_step` {clause}"
            return self._reason_of_optimizers()
        except Exception as error:
            return f"`{name}.training_step` {reason_of(error)}"
        finally:
            self.load(first)
            torch.set_rng_state(random)
            module.zero_grad()

    @contextmanager
    def _counting_activations(self) -> Iterator[None]:
        """Count the numbers that the layers return for one batch."""
        self._activations = 0

        def count(module: Any, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                self._activations += output.numel()

        leaves = [child for child in self.module.modules() if not any(child.children())]
        handles = [leaf.register_forward_hook(count) for leaf in leaves]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _reason_of_optimizers(self) -> str | None:
        """Return why the module's optimizers cannot be stacked, or None; learn whether there are schedulers."""
        trainer = self._trainer()
        trainer.fit_loop.setup_data, trainer.fit_loop.max_batches = nothing, 1  # type: ignore[method-assign]
        with restore_trainer_refs(self.module, ()), trainer.running():
            trainer.strategy.setup_optimizers(trainer)  # type: ignore[arg-type]
            require_elementwise(trainer)
            self._scheduled = bool(trainer.lr_scheduler_configs)
        return None

    # ---- fits

    def together(self, works: Sequence[Callable[[], Answer]]) -> Iterator[Answer]:
        """Do several clients' work, where those that fit wait for each other.

        Args:
            works: Work of each client.

        Yields:
            Their answers, with the seconds of a stack shared out evenly.
        """
        if self._alone is not None or len(works) == 1:
            for work in works:
                yield work()
            return
        self._shares = {}
        for answer, seconds in fibers.run(works, self._serve):
            yield replace(answer, elapsed=seconds + self._shares.get(answer.client, 0.0))

    def fit_alone(self, request: FitRequest) -> FitResult:
        """Do a fit as part of a stack, if the client's work runs beside others' and the fit can be stacked."""
        together = fibers.waiting() and self._alone is None
        if not together or request.units is not None or request.client.deadline is not None:
            return super().fit_alone(request)
        stacked = self._request(request)
        if stacked is None or not fibers.ask(stacked):
            return super().fit_alone(request)
        layout = self.flat.layout
        flat = torch.cat([stacked.result[name].reshape(-1).to(layout.dtype) for name in layout.names])
        return FitResult(
            weights=layout.tree(flat), metrics=stacked.metrics, steps=stacked.steps, callbacks=stacked.callbacks
        )

    def _request(self, request: FitRequest) -> StackedRequest | None:
        """Return what the client asks of the stacked engine; None for a loader that it cannot read."""
        weights = request.weights
        if len(weights) < len(self.initial):
            weights = {**self.initial, **weights}
        if request.masks:
            weights = {**weights, **apply(weights, request.masks)}
        callbacks = self.callbacks_of(request.client, request.masks, request.trainable, request.callbacks)
        loader = self.train_loader(request.client, request.key)
        if not readable(loader):
            return None
        engine = cast(FastEngine, self.engine)
        reader = ClientReader(loader, engine.options.limit_train_batches)
        epochs = engine.options.max_epochs if request.epochs is None else request.epochs
        return StackedRequest(request.client, request.key, weights, request.trainable, callbacks, reader, epochs)

    def _serve(self, requests: Sequence[StackedRequest]) -> list[bool]:
        """Fit the requests of equal keys as stacks; return for each whether it was."""
        groups: dict[Hashable, list[StackedRequest]] = {}
        for request in requests:
            key = self._key(request)
            groups.setdefault(id(request) if key is None else key, []).append(request)
        for group in groups.values():
            if len(group) > 1:
                self._fit_group(sorted(group, key=lambda r: (-r.reader.num_examples, r.client.id)))
        return [bool(request.result) for request in requests]

    def _key(self, request: StackedRequest) -> Hashable | None:
        """Return what must agree for fits to be stacked; None for a fit that cannot be."""
        kinds = []
        for callback in request.callbacks:
            rates = type(callback) is ScaleLearningRates
            kind = ("rates", cast(ScaleLearningRates, callback).factor) if rates else stacking_key(callback)
            if kind is None:
                return None
            kinds.append(kind)
        length = request.reader.batches if self._scheduled else None  # rates are those of all clients of a stack
        return (request.epochs, length, tuple(kinds), reading_key(request.reader))

    def _fit_group(self, group: Sequence[StackedRequest]) -> None:
        """Fit a stack; one that is out of memory is halved, and the clients of one that fails train alone."""
        started = time.perf_counter()
        try:
            self._fit_stack(group)
        except Exception as error:
            for request in group:
                request.result = {}
            if not is_out_of_memory(error):
                _messages.warn(
                    f"{len(group)} clients train one after another, since `{type(self.module).__name__}.training_step` "
                    f"{reason_of(error)}."
                )
                return
            release_memory(error, self.module)
            if len(group) > 3:
                half = (len(group) + 1) // 2
                _messages.warn(
                    f"A stack of {len(group)} clients does not fit into the memory, and is halved; lower "
                    "`federation.stack_size`."
                )
                self._fit_group(group[:half])
                self._fit_group(group[half:])
            return
        share = (time.perf_counter() - started) / len(group)
        for request in group:
            self._shares[request.client.id] = self._shares.get(request.client.id, 0.0) + share

    def _fit_stack(self, requests: Sequence[StackedRequest]) -> None:
        trainer = self._trainer()
        seed_all(*requests[0].key, "stack")
        with restore_trainer_refs(self.module, ()), trainer.running():
            StackedFit(trainer, requests).run()

    def _trainer(self) -> FastTrainer:
        engine = cast(FastEngine, self.engine)
        return FastTrainer(engine.options, engine.fabric, self.module, (), (), self.data)
