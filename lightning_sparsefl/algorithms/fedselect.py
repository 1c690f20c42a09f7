"""FedSelect: Personalized Federated Learning with Customized Selection of Parameters for Fine-Tuning.

Tamirisa, Xie, Bao, Zhou, Arel, Shamsian, CVPR 2024, arXiv:2404.02478.

Single weights are personal, not layers. A client starts without personal weights. At every third participation it makes
those shared weights of each tensor personal that have changed most since the last time. It alternates between epochs
that train its personal weights and epochs that train the shared ones, which alone are sent and averaged.

Departures from the authors' code:

- The clients are drawn in every round; the code draws 10 of 100 once. `every` counts a client's own participations.
- New personal weights go on from the client's own values. In the code they take the merged value of the round in which
  they were chosen, since it still sends and receives them in that round.
- The number of new personal weights is rounded half up, and ties go to the lower index.
- A client is scored with the merged weights of the round, as those of other methods are, and so is the last round; the
  code scores before it merges, and does not merge the last round.
- Running statistics are averaged unless `federation.buffers` is `local`; in the code each client keeps its own.
- The local optimizer is that of the module, anew for each epoch; the code takes plain SGD.
- An epoch in which nothing can change is not run, as that of the personal weights before there are any; ``flops/paper``
  counts it, ``flops/train`` does not.
- Each alternation takes two epochs, whatever `trainer.max_epochs` and `federation.local_epochs` are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lightning_sparsefl.cost import BYTES_PER_WEIGHT, forward_flops
from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.sparse.masks import apply, kept, subtract
from lightning_sparsefl.sparse.parts import only, without
from lightning_sparsefl.sparse.regrow import grow_share
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.types import (
    ClientView,
    CostFacts,
    Costs,
    FitResult,
    Masks,
    Message,
    ServerState,
    Update,
    Weights,
)


@dataclass(frozen=True, kw_only=True)
class FedSelect(FederatedAlgorithm):
    """Each client keeps a growing choice of single weights for itself."""

    uploads_shared = True

    rate: float = 0.25
    """Fraction of a tensor's shared weights that become personal at a selection, in [0, 1]."""
    bound: float = 0.8
    """Fraction of a tensor's weights above which no more become personal, in [0, 1]."""
    every: int = 3
    """Number of a client's participations between two selections; the first participation does not select."""
    alternations: int = 15
    """Number of times that a client trains its personal weights for an epoch, then the shared ones for another."""
    sparse_download: bool = False
    """Whether the server keeps each client's choice, and does not send what it would not use."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        for name in ("rate", "bound"):
            require(0 <= getattr(self, name) <= 1, f"algorithm.{name}", getattr(self, name), "a number in [0, 1]")
        for name in ("every", "alternations"):
            require(getattr(self, name) >= 1, f"algorithm.{name}", getattr(self, name), "a whole number >= 1")

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send all weights, or those that the client shares."""
        masks = {name: ~own for name, own in view.shared.get("personal", {}).items()}
        return Message(weights=apply(server.weights, masks), masks=masks)

    def may_vote(self, message: Message) -> Masks:
        """Return no masks: before its first selection a client votes everywhere."""
        return {}

    def train(self, message: Message, client: Client) -> Update:
        """Alternate between personal and shared weights, send the shared ones, and select new personal ones."""
        own, turns = _personal(client), client.memory.get("turns", 0)
        result = self._alternate(message, own, client)
        names = own.keys()
        reference = client.memory.get("reference", client.initial)
        chosen = own
        if turns and turns % self.every == 0:
            moved = subtract(only(result.weights, names), only(reference, names))
            chosen = grow_share(magnitude(moved), own, self.rate, self.bound)
            reference = result.weights
        memory = {"masks": chosen, "turns": turns + 1}
        memory["own"] = {name: result.weights[name].masked_fill(~mask, 0) for name, mask in chosen.items()}
        memory["reference"] = only(reference, names)
        return Update(
            weights=result.weights,
            weight=1,
            votes={name: ~mask for name, mask in own.items()},
            shared={"own": kept(chosen), **({"personal": chosen} if self.sparse_download else {})},
            memory=memory,
            metrics=result.metrics,
        )

    def _alternate(self, message: Message, own: Masks, client: Client) -> FitResult:
        """Train personal and shared weights in turn, an epoch each."""
        result = FitResult(self.personalize(message, client), metrics={}, steps=0)
        parameters = without(result.weights, client.buffers)
        personal = {n: own.get(n, torch.zeros_like(w, dtype=torch.bool)) for n, w in parameters.items()}
        shared = {name: ~mask for name, mask in personal.items()}
        for trainable in [personal, shared] * self.alternations:
            if kept(trainable):
                callbacks = self.callbacks(message, client)
                result = client.fit(result.weights, trainable=trainable, callbacks=callbacks, epochs=1)
        return result

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the received weights with the client's personal ones."""
        masks, own = client.memory.get("masks", {}), client.memory.get("own", {})
        joined = {name: torch.where(mask, own[name], message.weights[name]) for name, mask in masks.items()}
        return {**message.weights, **joined}

    def costs(self, facts: CostFacts) -> Costs:
        """Return costs of two epochs for each alternation, and of the upload of shared weights with their positions."""
        costs, own = super().costs(facts), facts.view.shared.get("own", 0)
        work = self.alternations * facts.samples * forward_flops(facts.layers)
        weights = without(facts.message.weights, facts.buffers)
        values = BYTES_PER_WEIGHT * (sum(weight.numel() for weight in weights.values()) - own)
        positions = sum(weight.numel() for name, weight in weights.items() if _selectable(name)) / 8 if own else 0
        return replace(
            costs,
            flops_paper=6 * work,
            flops_analytic=(5 if own else 3) * work,  # the gradients of all weights are computed once in two epochs
            bytes_up_paper=values + positions,
        )


def _personal(client: Client) -> Masks:
    """Return the masks of a client's personal weights, at first of none; only tensors named as weights have them."""
    names = [name for name in without(client.initial, client.buffers) if _selectable(name)]
    nothing = {name: torch.zeros_like(client.initial[name], dtype=torch.bool) for name in names}
    masks: Masks = client.memory.get("masks", nothing)
    return masks


def _selectable(name: str) -> bool:
    """Return whether weights of a tensor may become personal; as in the code, biases are always shared."""
    return "weight" in name
