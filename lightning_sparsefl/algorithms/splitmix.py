"""Split-Mix: Efficient Split-Mix Federated Learning for On-Demand and In-Situ Customization.

Hong, Wang, Wang, Zhou, ICLR 2022, arXiv:2203.09747, section 3.

The model is split by width into M base networks without common weights: each has 1/M of the units of every hidden
layer. A client trains as many of them as its capacity allows, one after another, each with its own loss. The server
averages each network over the participants that trained it. The prediction of a client is the mean of the logits of its
networks.

One module contains all base networks: weights between the units of two networks are 0 and masked. Thus no tensor is
renamed, and training one network means training some units of the module (`federation.execution: cut` makes it narrow).
The module is the whole ensemble, since the weights of its output layers are divided by M. Evaluation runs the whole
module; to save the computation of the other networks, cut them out.

Departures from the authors' code:

- The bias of the output layers, one number per class, is common to all base networks: the mean of their biases.
- A client's networks are trained one after another, each with its own order of batches; the code adds their losses on
  the same batch. The gradients are equal, as the networks have no common weights, except for clipping, which is applied
  to each network here.
- The client's number and the round determine which networks it trains; the code shuffles the networks and assigns them
  in turn. Its number alone determines the networks that it predicts with; in the code, all clients of a width predict
  with the same ones.
- Clients are scored and fine-tuned with as many networks as they can train; `scored: whole` takes all of them for each
  client, as the program of PerFedMask does in its comparison.
- Incoming weights are scaled up once, to the scale of an initialization of the narrow layers; the code also scales
  outputs in each pass.
- Batch norms have no running statistics and use those of the current batch, as in the code. A norm over channels of
  several networks would couple them, and raises an error.
- The paper's bytes count weights only. Here the masks of a client's networks are sent when they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_sparsefl.cost import narrow_facts
from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.sparse.units import UnitGroup, unit_masks
from lightning_sparsefl.sparse.width import block_units, make_norms_static
from lightning_sparsefl.types import (
    ClientView,
    CostFacts,
    Costs,
    Masks,
    Message,
    ServerState,
    Update,
    Weights,
)

_NOBODY = 255
"""Owner of weights between two base networks."""


@dataclass(frozen=True, kw_only=True)
class SplitMix(FederatedAlgorithm):
    """An ensemble of narrow networks, of which a client trains and uses as many as its capacity allows."""

    bases: int = 8
    """Number of base networks (M), 1 to 254; each has 1/M of the width (1/8 in the paper)."""
    rescale: bool = True
    """Whether initial incoming weights are multiplied by the square root of M, the scale for the narrow layers."""
    scored: Literal["own", "whole"] = "own"
    """Networks that a client is scored and fine-tuned with: as many as its capacity allows, or all."""
    finetune_epochs: int = 0
    """Number of epochs of a final fit of each client's base networks; 0 = no fine-tuning."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(1 <= self.bases < _NOBODY, "algorithm.bases", self.bases, "a whole number from 1 to 254")
        require(self.finetune_epochs >= 0, "algorithm.finetune_epochs", self.finetune_epochs, "a whole number >= 0")

    @property
    def at_full_capacity(self) -> str | None:
        """Training of all base networks."""
        return "trains all base networks on every client"

    def adapt(self, module: LightningModule) -> None:
        """Remove the running statistics of batch norms, and raise for a norm that would couple base networks."""
        make_norms_static(module)
        for name, norm in module.named_modules():
            joins = isinstance(norm, nn.LayerNorm) or (
                isinstance(norm, nn.GroupNorm) and norm.num_groups % self.bases > 0
            )
            if joins and self.bases > 1:
                raise InvalidOption(
                    f"`{name}` normalizes over the units of several base networks; expected batch norm, or group norm "
                    f"with a multiple of `algorithm.bases` = {self.bases} groups (option `model`)."
                )

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Split the model: assign each weight to a base network, and set weights between two networks to 0."""
        groups = fleet.units
        owners = self._owners(groups, weights)
        outputs = _outputs(groups)
        _check_split(weights, fleet.buffers, groups, outputs)
        masks = {name: owner != _NOBODY for name, owner in owners.items()}
        scales = dict.fromkeys(_reading(groups), self.bases**0.5 if self.rescale else 1.0)
        scales |= {name: scales[name] / self.bases for name in outputs}
        numbers = torch.arange(self.bases, dtype=torch.uint8, device=fleet.device)
        return ServerState(
            round=0,
            weights=scaled(apply(weights, masks), scales),
            masks=masks,
            extra={"owners": owners, "bases": dict.fromkeys(outputs, numbers)},
        )

    def _owners(self, groups: Sequence[UnitGroup], weights: Weights) -> dict[str, Tensor]:
        """Return for each tensor with units the number of the base network of each weight."""
        owners: dict[str, Tensor] = {}
        for base in range(self.bases):
            for name, mask in unit_masks(groups, block_units(groups, base, self.bases), weights).items():
                if name not in owners:
                    owners[name] = torch.full_like(mask, _NOBODY, dtype=torch.uint8)
                owners[name].masked_fill_(mask, base)
        return owners

    def bases_of(self, view: ClientView) -> list[int]:
        """Return the numbers of a client's base networks in a round: as many as its capacity allows, at least one.

        Args:
            view: View of the client, whose `round` is used. Predictions always use the networks of round 0.
        """
        count = max(1, floor_count(view.capacity, self.bases))
        return sorted((view.id + view.round + place) % self.bases for place in range(count))

    def network(self, server: ServerState, view: ClientView) -> Masks:
        """Return the masks of one base network of a client; all have the same shape if M divides the layers' widths.

        Args:
            server: State of the server in any round.
            view: View of the client.
        """
        return _held(server, self.bases_of(view)[:1])

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the client's base networks of the round and their numbers."""
        bases = self.bases_of(view)
        masks = _held(server, bases)
        numbers = {name: owners.new_tensor(bases) for name, owners in server.extra["bases"].items()}
        return Message(weights=apply(server.weights, masks), masks=masks, extra={"bases": numbers})

    def train(self, message: Message, client: Client) -> Update:
        """Train the base networks one after another."""
        weights, metrics = self._fit(message, client)
        return Update(weights=weights, weight=client.num_examples, metrics=metrics)

    def _fit(self, message: Message, client: Client, epochs: int | None = None) -> tuple[Weights, dict[str, float]]:
        """Train each network separately, then combine them."""
        outputs = message.extra["bases"]
        alone = scaled(message.weights, dict.fromkeys(outputs, self.bases))
        results = [
            client.fit(
                alone,
                trainable=message.trainable,
                callbacks=self.callbacks(message, client),
                epochs=epochs,
                units=block_units(client.units, base, self.bases),
            )
            for base in _numbers(message)
        ]
        own = {slot.name for group in client.units for slot in group.slots if slot.role != "buffer"}
        weights = _combine([result.weights for result in results], own)
        metrics = {name: sum(result.metrics[name] for result in results) / len(results) for name in results[0].metrics}
        return scaled(weights, dict.fromkeys(outputs, 1 / self.bases)), metrics

    def trained(self, message: Message, update: Update) -> Weights:
        """Return weights whose logits are the mean over the trained networks."""
        return self._mix({**message.weights, **update.weights}, message)

    def _mix(self, weights: Weights, message: Message) -> Weights:
        """Return weights whose logits are the mean over the networks of a message instead of all networks."""
        return scaled(weights, dict.fromkeys(message.extra["bases"], self.bases / len(_numbers(message))))

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send the base networks for the client's predictions, those of round 0 in every round, or all of them."""
        capacity = 1.0 if self.scored == "whole" else view.capacity
        return self.download(server, replace(view, round=0, capacity=capacity))

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return weights whose logits are the mean over the networks of the message."""
        return self._mix(message.weights, message)

    def finetune(self, message: Message, client: Client) -> Weights | None:
        """Train the networks for the client's predictions on its own data."""
        if not self.finetune_epochs:
            return None
        return self._mix(self._fit(message, client, self.finetune_epochs)[0], message)

    def costs(self, facts: CostFacts) -> Costs:
        """Return the sum of the costs of the client's networks."""
        return super().costs(narrow_facts(facts))


