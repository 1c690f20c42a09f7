"""The worker of a rank: its module, data and engine, shared by its clients in sequence."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.rank_zero import WarningCache

from lightning_sparsefl.callbacks import LayerFreezing, StaticMask
from lightning_sparsefl.callbacks.layers import require_maskable
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.errors import InvalidOption, InvalidUpdate
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.exchange.failures import (
    naming_cut_layers,
    naming_evaluation_mode,
    naming_frozen_layers,
    naming_single_samples,
    release_memory,
)
from lightning_sparsefl.federated.exchange.flat import FlatModule, FlatTree
from lightning_sparsefl.federated.exchange.orders import Split
from lightning_sparsefl.federated.local.deadline import CheckDeadline
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.example_input import require_cuttable, units_of
from lightning_sparsefl.federated.local.fast.batch_scores import PartScore
from lightning_sparsefl.federated.local.lightning_trainer import LightningEngine
from lightning_sparsefl.federated.local.round_lr import RoundLR, ScaleLearningRates, checked_factor
from lightning_sparsefl.federated.local.tensor_contents import forget_copies
from lightning_sparsefl.seeds import derive_seed, seed_all
from lightning_sparsefl.sparse.masks import apply, intersect
from lightning_sparsefl.sparse.modes import modes_restored
from lightning_sparsefl.sparse.parts import norms_of
from lightning_sparsefl.sparse.submodel import cut, keep_statistics, narrow, widen
from lightning_sparsefl.sparse.units import UnitGroup, unit_masks
from lightning_sparsefl.sparse.uses import TensorUses, uses_of
from lightning_sparsefl.types import FitResult, Masks, Weights

_messages = WarningCache()
_RESET = (
    "The work of a client has changed the buffer `{}`, which has no floating-point numbers, and so is set back for "
    "each client; make it a floating-point buffer to have it merged."
)
_STAGES: dict[Split, Literal["validate", "test"]] = {"val": "validate", "test": "test", "train": "validate"}


@dataclass(frozen=True)
class LocalWork:
    """Settings of local training that are the same for all clients and algorithms."""

    client_callbacks: Sequence[Callback] = ()
    """Callbacks of the user, copied for each client."""
    round_lr: RoundLR | None = None
    """Schedule of the learning rates over rounds."""
    validate: bool = False
    """Whether to run a client's validation loader after each local epoch."""
    execution: Literal["mask", "cut"] = "mask"
    """How units are excluded from training, option `federation.execution`."""


@dataclass(frozen=True)
class FitRequest:
    """One local fit that an algorithm asks for; see :meth:`Client.fit`."""

    client: Client
    key: tuple[int | str, ...]
    """Key of the randomness."""
    weights: Weights
    masks: Masks
    trainable: Masks
    callbacks: Sequence[Callback]
    epochs: int | None
    """Number of local epochs; None = those of the engine."""
    units: Masks | None


