"""The round: who takes part, what travels, what is merged, what it cost."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_sparsefl.cost import Charge, Ledger
from lightning_sparsefl.errors import ClientFailed, InvalidUpdate, SparseFLError
from lightning_sparsefl.federated.aggregation.exact_sum import SumHeaders, merge_headers
from lightning_sparsefl.federated.aggregation.reducers import Accumulator
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client, ClientWorker, Split
from lightning_sparsefl.federated.distributed.load_forecast import Job, LoadForecast
from lightning_sparsefl.federated.distributed.placement import assigned
from lightning_sparsefl.federated.distributed.rank_consistency import check_ranks_agree, idle
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.distributed.signals import Interrupts
from lightning_sparsefl.federated.evaluation.scores import spread
from lightning_sparsefl.federated.exchange.failures import Deadline, out_of_memory, reason, release
from lightning_sparsefl.federated.local.buffers import drop_local_buffers, insert_local_buffers
from lightning_sparsefl.federated.options import Federation
from lightning_sparsefl.federated.rounds.merge_policy import Merging
from lightning_sparsefl.federated.rounds.update_checks import check_update_schema, excess_reason, non_finite_reason
from lightning_sparsefl.federated.sampling import split_unseen, uniform_cohort
from lightning_sparsefl.federated.storage.records import ClientRecord, MemoryStore, pack_record
from lightning_sparsefl.sparse.masks import changed, counts, digest
from lightning_sparsefl.types import ClientView, CostFacts, LayerFlops, Masks, Message, ServerState, Shared, Update
from lightning_sparsefl.wire import Codec, Size


@dataclass(frozen=True)
class Workload:
    """What the cost of local training depends on, besides the client."""

    layers: Sequence[LayerFlops]
    epochs: int
    batch_size: int
    max_batches: int | float = 1.0
    """As `limit_train_batches`: a number of batches, or a fraction of them."""
    drop_last: bool = False
    """Whether loaders leave out a last, smaller batch."""
    buffers: frozenset[str] = frozenset()
    """Names of the model's floating-point buffers."""
    model: Any = None
    """Knows the model's groups of units."""

    def facts(self, view: ClientView, message: Message) -> CostFacts:
        """The facts of one client-round."""
        full, rest = divmod(view.num_examples, self.batch_size)
        batches = full + (rest > 0 and not self.drop_last)
        limit = self.max_batches if isinstance(self.max_batches, int) else int(batches * self.max_batches)
        samples = min(view.num_examples, min(limit, batches) * self.batch_size)
        return CostFacts(
            view=view,
            message=message,
            layers=self.layers,
            epochs=self.epochs,
            samples=samples,
            batch_size=self.batch_size,
            buffers=self.buffers,
            model=self.model,
        )


@dataclass(frozen=True)
class Outcome:
    """What every rank learns of one client's round."""

    client: int
    num_examples: int
    metrics: Mapping[str, float]
    charge: Charge | None = None
    record: Mapping[str, Any] | None = None
    """As :func:`pack_record` made it."""
    densities: Mapping[str, float] | None = None
    """Per masked tensor, the fraction that the client held; without masks, what it says it trained (its votes)."""
    changed: float = 0.0
    """Fraction of the mask that local training changed."""
    after: Mapping[str, float] | None = None
    """Scores right after the local training, if asked for."""
    seconds: float | None = None
    """How long it would have taken on the client's own device, if the method simulates that."""
    failure: str | None = None
    """Why the client is left out."""
    rank: int = 0
    """The process that trained it."""
    elapsed: float = 0.0
    """Seconds by the clock of that process."""


@dataclass(frozen=True)
class RoundResult:
    """A finished round."""

    server: ServerState
    outcomes: Sequence[Outcome]
    metrics: Mapping[str, float]


