"""What is scored in a round, which round is the best so far, and what fine-tuning makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client, Split
from lightning_sparsefl.federated.evaluation.scores import Scores, evaluate, higher_is_better
from lightning_sparsefl.federated.rounds.coordinator import Coordinator
from lightning_sparsefl.federated.sampling import evaluated_clients
from lightning_sparsefl.federated.storage.records import pack_plain, unpack_plain
from lightning_sparsefl.sparse.density import maskable
from lightning_sparsefl.types import ServerState, Weights


@dataclass(frozen=True)
class Selected:
    """The best round so far by `federation.select`."""

    key: str
    """That was selected by."""
    value: float
    """Of the key."""
    server: ServerState
    """After that round."""
    records: Any
    """What was kept of each client then, as the store's `snapshot`."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        server = self.server
        trees = {name: pack_plain(getattr(server, name)) for name in ("weights", "masks", "extra")}
        return {"key": self.key, "value": self.value, "round": server.round, "records": self.records, **trees}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device) -> Selected:
        """What `state_dict` made, with its tensors on a device."""
        if type(state["value"]) is not float:
            raise TypeError(f"its selected value is {state['value']!r}"[:80])
        trees = {name: unpack_plain(state[name], device) for name in ("weights", "masks", "extra")}
        return cls(state["key"], state["value"], ServerState(round=state["round"], **trees), state["records"])


class Scorer:
    """Scores a run's rounds.

    Args:
        coordinator: Of the run.
        split: Whose sets are scored.
    """

    def __init__(self, coordinator: Coordinator, split: Split) -> None:
        self.coordinator, self.split = coordinator, split
        self.algorithm, self.federation = coordinator.algorithm, coordinator.federation
        self.selected: Selected | None = None

    def state_dict(self) -> dict[str, Any] | None:
        """The best round so far, for a checkpoint; None if none is looked for."""
        return None if self.selected is None else self.selected.state_dict()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint; a round that was selected by another key is none."""
        if state is not None and state["key"] == self.federation.select:
            state = {**state, "records": self.coordinator.store.take_over(state["records"])}
            self.selected = Selected.from_state(state, self.coordinator.bench.device)

    def scores(self, server: ServerState) -> Scores:
        """Of the global model, and of each client's own: those that train, and those that never did."""
        return self._evaluate(server, self.split, self.own(server))

    def own(self, server: ServerState) -> Callable[[Client], Weights]:
        """A client's own model, with its own buffers where it keeps some."""

        def own(client: Client) -> Weights:
            weights = self.algorithm.personalize(server, client)
            return {**weights, **client.buffers} if client.buffers else weights  # a flat tree is loaded in one copy

        return own

    def select(self, server: ServerState, scores: Scores) -> dict[str, float]:
        """See whether a round is the best so far.

        Args:
            server: After the round.
            scores: Of the round.

        Returns:
            Further logged keys: scores on validation sets where test sets are scored, since those select nothing.

        Raises:
            InvalidOption: If there is no score of the name.
        """
        key = self.federation.select
        if key is None:
            return {}
        logged, further = scores.summary(), {}
        if self.split == "test":
            further = logged = self._validated(server, key).summary()
        if key not in logged:
            raise InvalidOption(f"`federation.select` is {key!r}; expected a validation score: {sorted(logged)}.")
        if self._is_better(logged[key]):
            self.selected = Selected(key, logged[key], server, self.coordinator.store.snapshot(server.round))
        return further

    def _validated(self, server: ServerState, key: str) -> Scores:
        """Scores on the validation sets; only of the global model if no more is asked for."""
        return self._evaluate(server, "val", None if key.startswith("global/") else self.own(server))

    def _is_better(self, value: float) -> bool:
        assert self.federation.select is not None
        if math.isnan(value) or self.selected is None:
            return not math.isnan(value)
        rising = higher_is_better(self.federation.select)
        return value > self.selected.value if rising else value < self.selected.value

    def finetuned(self, server: ServerState) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Scores of the selected round, and after each client's last local fit, where there is one.

        Without `federation.select` the round is the last one. Clients work as in the round that made the state, so at
        its learning rates, with what was kept of them then.

        Args:
            server: After the last round.

        Returns:
            Keys of the final table, and a row for each client.
        """
        tune = self._tuning()
        if tune is None and self.selected is None:
            return {}, []
        store, selected = self.coordinator.store, self.selected
        with nullcontext() if selected is None else store.seen_as(selected.records):
            server = server if selected is None else selected.server
            before = self.scores(server)
            keys: dict[str, float] = {"selected/round": server.round, **before.groups("selected")}
            if tune is None:
                return keys, _rows(before, Scores({}, {}))
            after = self._evaluate(server, self.split, self._tuned(server, tune), late=1)
        return {**keys, **after.groups("finetuned")}, _rows(before, after)

    def _tuning(self) -> Callable[[ServerState, Client], Weights | None] | None:
        """How clients are fine-tuned: by the method, unless it does not, else by the federation; None = not at all."""
        owned = type(self.algorithm).finetune is not FederatedAlgorithm.finetune
        if owned and getattr(self.algorithm, "finetune_epochs", 1) != 0:
            return self.algorithm.finetune
        return self._fit_once_more if self.federation.finetune_epochs else None

    def _tuned(
        self, server: ServerState, tune: Callable[[ServerState, Client], Weights | None]
    ) -> Callable[[Client], Weights | None]:
        """A client's weights after its last local fit, unless a signal asks to stop."""

        def own(client: Client) -> Weights | None:
            self.coordinator.interrupts.check()
            return tune(_localized(server, client), client)

        return own

    def _fit_once_more(self, server: ServerState, client: Client) -> Weights:
        """A sparse model stays as sparse."""
        weights = self.algorithm.personalize(server, client)
        masks = {name: weights[name] != 0 for name in maskable(weights)}
        masks = {name: mask for name, mask in masks.items() if not bool(mask.all())}
        return client.fit(weights, masks, epochs=self.federation.finetune_epochs).weights

    def _evaluate(
        self,
        server: ServerState,
        split: Split,
        own: Callable[[Client], Weights | None] | None,
        late: int = 0,
    ) -> Scores:
        coordinator, count = self.coordinator, self.federation.eval_clients
        groups = {"personal": coordinator.training_clients, "unseen": coordinator.unseen_clients}
        drawn = {name: evaluated_clients(coordinator.seed, clients, count) for name, clients in groups.items()}
        return evaluate(
            own,
            server,
            [*drawn["personal"], *drawn["unseen"]] if own else [],
            coordinator.bench,
            coordinator.ranks,
            split,
            lambda i: coordinator.client(i, max(server.round - late, 0)),
            coordinator.seed,
            unseen=frozenset(drawn["unseen"]),
        )


def _localized(server: ServerState, client: Client) -> ServerState:
    """The server's state with a client's own buffers, where it keeps some."""
    return replace(server, weights={**server.weights, **client.buffers}) if client.buffers else server


def _rows(before: Scores, after: Scores) -> list[dict[str, Any]]:
    """A line of `finetuned.csv` for each client."""
    scored = [(i, "personal") for i in before.personal] + [(i, "unseen") for i in before.unseen]
    rows = []
    for client, group in sorted(scored):
        early, late = getattr(before, group)[client], getattr(after, group).get(client, {})
        named = {f"selected/{n}": v for n, v in early.items()} | {f"finetuned/{n}": v for n, v in late.items()}
        rows.append({"client": client, "unseen": int(group == "unseen"), **named})
    return rows