class ClientWorker:
    """Worker that trains and evaluates the clients of one rank in sequence, with one module.

    Args:
        module: Module of the user, on its device.
        datamodule: Data module of the clients, already set up.
        engine: Local engine.
        work: Settings of local training.
        device: Device of the module.
    """

    def __init__(
        self,
        module: LightningModule,
        datamodule: Any,
        engine: FastEngine | LightningEngine,
        work: LocalWork,
        device: torch.device,
    ) -> None:
        self.module, self.data, self.engine, self.work, self.device = module, datamodule, engine, work, device
        self.flat = FlatModule(module)
        self.initial: FlatTree = self.flat.read()
        self.buffers = self.flat.layout.buffers
        self._warned: set[tuple[type[Warning], str]] = set()
        self._maskable: set[str] = set()
        """Names that masks have had."""
        weights = self.flat.layout.shapes
        self._codes = {name: p for name, p in module.named_parameters() if name not in weights}
        """Parameters that are not weights, such as those of a quantized layer."""
        others = {**self._codes, **{name: b for name, b in module.named_buffers() if name not in weights}}
        self._counters = {name: tensor.detach().clone() for name, tensor in others.items()}
        whole = {n for n, b in module.named_buffers() if not (b.is_floating_point() or b.is_complex())}
        kept = self._counters.keys() & module.state_dict().keys() & whole
        self._untold = {name for name in kept if not name.endswith("num_batches_tracked")}
        """Buffers that a user may expect to go on, of which no client is known to have changed one."""
        self._has_loaded = False
        forget_copies()

    def load(self, weights: Weights) -> None:
        """Load weights into the module, and reset integers such as `num_batches_tracked` to initial values.

        So are buffers that no checkpoint has, such as a cache that training may have replaced by a longer one.

        Args:
            weights: Weights by name; names that are missing get the run's initial values.
        """
        self.flat.load(self._whole(weights))
        buffers = dict(self.module.named_buffers()) if self._counters else {}
        for name, first in self._counters.items():
            now = buffers.get(name, self._codes.get(name))
            if self._has_loaded and name in self._untold and now is not None and _differs(now, first):
                self._untold.remove(name)
                _messages.info(_RESET.format(name))
            if now is None or now.shape != first.shape or now.is_inference():
                owner, _, leaf = name.rpartition(".")
                self.module.get_submodule(owner)._buffers[leaf] = first.clone()
            else:
                now.copy_(first)
        self._has_loaded = True

    def restore_counters(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the integers that every client starts from out of a checkpoint.

        Args:
            state: ``state_dict`` of the module.
        """
        for name in self._counters.keys() & state.keys():
            self._counters[name] = state[name].to(self._counters[name])
        self._has_loaded = False

    def fit(
        self,
        client: Client,
        weights: Weights,
        masks: Masks,
        trainable: Masks,
        callbacks: Sequence[Callback],
        *,
        epochs: int | None = None,
        units: Masks | None = None,
    ) -> FitResult:
        """Train one client; see :meth:`Client.fit`."""
        epochs = client.local_epochs if epochs is None else epochs
        return self.do_fit(FitRequest(client, client.key("fit"), weights, masks, trainable, callbacks, epochs, units))

    def do_fit(self, request: FitRequest) -> FitResult:
        """Do one fit.

        Args:
            request: Weights, masks and callbacks of the fit.
        """
        client, weights, masks, trainable = request.client, request.weights, request.masks, request.trainable
        units, engine = request.units, self.engine
        if request.epochs is not None:
            engine = engine.for_epochs(request.epochs)
        module = self.module
        if units is not None:
            masks = intersect(masks, unit_masks(self.units, units, weights))
        self.load(apply(weights, masks) if masks else weights)
        if units is not None and self.work.execution == "cut":
            module = cast(LightningModule, cut(self.module, self.units, units))
            masks, trainable = (narrow(tree, self.units, units) for tree in (masks, trainable))
            masks = {name: mask for name, mask in masks.items() if not bool(mask.all())}
        attached = self.callbacks_of(client, masks, trainable, request.callbacks)
        loader = self.train_loader(client, request.key)
        validation = self.data.client_val_dataloader(client.id) if self.work.validate else None
        _seed_generators(validation, request.key)
        is_cut = module is not self.module
        with self._warning_once(), naming_frozen_layers(trainable), naming_cut_layers(is_cut):
            metrics = engine.fit(module, loader, validation, callbacks=attached, datamodule=self.data_of(client.id))
        if units is not None and is_cut:
            self._widen(module, units)
        elif units is not None and self.buffers:
            self.flat.load(keep_statistics(self.flat.read(), self.units, units, self._whole(weights), self.buffers))
        return FitResult(
            weights=self.flat.read(),
            metrics={name: float(value) for name, value in metrics.items()},
            steps=engine.global_step,
            callbacks=request.callbacks,
        )

    @cached_property
    def norms(self) -> frozenset[str]:
        """Names of the tensors of the module's norms."""
        return norms_of(self.module)

    @cached_property
    def uses(self) -> TensorUses:
        """Uses of the module's parameters by its layers."""
        return uses_of(self.module)

    @cached_property
    def units(self) -> Sequence[UnitGroup]:
        """The module's groups of units, which can be cut out if they are to be.

        Raises:
            InvalidOption: If the module has no units, or its ``forward`` depends on their number and they are cut out.
        """
        groups = units_of(self.module, self.data)
        if self.work.execution == "cut":
            require_cuttable(self.module, self.data, groups)
        return groups

    @property
    def exits(self) -> Mapping[str, str]:
        """The module's early exits by the last module of each block; empty without `exits`."""
        return dict(getattr(self.module, "exits", {}))

    def _whole(self, weights: Weights) -> Weights:
        """Return weights with every name of the model; those that are missing get the run's initial values."""
        return weights if len(weights) == len(self.initial) else {**self.initial, **weights}

    def _require_trainable(self, client: Client, trainable: Masks) -> None:
        """Raise if masks leave no weight to train.

        Raises:
            InvalidUpdate: If no weight may change.
        """
        moves = (name not in trainable or bool(trainable[name].any()) for name in self.flat.layout.trainable)
        if not any(moves):
            frozen = self.flat.layout.frozen
            others = f" where the module itself does not freeze them, as it does `{min(frozen)}`" if frozen else ""
            raise InvalidUpdate(
                f"The masks of trainable weights of client {client.id} are False everywhere{others}; expected one to "
                "train."
            )

    def _widen(self, module: LightningModule, kept: Masks) -> None:
        """Write a narrow module's weights back into the full module; the units that were cut keep their values."""
        names = self.flat.layout.names
        state = {name: value for name, value in module.state_dict().items() if name in names}
        self.flat.load(widen(state, self.units, kept, self.flat.read()))

    def train_loader(self, client: Client, key: tuple[int | str, ...]) -> Any:
        """Return the client's loader, and seed the global generators for it.

        Args:
            client: The client.
            key: Key of the randomness, by purpose, round and client only.

        Raises:
            InvalidOption: If the loader has no batch.
        """
        seed_all(*key)
        loader = self.data.client_train_dataloader(client.id)
        require_batches(loader, client.id, client.num_examples)
        _seed_generators(loader, key)
        return loader

    def callbacks_of(self, client: Client, masks: Masks, trainable: Masks, own: Sequence[Callback]) -> list[Callback]:
        """Return the callbacks of the user, of the algorithm and of the masks; the last ones act last on gradients.

        Args:
            client: The client.
            masks: Masks that are held.
            trainable: Masks of what may change.
            own: Callbacks of the algorithm.

        Raises:
            InvalidOption: If a parametrization, such as weight norm, computes a weight from what is masked.
        """
        users = copy.deepcopy(list(self.work.client_callbacks))
        for callback in users:
            if isinstance(callback, MaskingCallback):
                callback.train_from(self.initial)
        attached = [*users, *own]
        if client.deadline is not None:
            attached.insert(0, CheckDeadline(client.deadline))
        if trainable:
            self._require_trainable(client, trainable)
            attached.append(LayerFreezing(trainable))
        if masks:
            require_maskable(self.module, sorted(masks.keys() - self._maskable), "algorithm", by_layers=False)
            self._maskable |= masks.keys()
            attached.append(StaticMask(masks=masks))
        if self.work.round_lr is not None:
            factor = checked_factor(self.work.round_lr, client.round, client.max_rounds)
            attached.append(ScaleLearningRates(factor))
        return attached

    def gradient(self, client: Client, weights: Weights) -> Weights:
        """Compute the gradient of one batch; see :meth:`Client.gradient`."""
        loader = self.train_loader(client, client.key("gradient"))
        return self.differentiate(weights, loader, self.data_of(client.id))

    def differentiate(self, weights: Weights, loader: Any, datamodule: Any = None) -> Weights:
        """Compute the gradient of a loader's first batch, in evaluation mode.

        Args:
            weights: Weights to take the gradient at.
            loader: Loader of a client's training data, for which the global generators are seeded.
            datamodule: Data module of the trainer; None = that of all clients.
        """
        self.load(weights)
        batch = next(iter(loader))
        with modes_restored(self.module), naming_evaluation_mode():
            self.module.eval()
            self.engine.gradient(self.module, batch, datamodule=self.data if datamodule is None else datamodule)
        gradients = {name: _gradient_of(parameter) for name, parameter in self.module.named_parameters()}
        self.module.zero_grad(set_to_none=True)
        return gradients

    def evaluate(self, client: Client, weights: Weights, split: Split) -> Mapping[str, float]:
        """Evaluate weights on a split of one client; see :meth:`Client.evaluate`."""
        loader = getattr(self.data, f"client_{split}_dataloader")(client.id)
        return self.score(weights, loader, split, client.key("evaluate"), self.data_of(client.id))

    def data_of(self, client: int) -> Any:
        """Return the data module that a client's trainer has.

        Args:
            client: Number of the client.
        """
        return self.data.datamodule_of(client) if hasattr(self.data, "datamodule_of") else self.data

    def score(
        self, weights: Weights, loader: Any, split: Split, key: tuple[int | str, ...], datamodule: Any = None
    ) -> Mapping[str, float]:
        """Compute the module's metrics with these weights on one loader.

        Args:
            weights: Weights to evaluate.
            loader: Loader of labelled batches.
            split: Split of the loader; "test" calls `test_step`, the others call `validation_step`.
            key: Key of the random seed.
            datamodule: Data module of the trainer; None = that of all clients.

        Raises:
            InvalidOption: If `loader` is None.
        """
        self._prepare_scoring(weights, loader, split, key)
        datamodule = self.data if datamodule is None else datamodule
        with self._warning_once(), naming_single_samples(split):
            return self.engine.evaluate(self.module, loader, stage=_STAGES[split], datamodule=datamodule)

    def score_part(
        self, weights: Weights, loader: Any, split: Split, key: tuple[int | str, ...], part: tuple[int, int]
    ) -> PartScore:
        """Compute what a part of a loader adds to the module's metrics; :func:`join_scores` adds the parts.

        Args:
            weights: Weights to evaluate.
            loader: Loader of labelled batches.
            split: Split of the loader.
            key: Key of the random seed.
            part: Number of this part, and number of all parts.

        Raises:
            InvalidOption: If `loader` is None.
        """
        self._prepare_scoring(weights, loader, split, key)
        with self._warning_once(), naming_single_samples(split):
            return self.engine.evaluate_part(self.module, loader, stage=_STAGES[split], part=part, datamodule=self.data)

    def release_memory(self, error: BaseException) -> None:
        """Free what local work that ran out of memory holds, so that it is available to the next client.

        Args:
            error: Error of the work.
        """
        release_memory(error, self.module)

    def _prepare_scoring(self, weights: Weights, loader: Any, split: Split, key: tuple[int | str, ...]) -> None:
        if loader is None:
            raise InvalidOption(
                f"The data has no {split} set for a client, as scores of it need, such as that of `federation.select`; "
                "set `data.val_fraction` above 0."
            )
        self.load(weights)
        seed_all(*key)
        _seed_generators(loader, key)

    @contextmanager
    def _warning_once(self) -> Iterator[None]:
        """Show each warning once in a run, not once for each client, round and batch."""
        with warnings.catch_warnings(record=True) as caught:
            try:
                yield
            finally:
                found = {(warning.category, str(warning.message)): warning for warning in caught}
        new = {key: warning for key, warning in found.items() if key not in self._warned}  # in order of appearance
        self._warned.update(new)
        for warning in new.values():
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def require_batches(loader: Any, client: int, num_examples: int) -> int | None:
    """Return the number of batches of a client's loader; None for a stream of unknown length.

    Args:
        loader: Loader of the client's training data.
        client: Number of the client.
        num_examples: Number of its training samples.

    Raises:
        InvalidOption: If there is no batch.
    """
    batches = sized_len(loader)
    if batches == 0:
        raise InvalidOption(
            f"Client {client} has {num_examples} examples, fewer than one full batch; lower `data.batch_size`, set "
            "`data.drop_last: false`, or give it more of them (`data.partition.min_examples`)."
        )
    return batches


def _gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a copy of a parameter's gradient, dense also for that of an Embedding with `sparse=True`."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(parameter)
    return grad.detach().to_dense() if grad.is_sparse else grad.detach().clone()


def _differs(now: torch.Tensor, first: torch.Tensor) -> bool:
    return now.device == first.device and not torch.equal(now, first)


def _seed_generators(loader: Any, key: tuple[int | str, ...]) -> None:
    """Seed a loader's own generators, whose states would carry over from one pass to the next.

    Args:
        loader: Loader of any kind.
        key: Key of the randomness.
    """
    batches = getattr(loader, "batch_sampler", None)
    for owner in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
        own = getattr(owner, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(derive_seed(*key))
