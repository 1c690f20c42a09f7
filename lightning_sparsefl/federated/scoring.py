"""What is scored in a round, which round is the best so far, and what fine-tuning makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client, Split
from lightning_sparsefl.federated.coordinator import Coordinator
from lightning_sparsefl.federated.evaluate import Scores, evaluate, higher_is_better
from lightning_sparsefl.federated.sampling import evaluated_clients
from lightning_sparsefl.federated.store import pack_plain, unpack_plain
from lightning_sparsefl.types import ServerState, Weights


@dataclass(frozen=True)
class Selected:
    """The best round so far by `federation.select`."""

    value: float
    """Of the selected key."""
    server: ServerState
    """After that round."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        server = self.server
        trees = {name: pack_plain(getattr(server, name)) for name in ("weights", "masks", "extra")}
        return {"value": self.value, "round": server.round, **trees}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device) -> Selected:
        """What `state_dict` made, with its tensors on a device."""
        trees = {name: unpack_plain(state[name], device) for name in ("weights", "masks", "extra")}
        return cls(state["value"], ServerState(round=state["round"], **trees))


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

    def scores(self, server: ServerState) -> Scores:
        """Of the global model, and of each client's own: those that train, and those that never did."""
        return self._evaluate(server, self.split, lambda client: self.algorithm.personalize(server, client))

    def select(self, server: ServerState, scores: Scores) -> dict[str, float]:
        """See whether a round is the best so far.

        Args:
            server: After the round.
            scores: Of the round.

        Returns:
            Further logged keys: those of the validation sets, where the key to select by is theirs and test sets are
            scored.

        Raises:
            InvalidOption: If there is no score of the name.
        """
        key = self.federation.select
        if key is None:
            return {}
        logged, further = scores.summary(), {}
        if key not in logged and self.split == "test":
            further = logged = self._validated(server, key).summary()
        if key not in logged:
            raise InvalidOption(f"`federation.select` is {key!r}; expected one of {sorted(logged)}.")
        if self._is_better(logged[key]):
            self.selected = Selected(logged[key], server)
        return further

    def _validated(self, server: ServerState, key: str) -> Scores:
        """Scores on the validation sets; only of the global model if no more is asked for."""
        own = None if key.startswith("global/") else lambda client: self.algorithm.personalize(server, client)
        return self._evaluate(server, "val", own)

    def _is_better(self, value: float) -> bool:
        assert self.federation.select is not None
        if math.isnan(value) or self.selected is None:
            return not math.isnan(value)
        rising = higher_is_better(self.federation.select)
        return value > self.selected.value if rising else value < self.selected.value

    def finetuned(self, server: ServerState) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Scores before and after each client's last local fit, where the method has one.

        The state is that of the selected round, and without `federation.select` that of the last one. Clients work as
        in the round that made it, so at its learning rates.

        Args:
            server: After the last round.

        Returns:
            Keys of the final table, and a row for each client.
        """
        owned = type(self.algorithm).finetune is not FederatedAlgorithm.finetune
        if not owned and not self.federation.finetune_epochs:
            return {}, []
        server = server if self.selected is None else self.selected.server
        before = self.scores(server)
        tune = self.algorithm.finetune if owned else self._fit_once_more
        after = self._evaluate(server, self.split, lambda client: tune(server, client), late=1)
        keys: dict[str, float] = {"selected/round": server.round, **before.groups("selected")}
        return {**keys, **after.groups("finetuned")}, _rows(before, after)

    def _fit_once_more(self, server: ServerState, client: Client) -> Weights:
        weights = self.algorithm.personalize(server, client)
        return client.fit(weights, epochs=self.federation.finetune_epochs).weights

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


def _rows(before: Scores, after: Scores) -> list[dict[str, Any]]:
    """A line of `finetuned.csv` for each client."""
    scored = [(i, "personal") for i in before.personal] + [(i, "unseen") for i in before.unseen]
    rows = []
    for client, group in sorted(scored):
        early, late = getattr(before, group)[client], getattr(after, group).get(client, {})
        named = {f"selected/{n}": v for n, v in early.items()} | {f"finetuned/{n}": v for n, v in late.items()}
        rows.append({"client": client, "unseen": int(group == "unseen"), **named})
    return rows
