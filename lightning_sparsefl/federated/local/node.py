"""The clients' half of a round: orders in, answers out.

A node holds the module, the data and the records of its clients, and knows the algorithm's client hooks. It sees
neither the server's state nor another client's record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from lightning_sparsefl.errors import ClientFailed, InvalidOption, InvalidUpdate
from lightning_sparsefl.federated.aggregation.clipping import clipped
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client, LocalWorker
from lightning_sparsefl.federated.exchange.deadline import Deadline
from lightning_sparsefl.federated.exchange.failures import failure_reason, is_explained, is_out_of_memory
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.exchange.hook_results import allowed_votes, check_result, check_tree, check_update
from lightning_sparsefl.federated.exchange.orders import Answer, Order, Split, Task
from lightning_sparsefl.federated.exchange.update_checks import excess_reason, non_finite_reason
from lightning_sparsefl.federated.local.buffers import Mode, drop_local_buffers, insert_local_buffers
from lightning_sparsefl.federated.storage.records import NodeRecord
from lightning_sparsefl.sparse.density import maskable
from lightning_sparsefl.sparse.parts import without
from lightning_sparsefl.types import Message, Shared, Update, Weights
from lightning_sparsefl.wire import Codec


@runtime_checkable
class StackedScoring(Protocol):
    """A worker that can evaluate several clients at once."""

    def can_evaluate(self, splits: Sequence[Split]) -> bool:
        """Return whether several clients can be evaluated at once on these splits."""
        ...

    def evaluate_at_once(self, wanted: Sequence[tuple[Client, Weights, Split]]) -> list[dict[str, float]]:
        """Return the scores of each client; empty where a client has to be evaluated alone."""
        ...


class NodeRecords(Protocol):
    """The records of a node's clients, in versions."""

    def get(self, client: int, version: int) -> Mapping[str, Any] | None:
        """Return a version of a client's record, or None if it is not here."""
        ...

    def put(self, client: int, packed: dict[str, Any], version: int, keep: tuple[int, ...]) -> None:
        """Add a version; those of the rounds in `keep` may be asked for again."""
        ...


@dataclass(frozen=True)
class NodeOptions:
    """Options of the federation that apply to a node."""

    buffers: Mode = "average"
    """Option `federation.buffers`."""
    clip_update: float | None = None
    """Option `federation.clip_update`."""
    client_timeout: float | None = None
    """Option `federation.client_timeout`."""
    finetune_epochs: int = 0
    """Option `federation.finetune_epochs`."""
    keep_masks: bool = False
    """Whether records hold the clients' masks, which messages that arrive as bytes are decoded against."""


