"""A client as its algorithm sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from lightning.pytorch import Callback

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.exchange.deadline import Deadline
from lightning_sparsefl.federated.exchange.orders import Order, Split
from lightning_sparsefl.seeds import derive_seed, generator
from lightning_sparsefl.sparse.units import UnitGroup
from lightning_sparsefl.sparse.uses import TensorUses
from lightning_sparsefl.types import FitResult, Masks, Shared, Weights


class LocalWorker(Protocol):
    """Does the local work of clients: the only way from an algorithm to the local engines."""

    @property
    def initial(self) -> Weights:
        """See :attr:`Client.initial`."""
        ...

    @property
    def buffers(self) -> frozenset[str]:
        """See :attr:`Client.buffers`."""
        ...

    @property
    def uses(self) -> TensorUses:
        """See :attr:`Client.uses`."""
        ...

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

    def release_memory(self, error: BaseException) -> None:
        """Free what a client's work holds that ran out of memory."""
        ...


class Client:
    """One client during one order: the facts it may know, what it keeps for itself, and what it can do.

    Attributes:
        id: Number of the client, from 0.
        num_examples: Number of its training samples.
        capacity: Share of the full model that it can train, in (0, 1].
        round: Number of the round, from 0.
        max_rounds: Number of rounds of the run.
        monitor: Metric of local training that methods steer by (`federation.monitor`).
        memory: What the client kept from its last round; empty at its first one. Its tensors are those of the client's
            record, so that a hook makes new ones for `Update.memory` and writes into none of them.

    Args:
        order: The server's order.
        memory: Values that the client kept for itself.
        worker: Worker that does the local work.
        deadline: Time limit of the order (`federation.client_timeout`).
    """

    def __init__(self, order: Order, memory: Shared, worker: LocalWorker, deadline: Deadline | None = None) -> None:
        facts = order.facts
        self.id, self.num_examples, self.capacity = order.client, facts.num_examples, facts.capacity
        self.round, self.max_rounds, self.monitor = order.round, facts.max_rounds, facts.monitor
        self.local_epochs, self.memory, self.deadline = facts.local_epochs, memory, deadline
        self._key, self._task, self._worker = order.key, order.task, worker
        self._uses: dict[str, int] = {}

    @property
    def initial(self) -> Weights:
        """The initial weights of the run, which every client knows: all tensors of the model, in its order."""
        return self._worker.initial

    @property
    def buffers(self) -> frozenset[str]:
        """Names of the model's floating-point buffers, which no mask may hold."""
        return self._worker.buffers

    @property
    def uses(self) -> TensorUses:
        """Uses of the model's parameters by its layers."""
        return self._worker.uses

    @property
    def units(self) -> Sequence[UnitGroup]:
        """The model's groups of units.

        Raises:
            InvalidOption: If they cannot be found.
        """
        return self._worker.units

    def rng(self, purpose: str) -> torch.Generator:
        """Return a generator for this client, round and purpose; it never depends on the rank or the order."""
        return generator(*self.key(purpose))

    def constant_seed(self, purpose: str) -> int:
        """Return a 63-bit seed for this client and purpose that is the same in every round."""
        return derive_seed(self._key, purpose)

    def key(self, purpose: str) -> tuple[int | str, ...]:
        """Return the key of the randomness of a purpose; a second use in the same round gets another one."""
        use = self._uses[purpose] = self._uses.get(purpose, -1) + 1
        return (self._key, self.round, self._task, purpose, use)

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
            weights: Weights to start from; missing names take the run's initial values.
            masks: Masks that are held: False weights are zero and stay zero.
            trainable: Masks of what may change.
            callbacks: Callbacks that make training differ from the module's own.
            epochs: Local epochs; None = `trainer.max_epochs`.
            units: Masks of the units of each group that are held, bool of shape ``(units,)``; the other units' weights
                are zero and stay zero. With `federation.execution: cut` they do not exist, and `callbacks` see a
                narrow module.

        Returns:
            The weights after the local epochs, with the logged metrics.

        Raises:
            InvalidOption: If `callbacks` is not a list of Lightning callbacks.
            IncompatibleMasks: If a name or shape of the weights differs from the model's.
        """
        if not isinstance(callbacks, Sequence) or not all(isinstance(each, Callback) for each in callbacks):
            raise InvalidOption(
                f"`callbacks` of `client.fit` are {callbacks!r}; expected a list of Lightning callbacks, such as "
                "what the method's `callbacks` returns."
            )
        return self._worker.fit(self, weights, masks or {}, trainable or {}, callbacks, epochs=epochs, units=units)

    def gradient(self, weights: Weights) -> Weights:
        """Compute the dense gradient of the module's training loss on one local batch, in evaluation mode.

        Args:
            weights: Weights to take the gradient at, zero where masked.

        Raises:
            InvalidOption: If the module optimizes manually.
        """
        return self._worker.gradient(self, weights)

    def evaluate(self, weights: Weights, split: Split = "val") -> Mapping[str, float]:
        """Compute the module's metrics on a split of the client's own data.

        Args:
            weights: Weights to score.
            split: Split to score; the training set is scored by `validation_step`.
        """
        return self._worker.evaluate(self, weights, split)