class Coordinator:
    """Runs rounds; the same code on every rank, and the same server state after each.

    Args:
        algorithm: The method.
        federation: Its options.
        bench: Does this rank's local work.
        ranks: The processes.
        store: What is kept per client.
        codec: What a message weighs.
        workload: What local training costs.
        ledger: Keeps the charges.
        max_rounds: Of the run.
        seed: Of the run.
    """

    def __init__(
        self,
        *,
        algorithm: FederatedAlgorithm,
        federation: Federation,
        bench: ClientWorker,
        ranks: Ranks,
        store: MemoryStore,
        codec: Codec,
        workload: Workload,
        ledger: Ledger,
        max_rounds: int,
        seed: int,
    ) -> None:
        self.algorithm, self.federation, self.bench, self.ranks = algorithm, federation, bench, ranks
        self.store, self.codec, self.workload, self.ledger = store, codec, workload, ledger
        self.max_rounds, self.seed = max_rounds, seed
        self.interrupts = Interrupts()
        self.forecast = LoadForecast(ranks.size)
        self.training_clients, self.unseen_clients = split_unseen(
            seed, bench.data.num_clients, federation.unseen_clients
        )
        self.capacities = federation.fleet_capacities(bench.data.num_clients, seed)
        self.merging = Merging(algorithm, federation, bench.flat.layout, len(self.training_clients), seed)

    def cohort(self, round: int) -> list[int]:
        """Numbers of a round's clients."""
        return uniform_cohort(self.seed, round, self.training_clients, self.federation.clients_per_round)

    def view(self, client: int, round: int) -> ClientView:
        """What the server knows of a client in a round."""
        return self._view(client, round, self._kept(client))

    def _kept(self, client: int) -> ClientRecord:
        """What is kept about a client; what a checkpoint brought must be of this model."""
        record, layout = self.store.get(client), self.bench.flat.layout
        masks = {name: mask for name, mask in record.shared.get("masks", {}).items() if name in layout.shapes}
        layout.check(masks, f"The record of client {client}")
        return record

    def _view(self, client: int, round: int, record: ClientRecord) -> ClientView:
        return ClientView(
            id=client,
            num_examples=self.bench.data.num_examples(client),
            capacity=self.capacities[client],
            round=round,
            max_rounds=self.max_rounds,
            seed=self.seed,
            monitor=self.federation.monitor,
            shared=record.shared,
        )

    def client(self, client: int, round: int) -> Client:
        """A client of a round, with its memory."""
        record = self._kept(client)
        return Client(self._view(client, round, record), record.memory, self.bench, record.buffers)

    def round(self, server: ServerState, score_after: Split | None = None) -> RoundResult:
        """Sample, download, train, upload, merge.

        Args:
            server: Before the round.
            score_after: Participants are scored on their sets of this split right after their training.

        Raises:
            ClientFailed: If a client fails and `federation.on_client_error` is ``raise``, or too few are left.
            Interrupted: If a signal asks to stop; the round has left no trace then.
        """
        started = time.perf_counter()
        cohort = self.cohort(server.round)
        sizes = {i: self.bench.data.num_examples(i) for i in cohort}
        total_weight = max(sum(sizes.values()), len(sizes))
        merge = self.merging.start(server, total_weight)
        loads = self.forecast.loads({i: float(size) * self.capacities[i] for i, size in sizes.items()})
        queue, seconds_per_flop = f"round {server.round}", self.forecast.seconds_per_flop
        mine = assigned(loads, self.ranks, self.federation.placement, queue, seconds_per_flop)
        parts = self.ranks.share(lambda: (self._train(server, mine, merge, score_after), merge.headers()))
        outcomes = sorted((o for part, _ in parts for o in part), key=lambda outcome: outcome.client)
        assert [outcome.client for outcome in outcomes] == cohort, "every client is placed on exactly one rank"
        trained = self._survivors(server, outcomes)
        self.forecast.learn(Job(o.client, o.rank, o.charge.flops_train, o.elapsed) for o in trained if o.charge)
        trained_at = time.perf_counter()
        server, waited = self._merge(server, merge, trained, merge_headers(headers for _, headers in parts))
        metrics = {
            **self._metrics(outcomes, trained),
            **spread("personal_after", {o.client: o.after for o in trained if o.after is not None}),
            **self.merging.metrics(server.round),
            "mask/coverage_min": merge.coverage_min(len(trained)),
            **idle(waited),
            "time/aggregate": time.perf_counter() - trained_at,
            "time/round": time.perf_counter() - started,
        }
        return RoundResult(server=server, outcomes=outcomes, metrics=metrics)

    def _train(
        self, server: ServerState, clients: Iterable[int], merge: Accumulator, score_after: Split | None
    ) -> list[Outcome]:
        """This rank's clients, one after another, until a signal asks to stop."""
        outcomes = []
        self.interrupts.check()
        for client in clients:
            try:
                outcomes.append(self._timed(server, client, merge, score_after))
            except Exception:
                self.interrupts.check()  # a signal that ended a loader's workers, too, is no failure of the client
                raise
            self.interrupts.check()
        return outcomes

    def _timed(self, server: ServerState, client: int, merge: Accumulator, score_after: Split | None = None) -> Outcome:
        started = time.perf_counter()
        outcome = self.attempt(server, client, merge, score_after)
        return replace(outcome, rank=self.ranks.rank, elapsed=time.perf_counter() - started)

    def attempt(
        self, server: ServerState, client: int, merge: Accumulator, score_after: Split | None = None
    ) -> Outcome:
        """One client's round; a failure is an outcome, since the other ranks wait for this one.

        Args:
            server: Before the round.
            client: Number of the client.
            merge: The update is added to it.
            score_after: As in :meth:`round`.

        Raises:
            ClientFailed: If the client fails, this is the only rank, and `federation.on_client_error` is ``raise``.
            InvalidUpdate: If the method's update does not answer its message.
        """
        record = self._kept(client)
        view = self._view(client, server.round, record)
        message = insert_local_buffers(self.algorithm.download(server, view), record.buffers, self.bench.flat.layout)
        held = digest(message.masks)
        known = message.masks if record.held == held else None
        down, message = self._send_down(message, known)
        try:
            return self._serve(view, record, message, held, down, merge, score_after)
        except InvalidUpdate:
            raise  # the method's mistake, not the client's
        except Exception as error:
            if self.ranks.size == 1 and self.federation.on_client_error == "raise":
                if isinstance(error, SparseFLError):
                    raise  # a client's failure, or a mistake that every client would meet
                raise self._failed(view, reason(error)) from error
            if not isinstance(error, ClientFailed):
                traceback.print_exception(error)  # it cannot travel to the other ranks
            if out_of_memory(error):
                release(error, self.bench.module)
            charge = self._charge(view, message, down, None)
            return Outcome(view.id, view.num_examples, {}, charge=charge, failure=reason(error))

    def _serve(
        self,
        view: ClientView,
        record: ClientRecord,
        message: Message,
        held: str,
        down: Size,
        merge: Accumulator,
        score_after: Split | None,
    ) -> Outcome:
        client = Client(view, record.memory, self.bench, deadline=self._deadline(view))
        trained = self.algorithm.train(message, client)
        self._validate(trained, message, client)
        update, buffers = drop_local_buffers(trained, message, self.federation.buffers, self.bench.flat.layout)
        if update.votes is None and type(self.algorithm).may_vote is not FederatedAlgorithm.may_vote:
            update = replace(update, votes=self.algorithm.may_vote(message))
        update = self.merging.limited(update, message)
        up, update = self._send_up(update, message)
        charge = self._charge(view, message, down, up)
        outcome = Outcome(
            client=view.id,
            num_examples=view.num_examples,
            metrics=dict(update.metrics),
            charge=charge,
            record=self._record(record, update, buffers, held),
            densities=_densities(message.masks or trained.votes or {}),
            changed=_changed(message, update),
            after=client.evaluate(self.algorithm.trained(message, trained), score_after) if score_after else None,
            seconds=self.algorithm.seconds(view, charge.flops_train, charge.uplink_bytes),
        )
        merge.add(update, message, view.num_examples)  # last, so that a client that fails leaves no trace in the sum
        return outcome

    def _send_down(self, message: Message, known: Masks | None) -> tuple[Size, Message]:
        size = self.codec.message_size(message, known)
        if self.federation.wire == "encode":
            payload = self.codec.encode_message(message, known)
            message = _to(self.codec.decode_message(payload, known), self.bench.device)
        return size, message

    def _send_up(self, update: Update, message: Message) -> tuple[Size, Update]:
        size = self.codec.update_size(update, message)
        if self.federation.wire == "encode":
            decoded = self.codec.decode_update(self.codec.encode_update(update, message), message)
            update = replace(_to(decoded, self.bench.device), memory=update.memory)
        return size, update

    def _deadline(self, view: ClientView) -> Deadline | None:
        seconds = self.federation.client_timeout
        return None if seconds is None else Deadline(seconds, partial(self._failed, view))

    def _validate(self, update: Update, message: Message, client: Client) -> None:
        if client.deadline is not None:
            client.deadline.check()
        check_update_schema(update, message, self.bench.flat.layout, self.algorithm.may_vote, client.id)
        wrong = non_finite_reason(update) or excess_reason(update, client.num_examples, self.bench.flat.layout)
        if wrong is not None:
            raise self._failed(client.view, wrong)

    def _failed(self, view: ClientView, reason: str) -> ClientFailed:
        return ClientFailed(reason, client=view.id, round=view.round, rank=self.ranks.rank)

    def _charge(self, view: ClientView, message: Message, down: Size, up: Size | None) -> Charge:
        """One client's bill; a client that failed, whose `up` is None, pays for its download alone."""
        costs = self.algorithm.costs(self.workload.facts(view, message))
        received = Charge(
            round=view.round,
            client=view.id,
            downlink_bytes=down.total,
            mask_bytes=down.masks,
            paper_bytes_down=costs.bytes_down_paper,
        )
        if up is None:
            return received
        return replace(
            received,
            uplink_bytes=up.total,
            mask_bytes=down.masks + up.masks,
            paper_bytes_up=costs.bytes_up_paper,
            flops_train=costs.flops_analytic,
            flops_paper=costs.flops_paper,
        )

    def _record(
        self, old: ClientRecord, update: Update, buffers: Mapping[str, Any] | None, held: str
    ) -> dict[str, Any]:
        shared = old.shared if update.shared is None else update.shared
        masks = (update.shared or {}).get("masks")
        return pack_record(
            ClientRecord(
                shared=shared,
                memory=old.memory if update.memory is None else update.memory,
                buffers=old.buffers if buffers is None else buffers,
                held=held if masks is None else digest(masks),
            )
        )

    def _survivors(self, server: ServerState, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes that are merged."""
        trained = [outcome for outcome in outcomes if outcome.failure is None]
        failed = [outcome for outcome in outcomes if outcome.failure is not None]
        enough = len(trained) >= self.federation.min_clients
        if failed and (self.federation.on_client_error == "raise" or not enough):
            first, fewest = failed[0], self.federation.min_clients
            left = (len(trained), fewest) if self.federation.on_client_error == "skip" else None
            raise ClientFailed(first.failure or "", client=first.client, round=server.round, rank=first.rank, left=left)
        for outcome in failed:
            if outcome.charge is not None:
                self.ledger.add(outcome.charge)
            rank_zero_info(f"Client {outcome.client} is left out of round {server.round}: {outcome.failure}")
        return trained

    def _merge(
        self,
        server: ServerState,
        merge: Accumulator,
        trained: Sequence[Outcome],
        headers: SumHeaders,
    ) -> tuple[ServerState, list[float]]:
        """The next server, and the seconds that each rank waited for the others' clients."""
        merge.all_reduce(self.ranks.sum, headers)
        merge.collect(self.ranks.gather)
        reports = {outcome.client: outcome.metrics for outcome in trained}
        merged = self.algorithm.aggregate(server, merge.result(reports))
        observed = {outcome.client: self._keep(server, outcome) for outcome in trained}
        merged = replace(merged, round=server.round + 1)
        return merged, check_ranks_agree(merged, observed, self.ranks)

    def _keep(self, server: ServerState, outcome: Outcome) -> Shared | None:
        """File what a participant left, and what the algorithm newly observes about it, which is returned."""
        assert outcome.record is not None
        assert outcome.charge is not None
        observed = None
        if type(self.algorithm).observe is not FederatedAlgorithm.observe:  # a view takes time: its record is packed
            report = outcome.metrics if outcome.seconds is None else {**outcome.metrics, "seconds": outcome.seconds}
            observed = self.algorithm.observe(server, self.view(outcome.client, server.round), report)
        self.store.put(outcome.client, dict(outcome.record), server.round + 1)
        self.ledger.add(outcome.charge)
        if observed is not None:
            seen = replace(self.store.get(outcome.client), shared=observed)
            self.store.put(outcome.client, pack_record(seen), server.round + 1)
        return observed

    def _metrics(self, outcomes: Sequence[Outcome], trained: Sequence[Outcome]) -> dict[str, float]:
        """The round's logged keys, besides scores and the ledger's."""
        weights = {o.client: o.num_examples for o in trained}
        keys: dict[str, float] = {
            "clients/trained": len(trained),
            "clients/failed": len(outcomes) - len(trained),
        }
        for name in sorted({name for o in trained for name in o.metrics}):
            having = [o for o in trained if name in o.metrics]
            total = sum(weights[o.client] for o in having)
            keys[f"local/{name}"] = sum(weights[o.client] * o.metrics[name] for o in having) / total
        layers = sorted({name for o in trained for name in o.densities or {}}, key=self.bench.flat.layout.names.index)
        keys["sparsity/density"] = self._mean_density(trained)
        for name in layers:
            keys[f"sparsity/layer/{name}"] = sum((o.densities or {}).get(name, 1.0) for o in trained) / len(trained)
        keys["mask/changed"] = sum(o.changed for o in trained) / max(len(trained), 1)
        simulated = [o.seconds for o in trained if o.seconds is not None]
        if simulated:
            keys["time/simulated"] = max(simulated)
        return keys

    def _mean_density(self, trained: Sequence[Outcome]) -> float:
        """Mean over the cohort of the density of all masked tensors together; 1 without masks."""
        sizes = {name: float(shape.numel()) for name, shape in self.bench.flat.layout.shapes.items()}
        densities = [
            sum(d * sizes[n] for n, d in o.densities.items()) / sum(sizes[n] for n in o.densities)
            if o.densities
            else 1.0
            for o in trained
        ]
        return sum(densities) / max(len(densities), 1)


def _densities(masks: Masks) -> dict[str, float]:
    return {name: kept / max(masks[name].numel(), 1) for name, kept in counts(masks).items()}


def _changed(message: Message, update: Update) -> float:
    masks = (update.shared or {}).get("masks")
    return 0.0 if masks is None else changed(message.masks, masks)


def _to(value: Any, device: torch.device) -> Any:
    """A decoded message or update with its tensors on a device."""

    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(device)
        if isinstance(item, Mapping):
            return {key: move(part) for key, part in item.items()}
        return [move(part) for part in item] if isinstance(item, list) else item

    return replace(value, **{name: move(getattr(value, name)) for name in value.__dataclass_fields__})
