"""FedRep: Exploiting Shared Representations for Personalized Federated Learning.

Collins, Hassani, Mokhtari, Shakkottai, ICML 2021, arXiv:2102.07078, Algorithm 1.

As in FedPer, a client keeps the head and only the body travels. In each round a client first trains its head above the
received body for `head_epochs`, then the body below the new head for `body_epochs`. After the last round every client
trains its head alone. FedRep is a row of FedLPS (arXiv:2412.07216, Table I).

Departures from the paper and the authors' code:

- The body is averaged by numbers of samples, as in the code; the paper takes the plain mean.
- Each of the two fits has an optimizer of its own, so that momentum does not pass from one to the other.
- The body is every layer but the last linear one. For CIFAR the code shares layers 0, 1, 3 and 4 of a list in another
  order than that of its network, in which the output layer has the index 2.
- The code's `local_ep` is the sum of both numbers of epochs, which are options here: `trainer.max_epochs`, or
  `federation.local_epochs`, determines only ``flops/paper``, which is that of FedAvg, as FedLPS prints it for 2 epochs
  of the head and 5 of the body.
- The code reports the mean of the last ten rounds before the last fit.
- A client that never took part is scored with the initial head, and so is the server's model (``global/*``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lightning_sparsefl.algorithms import _own_part
from lightning_sparsefl.cost import phases
from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.parts import without
from lightning_sparsefl.types import ClientView, CostFacts, Costs, FitResult, Message, ServerState, Update, Weights


@dataclass(frozen=True, kw_only=True)
class FedRep(FederatedAlgorithm):
    """Each client trains its own head first, then the shared body below it."""

    can_be_private = True

    own: tuple[str, ...] = ("head",)
    """Layers that clients keep: names of modules, globs over names of tensors, ``head`` for the last linear layer,
    ``norm`` for all norms."""
    head_epochs: int = 4
    """Number of epochs in which the own layers are trained, before the others."""
    body_epochs: int = 1
    """Number of epochs in which the shared layers are trained."""
    finetune_epochs: int = 10
    """Number of epochs of each client's final fit of its own layers; 0 = no fine-tuning."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        for name in ("head_epochs", "body_epochs", "finetune_epochs"):
            require(getattr(self, name) >= 0, f"algorithm.{name}", getattr(self, name), "a whole number >= 0")
        if self.head_epochs == self.body_epochs == 0:
            raise InvalidOption(
                "`algorithm.head_epochs` and `algorithm.body_epochs` are 0; expected one of them above 0."
            )

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Find the own layers and return the initial state."""
        return _own_part.start(weights, _own_part.chosen(weights, self.own, fleet))

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the body."""
        return _own_part.shared_part(server)

    def train(self, message: Message, client: Client) -> Update:
        """Train the head, then the body; send the body and keep the head."""
        result = FitResult(_own_part.joined(message, client), metrics={}, steps=0)
        own = without(result.weights, message.weights)
        for fixed, epochs in ((message.weights, self.head_epochs), (own, self.body_epochs)):
            frozen = _own_part.frozen(fixed, client)
            if epochs and len(frozen) < len(without(result.weights, client.buffers)):  # else nothing is left to train
                callbacks = self.callbacks(message, client)
                result = client.fit(result.weights, trainable=frozen, callbacks=callbacks, epochs=epochs)
        return _own_part.divided(result, message, client.num_examples)

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the client's body and head after training."""
        return _own_part.whole(update)

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the server's body with the client's own head."""
        return _own_part.joined(message, client)

    def finetune(self, message: Message, client: Client) -> Weights | None:
        """Train the client's own head above the server's body."""
        weights, frozen = _own_part.joined(message, client), _own_part.frozen(message.weights, client)
        if not self.finetune_epochs or len(frozen) == len(without(weights, client.buffers)):
            return None
        return client.fit(weights, trainable=frozen, epochs=self.finetune_epochs).weights

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of FedAvg by the paper, and the FLOPs of both fits by analysis, without frozen layers."""
        frozen = torch.zeros(1, dtype=torch.bool)
        layers = [layer.weight for layer in facts.layers if layer.weight]
        body = {name: frozen for name in layers if name in facts.message.weights}
        head = {name: frozen for name in layers if name not in body}
        flops = phases(facts, [({}, body, self.head_epochs), ({}, head, self.body_epochs)])
        return replace(super().costs(facts), flops_analytic=flops.flops_analytic)
