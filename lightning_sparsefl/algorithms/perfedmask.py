"""PerFedMask: Personalized Federated Learning with Optimized Masking Vectors.

Setayesh, Li, Wong, ICLR 2023. Equations, tables and appendices are numbered as there.

Once before training the server decides which groups of layers each client trains, within the client's budget
(``federation.capacities``, as shares of the body), by minimizing the bias that freezing leaves in the convergence bound
(problem P^mask, eq. 9). A client receives the whole model, trains its groups and sends them; a group is averaged over
those who trained it (eq. 3). The head keeps its random start until each client fine-tunes the whole model at the end.

Departures. The authors' code was read, not copied:

- P^mask is solved by local search from several starts, and exactly where it is small. The authors' successive
  approximation stays at the best of 1000 random starts, since its penalty is linearised without a constant; it needs a
  licensed solver, and keeps the start without a word where there is none.
- Without side conditions empty masks would solve P^mask: a client trains something if anything fits its budget.
- A group is averaged by samples, as in the code; eq. 3 averages evenly. A group that no participant trains keeps the
  server's value, where eq. 3 divides by zero.
- The five "local update iterations" of fine-tuning are epochs, as in the code and Table 3.
- FLOPs of the paper's tables were read from hardware counters; both columns here are counted, with no backward pass
  below the earliest trained layer.
- The bias of the paper's Table 5 does not follow from its own formula (at capacities of 1/8 it is at least four fifths
  of the body), nor do the 6.138 million trainable parameters of Table 1: the optimum trains 6,265,728.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightning_sparsefl.algorithms.fedbabu import upload_of_the_trained
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.federated.options import check_choices
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse import freeze
from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.sparse.layer_groups import group_sizes, head_of, layer_groups
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Message, ServerState, Weights

_Masking: TypeAlias = Callable[[Sequence[int], Sequence[int], torch.Generator], Tensor]
_MASKINGS: dict[str, _Masking] = {
    "optimized": freeze.optimized,
    "random": freeze.random,
    "sequential": lambda sizes, budgets, _: freeze.sequential(sizes, budgets),
}


@dataclass(frozen=True, kw_only=True)
class PerFedMask(FederatedAlgorithm):
    """Each client trains the layers that a plan gives it, within its capacity."""

    masking: Literal["optimized", "random", "sequential"] = "optimized"
    """How the plan is made: P^mask, by chance, or the first layers that fit (Table 5)."""
    head: str | None = None
    """Module that is the head; none = the last linear layer."""
    freeze_head: bool = True
    """Whether the head keeps its random start; else it is a group like the others (Table 9)."""
    groups: tuple[str, ...] = ()
    """Globs over names of parameters; each makes one group. What they leave is grouped by layers and blocks."""
    finetune_epochs: int = 5
    """Epochs of each client's last fit, of the whole model; 0 = none."""

    def __post_init__(self) -> None:
        check_choices(self, "algorithm.")
        if self.finetune_epochs < 0:
            raise InvalidOption(f"`PerFedMask(finetune_epochs={self.finetune_epochs})`: expected a whole number >= 0.")

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Make the plan: for every parameter, which clients train it."""
        parameters = {name: value for name, value in weights.items() if name not in fleet.buffers}
        head = head_of(parameters, self.head) if self.freeze_head else ()
        body = {name: value for name, value in parameters.items() if name not in head}
        if not body:
            raise InvalidOption(f"The head {list(head)} is the whole model; name a part of it with `algorithm.head`.")
        groups = layer_groups(body, self.groups)
        sizes = group_sizes(body, groups)
        budgets = [floor_count(view.capacity, sum(sizes)) for view in fleet.views]
        plan = _MASKINGS[self.masking](sizes, budgets, generator(fleet.seed, "PerFedMask plan"))
        clients = torch.tensor([view.id for view in fleet.views])
        trains = torch.zeros(int(clients.max()) + 1, len(groups), dtype=torch.bool)
        trains[clients] = plan
        columns = dict(zip(groups, trains.T.contiguous().to(fleet.device), strict=True))
        nobody = torch.zeros(len(trains), dtype=torch.bool, device=fleet.device)
        owner = {name: group for group, names in groups.items() for name in names}
        return ServerState(
            round=0,
            weights=weights,
            extra={"trains": {name: columns[owner[name]] if name in owner else nobody for name in parameters}},
        )

    def download(self, server: ServerState, view: ClientView) -> Message:
        """The whole model, and which of it the client may change."""
        trains = server.extra["trains"]
        mine = dict(zip(trains, torch.stack([clients[view.id] for clients in trains.values()]).tolist(), strict=True))
        frozen = {
            name: torch.zeros((), dtype=torch.bool, device=server.weights[name].device).expand_as(server.weights[name])
            for name, may_change in mine.items()
            if not may_change
        }
        return Message(weights=server.weights, trainable=frozen)

    def finetune(self, server: ServerState, client: Client) -> Weights | None:
        """The whole model, head and all, on the client's own data."""
        return client.fit(server.weights, epochs=self.finetune_epochs).weights if self.finetune_epochs else None

    def costs(self, facts: CostFacts) -> Costs:
        """The paper counts the trained parameters up; Tables 1, 2, 4, 7 and 8 print their mean over clients."""
        return upload_of_the_trained(super().costs(facts), facts.message)