def scaled(weights: Weights, factors: dict[str, float]) -> Weights:
    """Multiply some tensors of a tree.

    Args:
        weights: Tree of any tensors.
        factors: Factors by name of the tensor.
    """
    return {name: value * factors[name] if name in factors else value for name, value in weights.items()}


def _reading(groups: Iterable[UnitGroup]) -> set[str]:
    """Return the names of tensors with a slice for each unit of their input."""
    return {slot.name for group in groups for slot in group.slots if slot.role == "in"}


def _outputs(groups: Iterable[UnitGroup]) -> list[str]:
    """Return the names of weights with input units but no output units: those of the output layers."""
    making = {slot.name for group in groups for slot in group.slots if slot.role == "out"}
    return sorted(_reading(groups) - making)


def _check_split(
    weights: Weights, buffers: frozenset[str], groups: Sequence[UnitGroup], outputs: Sequence[str]
) -> None:
    """Raise :class:`InvalidOption` if base networks would have common weights."""
    for group in groups:
        if group.masks_only:
            raise InvalidOption(f"The units of `{group.name}` cannot be split: {group.masks_only}.")
    split = {slot.name for group in groups for slot in group.slots}
    heads = {name.rpartition(".")[0] for name in outputs}
    for name, weight in weights.items():
        if weight.numel() and name not in split and name not in buffers and name.rpartition(".")[0] not in heads:
            raise InvalidOption(
                f"`{name}` has no units, so that all base networks would share it; expected a model whose hidden "
                "layers can all be split (option `model`)."
            )


def _held(server: ServerState, bases: Sequence[int]) -> Masks:
    """Return the union of the masks of some base networks."""
    if len(bases) == len(next(iter(server.extra["bases"].values()))):
        return server.masks
    owners, wanted = server.extra["owners"], torch.zeros(_NOBODY + 1, dtype=torch.bool)
    wanted[list(bases)] = True
    return {name: wanted.to(owner.device)[owner.int()] for name, owner in owners.items()}


def _numbers(message: Message) -> list[int]:
    numbers: list[int] = next(iter(message.extra["bases"].values())).tolist()
    return numbers


def _combine(trained: Sequence[Weights], own: set[str]) -> Weights:
    """Combine separately trained networks, which have zeros in place of the others; average their common tensors."""
    first, *others = trained
    weights = dict(first)
    for tree in others:
        weights = {name: value + tree[name] for name, value in weights.items()}
    return {name: value if name in own else value / len(trained) for name, value in weights.items()}