class Node:
    """Answers orders.

    Args:
        algorithm: The federated method.
        worker: Worker that does the local work.
        records: Records of this node's clients.
        codec: Codec of the run's model.
        layout: Layout of the model.
        initial: Initial weights of the run.
        device: Device of the model.
        options: Options of the federation.
        rank: Number of the process, for error messages.
    """

    def __init__(
        self,
        algorithm: FederatedAlgorithm,
        worker: LocalWorker,
        records: NodeRecords,
        codec: Codec,
        layout: Layout,
        initial: Weights,
        device: torch.device,
        options: NodeOptions,
        rank: int = 0,
    ) -> None:
        self.algorithm, self.worker, self.records, self.codec = algorithm, worker, records, codec
        self.layout, self.initial, self.device, self.options, self.rank = layout, initial, device, options, rank
        self._tasks: dict[Task, Callable[[Order, NodeRecord], Answer]] = {
            "train": self._train,
            "score": self._score,
            "finetune": self._finetune,
            "survey": self._survey,
        }

    def answer(self, orders: Sequence[Order]) -> Iterator[Answer]:
        """Carry out orders.

        Args:
            orders: Orders of different clients.

        Yields:
            One answer for each order. A client's failure is an answer too.

        Raises:
            InvalidUpdate: If the algorithm's update does not fit its message.
        """
        scored = len(orders) > 1 and all(order.task == "score" for order in orders)
        if scored and isinstance(self.worker, StackedScoring) and self.worker.can_evaluate(orders[0].splits):
            yield from self._score_at_once(orders, self.worker)
            return
        works = [partial(self._answer, order) for order in orders]
        together = getattr(self.worker, "together", None)
        yield from together(works) if together is not None else (work() for work in works)

    def _answer(self, order: Order) -> Answer:
        """Carry out one order, and measure the time."""
        started = time.perf_counter()
        answer = self._attempt(order, self._tasks[order.task])
        return replace(answer, elapsed=time.perf_counter() - started)

    def _attempt(self, order: Order, do: Callable[[Order, NodeRecord], Answer]) -> Answer:
        """Carry out one order; a failure is an answer.

        Args:
            order: The order.
            do: Function that does the work.
        """
        try:
            record = self.record(order.client, order.version)
            return replace(self._empty_answer(order), forgot=True) if record is None else do(order, record)
        except InvalidUpdate:
            raise  # a mistake of the algorithm, not of the client
        except Exception as error:
            if is_out_of_memory(error):
                self.worker.release_memory(error)
            shown = None if is_explained(error) else error
            return replace(self._empty_answer(order), failure=failure_reason(error), error=shown)

    def _empty_answer(self, order: Order) -> Answer:
        """Return an answer that says nothing yet."""
        return Answer(order.run, order.client, order.round, order.task, order.facts.num_examples)

    def record(self, client: int, version: int | None) -> NodeRecord | None:
        """Return a version of a client's record; empty if it starts without one, None if this node lacks it.

        Args:
            client: Number of the client.
            version: Version that the order names.
        """
        if version is None:
            return NodeRecord()
        packed = self.records.get(client, version)
        return None if packed is None else NodeRecord.from_plain(packed, client, self.device)

    def _client(self, order: Order, record: NodeRecord) -> Client:
        limit = self.options.client_timeout if order.task == "train" else None
        deadline = None if limit is None else Deadline(limit, partial(self._failed, order))
        return Client(order, record.memory, self.worker, deadline)

    def _failed(self, order: Order, reason: str) -> ClientFailed:
        return ClientFailed(reason, client=order.client, round=order.round, rank=self.rank)

    def _with_buffers(self, order: Order, record: NodeRecord) -> Message:
        return insert_local_buffers(order.message, record.buffers, self.initial, self.options.buffers, self.layout)

    # ---- tasks

    def _train(self, order: Order, record: NodeRecord) -> Answer:
        """Train and score; remove the client's own buffers, add the votes and clip the update."""
        client, message = self._client(order, record), self._with_buffers(order, record)
        trained = self.algorithm.train(message, client)
        check_result(self.algorithm, "train", trained, Update)
        if client.deadline is not None:
            client.deadline.check()
        self._check(trained, message, order)
        scores = {}
        if order.splits:
            weights = self.algorithm.trained(message, trained)
            check_tree(self.algorithm, "trained", weights, self.layout)
            scores = self._scores(order, client, weights)
        update, buffers = drop_local_buffers(trained, message, self.options.buffers, self.layout)
        update = self._voting(update, order.message)
        if self.options.clip_update is not None:
            update = clipped(update, order.message, self.options.clip_update, self.layout)
        size = self.codec.update_size(update, order.message)
        version = self._keep(order, record, update, buffers)
        return replace(
            self._empty_answer(order),
            update=replace(update, memory=None),
            scores=scores,
            up=size,
            version=version,
            checked=True,
        )

    def _check(self, update: Update, message: Message, order: Order) -> None:
        check_update(self.algorithm, update, message, order, self.layout)
        reason = non_finite_reason(update) or excess_reason(update, order.facts.num_examples, self.layout)
        if reason is not None:
            raise self._failed(order, reason)

    def _voting(self, update: Update, message: Message) -> Update:
        """Set the votes of an update where they do not follow from the message by the default rule."""
        if update.votes is None and type(self.algorithm).may_vote is not FederatedAlgorithm.may_vote:
            return replace(update, votes=allowed_votes(self.algorithm, message, self.layout))
        return update

    def _keep(self, order: Order, old: NodeRecord, update: Update, buffers: Weights) -> int | None:
        """Store the client's new record; return its version, or None if there is nothing to keep."""
        memory: Shared = old.memory if update.memory is None else update.memory
        masks = (update.shared or {}).get("masks", order.message.masks) if self.options.keep_masks else {}
        record = NodeRecord(memory, buffers or old.buffers, masks)
        if not record and not old:  # an empty record clears the one before
            return None
        version = order.round + 1
        self.records.put(order.client, record.to_plain(), version, order.keep)
        return version

    def _score(self, order: Order, record: NodeRecord) -> Answer:
        client, message = self._client(order, record), self._with_buffers(order, record)
        weights = _with_missing(self._personal(message, client), record.buffers)
        return replace(self._empty_answer(order), scores=self._scores(order, client, weights))

    def _score_at_once(self, orders: Sequence[Order], worker: StackedScoring) -> Iterator[Answer]:
        """Answer orders of the task `score` by one evaluation; clients that are left out of it are scored alone."""
        started = time.perf_counter()
        models: dict[int, tuple[Client, Weights]] = {}
        answers = [self._attempt(order, partial(self._take_model, models)) for order in orders]
        asked = [(*models[order.client], split) for order in orders if order.client in models for split in order.splits]
        found = iter(worker.evaluate_at_once(asked))
        share = (time.perf_counter() - started) / len(orders)
        for order, answer in zip(orders, answers, strict=True):
            if order.client not in models:
                yield replace(answer, elapsed=share)
                continue
            scores = {split: next(found) for split in order.splits}
            yield replace(answer, scores=scores, elapsed=share) if all(scores.values()) else self._answer(order)

    def _take_model(self, models: dict[int, tuple[Client, Weights]], order: Order, record: NodeRecord) -> Answer:
        """Add the client and the weights that it is scored with to `models`."""
        client, message = self._client(order, record), self._with_buffers(order, record)
        models[order.client] = (client, _with_missing(self._personal(message, client), record.buffers))
        return self._empty_answer(order)

    def personal_weights(self, order: Order) -> Weights:
        """Return the weights that a client is scored with.

        Args:
            order: Order of the task `score`.

        Raises:
            InvalidOption: If this node lacks the record that the order names.
        """
        record = self.record(order.client, order.version)
        if record is None:
            raise InvalidOption(f"The record of client {order.client} is missing; choose another `ckpt_path`.")
        weights = self._personal(self._with_buffers(order, record), self._client(order, record))
        return _with_missing(weights, record.buffers)

    def _finetune(self, order: Order, record: NodeRecord) -> Answer:
        client, message = self._client(order, record), self._with_buffers(order, record)
        hook = "finetune" if has_own_finetuning(self.algorithm) else "finetune_for"
        epochs = () if hook == "finetune" else (self.options.finetune_epochs,)
        weights = getattr(self.algorithm, hook)(message, client, *epochs)
        check_result(self.algorithm, hook, weights, Mapping, optional=True)
        if weights is not None:
            check_tree(self.algorithm, hook, weights, self.layout)
        elif hook == "finetune_for":
            weights = self._fit_once_more(message, client)
        scores = {} if weights is None else self._scores(order, client, weights)
        return replace(self._empty_answer(order), scores=scores)

    def _fit_once_more(self, message: Message, client: Client) -> Weights:
        """Train the client's own model for `federation.finetune_epochs`; a sparse model stays as sparse."""
        weights = self._personal(message, client)
        masks = {name: weights[name] != 0 for name in maskable(weights)}
        masks = {name: mask for name, mask in masks.items() if not bool(mask.all())}
        return client.fit(weights, masks, epochs=self.options.finetune_epochs).weights

    def _survey(self, order: Order, record: NodeRecord) -> Answer:
        client, message = self._client(order, record), self._with_buffers(order, record)
        update = self.algorithm.survey(message, client)
        check_result(self.algorithm, "survey", update, Update)
        self._check(update, message, order)
        update, _ = drop_local_buffers(update, message, self.options.buffers, self.layout)
        size = self.codec.update_size(update, order.message)
        return replace(self._empty_answer(order), update=replace(update, memory=None), up=size, checked=True)

    def _personal(self, message: Message, client: Client) -> Weights:
        """Return what `personalize` returns, checked."""
        weights = self.algorithm.personalize(message, client)
        check_tree(self.algorithm, "personalize", weights, self.layout)
        return weights

    def _scores(self, order: Order, client: Client, weights: Weights) -> dict[Split, Mapping[str, float]]:
        return {split: dict(client.evaluate(weights, split)) for split in order.splits}


def _with_missing(weights: Weights, buffers: Weights) -> Weights:
    """Return weights with a client's own buffers added where they are missing; a second model has its own."""
    return {**weights, **without(buffers, weights)}


def has_own_finetuning(algorithm: FederatedAlgorithm) -> bool:
    """Return whether an algorithm fine-tunes clients by a rule of its own.

    Args:
        algorithm: The federated method.
    """
    overridden = type(algorithm).finetune is not FederatedAlgorithm.finetune
    return overridden and getattr(algorithm, "finetune_epochs", 1) != 0
