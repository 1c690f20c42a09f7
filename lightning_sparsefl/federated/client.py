"""A client as its algorithm sees it, and the bench that a rank trains clients on."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, cast

import torch
from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.callbacks import LayerFreezing, StaticMask
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.exchange.failures import Deadline, KeepDeadline
from lightning_sparsefl.federated.exchange.flat import FlatModule, FlatTree
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.example_input import units_of
from lightning_sparsefl.federated.local.lightning_trainer import LightningEngine
from lightning_sparsefl.federated.local.round_lr import RoundLR, ScaleLearningRates
from lightning_sparsefl.seeds import derive_seed, generator, seed_all
from lightning_sparsefl.sparse.masks import apply, intersect
from lightning_sparsefl.sparse.submodel import cut, narrow, widen
from lightning_sparsefl.sparse.units import UnitGroup, unit_masks
from lightning_sparsefl.types import ClientView, FitResult, Masks, Shared, Weights

Split = Literal["val", "test", "train"]
_STAGES: dict[Split, Literal["validate", "test"]] = {"val": "validate", "test": "test", "train": "validate"}


class LocalWorker(Protocol):
    """What a client asks of whoever does its local work: the only door to the local engines."""

    @property
    def units(self) -> Sequence[UnitGroup]:
        """See :attr:`Client.units`."""
        ...

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
        """See :meth:`Client.fit`."""
        ...

    def gradient(self, client: Client, weights: Weights) -> Weights:
        """See :meth:`Client.gradient`."""
        ...

    def evaluate(self, client: Client, weights: Weights, split: Split) -> Mapping[str, float]:
        """See :meth:`Client.evaluate`."""
        ...


class Client:
    """One client during one round: the facts a server may know, what only the client has, and what it can do.

    Args:
        view: The facts.
        memory: What the client kept for itself.
        bench: Does the local work.
        buffers: The client's own floating-point buffers, with `federation.buffers: local`.
        deadline: When its round must be over, with `federation.client_timeout`.
    """

    def __init__(
        self,
        view: ClientView,
        memory: Shared,
        bench: LocalWorker,
        buffers: Weights | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self.id, self.num_examples, self.capacity = view.id, view.num_examples, view.capacity
        self.round, self.max_rounds, self.seed = view.round, view.max_rounds, view.seed
        self.shared, self.memory, self.view, self.monitor = view.shared, memory, view, view.monitor
        self.buffers, self.deadline = buffers or {}, deadline
        self._bench = bench
        self._uses: dict[str, int] = {}

    @property
    def units(self) -> Sequence[UnitGroup]:
        """The model's groups of units.

        Raises:
            InvalidOption: If they cannot be found.
        """
        return self._bench.units

    def rng(self, purpose: str) -> torch.Generator:
        """A generator for this client, round and purpose; never by rank or order."""
        return generator(*self.key(purpose))

    def key(self, purpose: str) -> tuple[int | str, ...]:
        """Key of the randomness of a purpose; a second use in the same round gets another one."""
        use = self._uses[purpose] = self._uses.get(purpose, -1) + 1
        return (self.seed, self.round, self.id, purpose, use)

    def fit(
        self,
        weights: Weights,
        masks: Masks | None = None,
        trainable: Masks | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        epochs: int | None = None,
        units: Masks | None = None,
    ) -> FitResult:
        """Train on the client's data.

        Args:
            weights: To start from; names that are missing take the run's initial values.
            masks: What is held: False weights are zero and stay zero.
            trainable: What may change.
            callbacks: How training differs from the module's own.
            epochs: Local epochs; None = `trainer.max_epochs`.
            units: Which units of each group are held, ``(units,)``; the others' weights are zero and stay zero. With
                `federation.execution: cut` they do not exist, and `callbacks` see a narrow module.

        Returns:
            The weights after the local epochs, with the logged metrics.
        """
        return self._bench.fit(self, weights, masks or {}, trainable or {}, callbacks, epochs=epochs, units=units)

    def gradient(self, weights: Weights) -> Weights:
        """Dense gradient of the module's training loss on one local batch, in evaluation mode.

        Args:
            weights: At which it is taken; zeros where masked.

        Raises:
            InvalidOption: If the module optimizes manually.
        """
        return self._bench.gradient(self, weights)

    def evaluate(self, weights: Weights, split: Split = "val") -> Mapping[str, float]:
        """The module's metrics on the client's own validation or test set; its training set is scored as validation."""
        return self._bench.evaluate(self, weights, split)


@dataclass(frozen=True)
class LocalWork:
    """How every client trains, besides what its algorithm adds."""

    client_callbacks: Sequence[Callback] = ()
    round_lr: RoundLR | None = None
    validate: bool = False
    execution: Literal["mask", "cut"] = "mask"


def require_set(loader: Any, split: Split) -> None:
    """Raise :class:`InvalidOption` where the data has no loader of a split."""
    if loader is None:
        raise InvalidOption(
            f"The data has no {split} set for a client; set `data.val_fraction` above 0, "
            "or `data.eval_split: test` without `trainer.validate_locally`."
        )


class ClientWorker:
    """One rank's module, data and local engine; clients use them one after another.

    Args:
        module: The user's module, on its device.
        datamodule: The clients' data, set up.
        engine: The client loop.
        work: How every client trains.
        device: Of the module.
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
        floats = self.flat.layout.buffers
        self._counters = {n: b.detach().clone() for n, b in module.named_buffers() if n not in floats}

    def load(self, weights: Weights) -> None:
        """Put weights into the module; counters such as `num_batches_tracked` go back to their first value."""
        if len(weights) < len(self.initial):
            weights = {**self.initial, **weights}
        self.flat.load(weights)
        if self._counters:
            buffers = dict(self.module.named_buffers())
            for name, first in self._counters.items():
                buffers[name].copy_(first)

    def restore_counters(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take a checkpoint's buffers that are not weights as the values that every client starts from.

        Args:
            state: A ``state_dict`` of the module.
        """
        for name in self._counters.keys() & state.keys():
            self._counters[name] = state[name].to(self._counters[name])

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
        """See :meth:`Client.fit`."""
        module, engine = self.module, self.engine if epochs is None else self.engine.for_epochs(epochs)
        if units is not None:
            masks = intersect(masks, unit_masks(self.units, units, weights))
        self.load(apply(weights, masks) if masks else weights)
        if units is not None and self.work.execution == "cut":
            module = cast(LightningModule, cut(self.module, self.units, units))
            masks, trainable = (narrow(tree, self.units, units) for tree in (masks, trainable))
            masks = {name: mask for name, mask in masks.items() if not bool(mask.all())}
        attached = self._callbacks(client, masks, trainable, callbacks)
        loader = self._train_loader(client, "fit")
        validation = self.data.client_val_dataloader(client.id) if self.work.validate else None
        metrics = engine.fit(module, loader, validation, callbacks=attached, datamodule=self.data)
        if units is not None and module is not self.module:
            self._widen(module, units)
        return FitResult(
            weights=self.flat.read(),
            metrics={name: float(value) for name, value in metrics.items()},
            steps=engine.global_step,
            callbacks=attached,
        )

    @cached_property
    def units(self) -> Sequence[UnitGroup]:
        """The module's groups of units."""
        return units_of(self.module, self.data)

    def _widen(self, module: LightningModule, kept: Masks) -> None:
        """Put a narrow module's weights at their places; what was cut out is as it was before the fit."""
        names = self.flat.layout.names
        state = {name: value for name, value in module.state_dict().items() if name in names}
        self.flat.load(widen(state, self.units, kept, self.flat.read()))

    def _train_loader(self, client: Client, purpose: str) -> Any:
        """The client's batches, in an order that depends on the purpose, the round and the client alone."""
        key = client.key(purpose)
        seed_all(*key)
        loader = self.data.client_train_dataloader(client.id)
        if hasattr(loader, "__len__") and len(loader) == 0:
            raise InvalidOption(
                f"Client {client.id} has {client.num_examples} examples and no whole batch; "
                "lower `data.batch_size`, or set `data.drop_last: false`."
            )
        for owner in (
            loader,
            getattr(loader, "sampler", None),
        ):  # a generator of its own would go on from round to round
            own = getattr(owner, "generator", None)
            if isinstance(own, torch.Generator):
                own.manual_seed(derive_seed(*key))
        return loader

    def _callbacks(self, client: Client, masks: Masks, trainable: Masks, own: Sequence[Callback]) -> list[Callback]:
        """The user's, copied; the method's; then the roles of the masks, which have the last word on gradients."""
        attached = [*copy.deepcopy(list(self.work.client_callbacks)), *own]
        if client.deadline is not None:
            attached.insert(0, KeepDeadline(client.deadline))
        if trainable:
            attached.append(LayerFreezing(trainable))
        if masks:
            attached.append(StaticMask(masks=masks))
        if self.work.round_lr is not None:
            attached.append(ScaleLearningRates(self.work.round_lr.factor(client.round, client.max_rounds)))
        return attached

    def gradient(self, client: Client, weights: Weights) -> Weights:
        """See :meth:`Client.gradient`."""
        self.load(weights)
        batch = next(iter(self._train_loader(client, "gradient")))
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            self.engine.gradient(self.module, batch)
        finally:  # one by one: the user may keep some modules in evaluation mode
            for module, mode in modes.items():
                module.training = mode
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
            for name, p in self.module.named_parameters()
        }
        self.module.zero_grad(set_to_none=True)
        return gradients

    def evaluate(self, client: Client, weights: Weights, split: Split) -> Mapping[str, float]:
        """See :meth:`Client.evaluate`."""
        loader = getattr(self.data, f"client_{split}_dataloader")(client.id)
        return self.score(weights, loader, split, client.key("evaluate"))

    def score(self, weights: Weights, loader: Any, split: Split, key: tuple[int | str, ...]) -> Mapping[str, float]:
        """The module's metrics with these weights on one loader.

        Args:
            weights: To score.
            loader: Of labelled batches.
            split: Decides between `validation_step` and `test_step`.
            key: Of the randomness.

        Raises:
            InvalidOption: If there is no such loader.
        """
        require_set(loader, split)
        self.load(weights)
        seed_all(*key)
        return self.engine.evaluate(self.module, loader, stage=_STAGES[split], datamodule=self.data)
