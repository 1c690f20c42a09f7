"""PerFedMask: Personalized Federated Learning with Optimized Masking Vectors.

Setayesh, Li, Wong, ICLR 2023. Equations, tables and appendices are numbered as there.

Once before training, the server decides which groups of layers each client trains within its budget
(``federation.capacities``, as fractions of the body), by minimizing the bias of the convergence bound that is due to
freezing (problem P^mask, eq. 9). A client receives the whole model, trains its groups and sends them; a group is
averaged over the clients that trained it (eq. 3). The head keeps its random initial weights until each client
fine-tunes the whole model at the end.

With `base`, clients have narrow networks of HeteroFL or Split-Mix, of which they train some layers (Tables 2 and 8).
The paper does not specify how P^mask is solved in this case. Here it is solved separately for clients with networks of
equal size; the budget is the capacity as a fraction of one network: that of the client's width, or each of its base
networks.

Departures from the paper and the authors' code, which was read, not copied:

- P^mask is solved by local search from several starts, and exactly if it is small. The authors' successive
  approximation does not improve on the best of 1000 random starts, since its penalty is linearised without a constant;
  it needs a licensed solver, and returns the start without a warning if the license is missing.
- Without an additional constraint, empty masks would solve P^mask: a client trains a group if any fits its budget.
- A group is averaged by numbers of samples, as in the code; eq. 3 takes the plain mean. A group that no participant
  trains keeps the server's value, where eq. 3 divides by zero.
- The five "local update iterations" of fine-tuning are epochs, as in the code and Table 3.
- All clients train the same number of epochs, as in the paper, where the weak half of the clients of its baselines
  (FedAvg, FedProx, FedNova, FedBABU) trains half as many: `federation.local_epochs` in their configurations.
- Images of validation sets are not augmented; those of the authors' code are.
- The FLOPs of the paper's tables were read from hardware counters; here both columns are computed, without a backward
  pass below the earliest trained layer.
- The bias in the paper's Table 5 does not follow from its own formula (at capacities of 1/8 it is at least four fifths
  of the body), nor do the 6.138 million trainable parameters of Table 1: the optimum trains 6,265,728.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.algorithms.fedavg import FedAvg
from lightning_sparsefl.cost import with_trained_upload
from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.federated.aggregation.reducers import Reducer
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse import freeze
from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.sparse.layer_groups import head_of, layer_groups, require_passable
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.sparse.parts import without
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Message, ServerState, Update, Weights

_Masking: TypeAlias = Callable[[Sequence[int], Sequence[int], torch.Generator], Tensor]
_MASKINGS: dict[str, _Masking] = {
    "optimized": freeze.optimized,
    "random": freeze.random,
    "sequential": lambda sizes, budgets, _: freeze.sequential(sizes, budgets),
}


@dataclass(frozen=True, kw_only=True)
class PerFedMask(FederatedAlgorithm):
    """Each client trains the layers that a plan assigns to it within its capacity."""

    plans_by_capacity = True

    masking: Literal["optimized", "random", "sequential"] = "optimized"
    """Method of planning: the solution of P^mask, random layers, or the first layers that fit (Table 5)."""
    head: str | None = None
    """Name of the module that is the head; null = the last linear layer."""
    freeze_head: bool = True
    """Whether the head keeps its random initial weights; otherwise it is a group like the others (Table 9)."""
    groups: tuple[str, ...] = ()
    """Glob patterns of names of parameters, each for one group. Other parameters are grouped by layers and blocks."""
    finetune_epochs: int = 5
    """Number of epochs of each client's final fit of the whole model; 0 = no fine-tuning."""
    base: FederatedAlgorithm | None = None
    """HeteroFL or SplitMix, of whose networks clients train some layers; null = layers of the whole model. Callbacks of
    local training are those of the base."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        if self.base is not None and not hasattr(self.base, "network"):
            raise InvalidOption(f"`PerFedMask(base={self.base})`: expected `HeteroFL` or `SplitMix`, or null.")
        if getattr(self.base, "finetune_epochs", 0):
            raise InvalidOption(
                f"`PerFedMask(base={self.base})`: PerFedMask fine-tunes instead of its base; expected "
                "`algorithm.finetune_epochs` instead of the base's."
            )
        require(self.finetune_epochs >= 0, "algorithm.finetune_epochs", self.finetune_epochs, "a whole number >= 0")

    @property
    def _inner(self) -> Any:
        """The method that determines everything except the trainable weights."""
        return FedAvg() if self.base is None else self.base

    @property
    def at_full_capacity(self) -> str:
        """Training without a plan."""
        return "freezes no layer" + (" but the head" if self.freeze_head else "")

    def adapt(self, module: LightningModule) -> None:
        """Adapt the module as the base does."""
        self._inner.adapt(module)

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Compute the plan: for every parameter, the clients that train it."""
        server: ServerState = self._inner.init(weights, fleet)
        parameters = without(weights, fleet.buffers)
        head = head_of(parameters, self.head, fleet.uses, "with `algorithm.head`") if self.freeze_head else ()
        require_passable(weights, head)
        body = {name: weight for name, weight in without(fleet.trained(weights), head).items() if weight.numel()}
        if not body:
            raise InvalidOption(
                f"The head {list(head)} is the whole model that trains; name a part of it with `algorithm.head`."
            )
        groups = layer_groups(body, self.groups)
        rng = generator(fleet.seed, "PerFedMask plan")
        trains = torch.zeros(max(view.id for view in fleet.views) + 1, len(groups), dtype=torch.bool)
        for sizes, views in self._by_size(server, body, groups, fleet).items():
            budgets = [floor_count(view.capacity, sum(sizes)) for view in views]
            trains[[view.id for view in views]] = _MASKINGS[self.masking](sizes, budgets, rng)
        columns = dict(zip(groups, trains.T.contiguous().to(fleet.device), strict=True))
        nobody = torch.zeros(len(trains), dtype=torch.bool, device=fleet.device)
        owner = {name: group for group, names in groups.items() for name in names}
        plan = {name: columns[owner[name]] if name in owner else nobody for name in parameters}
        return replace(server, extra={**server.extra, "trains": plan})

    def _by_size(
        self, server: ServerState, body: Weights, groups: Mapping[str, Sequence[str]], fleet: Fleet
    ) -> dict[tuple[int, ...], list[ClientView]]:
        """Return the clients by the sizes of the groups in one of their networks, which depend on the capacity."""
        known: dict[float, tuple[int, ...]] = {}
        found: dict[tuple[int, ...], list[ClientView]] = defaultdict(list)
        for view in fleet.views:
            if view.capacity not in known:
                kept = {} if self.base is None else counts(self._inner.network(server, view))
                sizes = (sum(kept.get(name, body[name].numel()) for name in names) for names in groups.values())
                known[view.capacity] = tuple(sizes)
            found[known[view.capacity]].append(view)
        return found

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the whole model or the base's networks, and the masks of trainable weights."""
        trains = server.extra["trains"]
        mine = dict(zip(trains, torch.stack([clients[view.id] for clients in trains.values()]).tolist(), strict=True))
        fixed = [name for name, may_change in mine.items() if not may_change]
        frozen = {
            name: torch.zeros((), dtype=torch.bool, device=server.weights[name].device).expand_as(server.weights[name])
            for name in (
                fixed if len(fixed) < len(mine) else server.weights
            )  # without trainable parameters, buffers do not change either
        }
        message: Message = self._inner.download(server, view)
        return replace(message, trainable=frozen)

    def alike(self, server: ServerState, view: ClientView) -> Hashable:
        """Return the layers that the client trains, so that the backward pass of a stack ends where theirs do."""
        mine = torch.stack([clients[view.id] for clients in server.extra["trains"].values()])
        return (*mine.tolist(), self._inner.alike(server, view))

    def equal_costs(self, server: ServerState, view: ClientView) -> Hashable:
        """Return the layers that the client trains."""
        return self.alike(server, view)

    def train(self, message: Message, client: Client) -> Update:
        """Train as the base does; a client whose budget is too small for any group does not train or send weights."""
        if _is_idle(message):
            return Update(weights={}, weight=client.num_examples)
        return super().train(message, client) if self.base is None else self.base.train(message, client)

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the trained weights as the base does."""
        weights: Weights = self._inner.trained(message, update)
        return weights

    def reducer(self) -> Reducer:
        """Return the reducer of the base."""
        reducer: Reducer = self._inner.reducer()
        return reducer

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send the base's message without the plan, which has no rows for clients that never train."""
        message: Message = self._inner.download_for(server, view, task)
        return message

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the global model, or what the base scores of it."""
        weights: Weights = self._inner.personalize(message, client)
        return weights

    def finetune(self, message: Message, client: Client) -> Weights | None:
        """Train the whole model, or what the base scores of it, head included, on the client's own data."""
        if self.base is not None:
            return replace(self._inner, finetune_epochs=self.finetune_epochs).finetune(message, client)  # type: ignore[no-any-return]
        return client.fit(message.weights, epochs=self.finetune_epochs).weights if self.finetune_epochs else None

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs in which only trained parameters are uploaded, whose mean is in Tables 1, 2, 4, 7 and 8."""
        costs = with_trained_upload(self._inner.costs(facts), facts)
        return replace(costs, flops_paper=0, flops_analytic=0) if _is_idle(facts.message) else costs


def _is_idle(message: Message) -> bool:
    """Return whether a client has no trainable weights."""
    return all(name in message.trainable for name in message.weights)
