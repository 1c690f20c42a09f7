"""Scores rounds, selects the best one, and scores clients after fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_sparsefl.errors import EvaluationFailed, InvalidOption, SparseFLError
from lightning_sparsefl.federated.evaluation.scores import Scores
from lightning_sparsefl.federated.exchange.failures import failure_reason
from lightning_sparsefl.federated.exchange.orders import SCORING_STEPS, Split, Task
from lightning_sparsefl.federated.local.fast.batch_scores import PartScore, join_scores
from lightning_sparsefl.federated.local.fast.divisible import Indivisible
from lightning_sparsefl.federated.local.node import has_own_finetuning
from lightning_sparsefl.federated.local.worker import ClientWorker
from lightning_sparsefl.federated.rounds.cohort import ServerWork
from lightning_sparsefl.federated.rounds.coordinator import Coordinator
from lightning_sparsefl.federated.rounds.outcome import Outcome
from lightning_sparsefl.federated.sampling.draws import evaluated_clients
from lightning_sparsefl.federated.storage.checkpoint import SelectedRound
from lightning_sparsefl.federated.storage.record_store import RecordStore
from lightning_sparsefl.report.measures.direction import key_should_rise
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.types import RunState, ServerState, Weights

_POOLED = -1
"""Number that stands for the global model among the clients' outcomes."""


class Scorer:
    """Scores a run's rounds.

    Args:
        coordinator: Coordinator of the run.
        worker: Scores the global model, or a part of its batches.
        unseen_clients: Numbers of the clients that are held out of training.
        stores: Stores of the records, which keep the versions of the selected round.
        split: Split to score.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        worker: ClientWorker,
        unseen_clients: Sequence[int],
        stores: Sequence[RecordStore],
        split: Split,
    ) -> None:
        self.coordinator, self.worker, self.split = coordinator, worker, split
        self.unseen_clients, self.stores = unseen_clients, stores
        self.algorithm, self.federation = coordinator.server.algorithm, coordinator.federation
        self.selected: SelectedRound | None = None
        self._divisible = True
        self._checked = False

    def restore(self, selected: SelectedRound | None) -> None:
        """Restore the selection of a checkpoint, if it was made by the same key.

        Args:
            selected: The selected round of the checkpoint.
        """
        if selected is not None and selected.key == self.federation.select:
            self._take(selected)

    def _take(self, selected: SelectedRound) -> None:
        self.selected = selected
        for store in self.stores:
            store.pin(selected.state.server.round)

    def scores(self, state: RunState) -> Scores:
        """Score the global model, if there is one, and each client's own: of clients that train, and of others.

        Args:
            state: State of the run.
        """
        scores = self._evaluate(state, self.split)
        if not self._checked:
            self._checked = True
            self._warn_if_empty(scores)
        return scores

    def _warn_if_empty(self, scores: Scores) -> None:
        if any((scores.pooled, *scores.personal.values(), *scores.unseen.values())):
            return
        limit = f"limit_{self.split}_batches"
        if getattr(self.worker.engine.options, limit) == 0:
            rank_zero_warn(
                f"`trainer.{limit}` is 0, so that this run has no scores; expected a number above 0 to have them."
            )
            return
        if not self._has_data([*scores.personal, *scores.unseen]):
            rank_zero_warn(
                f"No client has {self.split} data, and {type(self.algorithm).__name__} has no global model, so that "
                "this run has no scores; expected samples of some client to have them (option `data`)."
            )
            return
        step = f"{type(self.worker.module).__name__}.{SCORING_STEPS[self.split]}"
        rank_zero_warn(
            f"`{step}` logs nothing, so that this run has no scores; expected calls of `self.log` (option `model`)."
        )

    def _has_data(self, clients: Sequence[int]) -> bool:
        """Return whether a model has been scored on a sample."""
        loader_of = getattr(self.worker.data, f"client_{self.split}_dataloader")
        return self.algorithm.has_global_model or any(True for client in clients for _ in loader_of(client))

    def select(self, state: RunState, scores: Scores) -> dict[str, float]:
        """Select a round if it is the best so far.

        Args:
            state: State after the round.
            scores: Scores of the round.

        Returns:
            Further logged keys: scores on validation sets where test sets are scored, since those select nothing.

        Raises:
            InvalidOption: If there is no score with the key `federation.select`.
        """
        key = self.federation.select
        if key is None:
            return {}
        logged, further = scores.summary(), {}
        if self.split == "test":
            further = logged = self._evaluate(state, "val", personal=not key.startswith("global/")).summary()
        if key not in logged:
            raise InvalidOption(f"`federation.select` is {key!r}; expected a validation score: {sorted(logged)}.")
        if self._is_better(logged[key], rising=key_should_rise(key, logged)):
            self._take(SelectedRound(key, logged[key], replace(state, pending=())))
        return further

    def _is_better(self, value: float, rising: bool) -> bool:
        if math.isnan(value) or self.selected is None:
            return not math.isnan(value)
        return value > self.selected.value if rising else value < self.selected.value

    def finetuned(self, state: RunState) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Score the selected round, and each client after its last local fit, where there is one.

        Without `federation.select` the round is the last one. Clients work as in the round that made the state, so at
        its learning rates, with what was kept of them then.

        Args:
            state: State after the last round.

        Returns:
            Keys of the final table, and a row for each client.
        """
        finetunes = has_own_finetuning(self.algorithm) or self.federation.finetune_epochs > 0
        if not finetunes and self.selected is None:
            return {}, []
        state = state if self.selected is None else self.selected.state
        late = max(state.server.round - 1, 0)
        before = self.scores(state)
        keys: dict[str, float] = {"selected/round": state.server.round, **before.groups("selected")}
        if not finetunes:
            return keys, _rows(before, Scores({}, {}))
        after = self._evaluate(state, self.split, "finetune", round=late, pooled=False)
        return {**keys, **after.groups("finetuned")}, _rows(before, after)

    def _evaluate(
        self,
        state: RunState,
        split: Split,
        task: Task = "score",
        *,
        round: int | None = None,
        personal: bool = True,
        pooled: bool = True,
    ) -> Scores:
        count, seed = self.federation.eval_clients, self.coordinator.server.seed
        groups = (self.coordinator.server.training_clients, self.unseen_clients)
        seen, unseen = (evaluated_clients(seed, clients, count) if personal else [] for clients in groups)
        server_work = self._pooled(state.server, split) if pooled and self.algorithm.has_global_model else None
        outcomes = self.coordinator.evaluate(state, [*seen, *unseen], split, task, server_work, round)
        metrics = {outcome.client: outcome.scores.get(split, {}) for outcome in outcomes}
        held_out = frozenset(unseen)
        return Scores(
            pooled=metrics.pop(_POOLED, {}),
            personal={client: scores for client, scores in metrics.items() if client not in held_out},
            unseen={client: scores for client, scores in metrics.items() if client in held_out},
            downlink_bytes=sum(outcome.scoring_bytes for outcome in outcomes),
        )

    def _pooled(self, state: ServerState, split: Split) -> ServerWork:
        """Plan the scoring of the global model along with that of the clients."""
        server = self.coordinator.server

        def work() -> Outcome:
            return Outcome(_POOLED, scores={split: dict(score_global(state, self.worker, split, server.seed))})

        def part(number: int, count: int) -> PartScore:
            with _naming_the_global_model(self.worker.module, split):
                return self.worker.score_part(*_global_scoring(state, self.worker, split, server.seed), (number, count))

        scored = evaluated_clients(server.seed, server.training_clients, self.federation.eval_clients)
        load = float(sum(server.about.of(client, 0).num_examples for client in scored))
        return ServerWork(work, load, part if self._divisible else None, partial(self._joined, split))

    def _joined(self, split: Split, parts: Sequence[PartScore]) -> Outcome | None:
        """Return the global scores, or None if one process has to compute them, now and from now on."""
        try:
            return Outcome(_POOLED, scores={split: join_scores(self.worker.module, parts)})
        except Indivisible as reason:
            self._divisible = False
            rank_zero_info(f"One process scores the global model, because {reason}.")
            return None


def score_global(server: ServerState, worker: ClientWorker, split: Split, seed: int) -> Mapping[str, float]:
    """Compute the metrics of the global model on all clients' data.

    Args:
        server: State of the server.
        worker: Worker with the module and the data.
        split: Split to score.
        seed: Random seed of the run.

    Raises:
        EvaluationFailed: If the user's code fails.
    """
    with _naming_the_global_model(worker.module, split):
        return worker.score(*_global_scoring(server, worker, split, seed))


@contextmanager
def _naming_the_global_model(module: Any, split: Split) -> Iterator[None]:
    """Raise :class:`EvaluationFailed` in the place of an error of the user's code."""
    try:
        yield
    except (SparseFLError, Indivisible):
        raise
    except Exception as error:
        step, reason = f"{type(module).__name__}.{SCORING_STEPS[split]}", failure_reason(error).removesuffix(".")
        raise EvaluationFailed(
            f"The evaluation of the global model on the {split} data failed: {reason}; correct `{step}`, the hooks of "
            "the evaluation or the data."
        ) from error


def _global_scoring(
    server: ServerState, worker: ClientWorker, split: Split, seed: int
) -> tuple[Weights, Any, Split, tuple[int | str, ...]]:
    """Return weights, loader, split and key of the random seed for the global scores."""
    loader: Any = getattr(worker.data, f"{split}_dataloader")()
    return apply(server.weights, server.masks), loader, split, (seed, server.round, "evaluate global")


def _rows(before: Scores, after: Scores) -> list[dict[str, Any]]:
    """Return a row of `finetuned.csv` for each client."""
    scored = [(i, "personal") for i in before.personal] + [(i, "unseen") for i in before.unseen]
    rows = []
    for client, group in sorted(scored):
        early, late = getattr(before, group)[client], getattr(after, group).get(client, {})
        named = {f"selected/{n}": v for n, v in early.items()} | {f"finetuned/{n}": v for n, v in late.items()}
        rows.append({"client": client, "unseen": int(group == "unseen"), **named})
    return rows
