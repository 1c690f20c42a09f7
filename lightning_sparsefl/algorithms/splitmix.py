"""Split-Mix: Efficient Split-Mix Federated Learning for On-Demand and In-Situ Customization.

Hong, Wang, Wang, Zhou, ICLR 2022, arXiv:2203.09747, section 3.

The model is split by width into M base networks that share nothing: each has 1/M of the units of every hidden layer.
A client trains as many of them as its capacity allows, one after another, each by its own loss. One is averaged over
the participants that trained it, and what a client predicts with is the mean of its networks' logits.

All base networks live in the one module, side by side: where a weight would join the units of two of them it is 0 and
masked. So names stay, training one of them is training some units of the module (`federation.execution: cut` makes it
narrow), and the module as it stands is the whole ensemble, since the layers that put out logits hold their weights
divided by M. In evaluation the whole module is passed; where a real ensemble matters, cut the networks out.

Departures from the authors' code:

- The bias of the output layers, a number a class, is one for all base networks: the mean of what each would have.
- A client's networks are trained one after another, each over its own order of batches; the code adds their losses on
  the same batch. Gradients are the same, as networks share nothing, but for clipping, which is by network here.
- Whose turn a network is follows from the client's number and the round; the code shuffles, and deals in turn.
- Incoming weights are scaled up once, as if drawn for the narrow layers; the code also scales outputs in each pass.
- Batch norms keep no statistics and take those of the batch at hand, as in the code. A norm over groups of channels
  that belong to two networks would join them, and is refused.
- The paper's bytes count weights only. On the wire the masks of a client's networks are sent when they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_sparsefl.algorithms.heterofl import narrow_biases
from lightning_sparsefl.errors import InvalidOption
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
"""Owner of a weight between two base networks."""


@dataclass(frozen=True, kw_only=True)
class SplitMix(FederatedAlgorithm):
    """Narrow networks side by side; a client trains and mixes as many as its capacity allows."""

    bases: int = 8
    """Base networks that the model is split into (M), 1 to 254; each is 1/M as wide (the paper's atom is 1/8)."""
    rescale: bool = True
    """Whether incoming weights start larger by the root of M, as if drawn for the narrow layers."""
    finetune_epochs: int = 0
    """Epochs of a last fit of each client's base networks; 0 = none."""

    def __post_init__(self) -> None:
        if not 1 <= self.bases < _NOBODY:
            raise InvalidOption(f"`SplitMix(bases={self.bases})`: expected a whole number from 1 to 254.")
        if self.finetune_epochs < 0:
            raise InvalidOption(f"`SplitMix(finetune_epochs={self.finetune_epochs})`: expected a whole number >= 0.")

    def adapt(self, module: LightningModule) -> None:
        """Batch norms keep no statistics; a norm that would join base networks is refused."""
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
        """Part the model: to each weight its base network; weights between two of them become 0."""
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
        """For each tensor with units, the number of the base network that each weight belongs to."""
        owners: dict[str, Tensor] = {}
        for base in range(self.bases):
            for name, mask in unit_masks(groups, block_units(groups, base, self.bases), weights).items():
                if name not in owners:
                    owners[name] = torch.full_like(mask, _NOBODY, dtype=torch.uint8)
                owners[name].masked_fill_(mask, base)
        return owners

    def bases_of(self, view: ClientView) -> list[int]:
        """Numbers of a client's base networks in a round: as many as its capacity allows, at least one.

        Args:
            view: Of the client. Those that it predicts with, in whatever round, are those of round 0.
        """
        count = max(1, floor_count(view.capacity, self.bases))
        return sorted((view.id + view.round + place) % self.bases for place in range(count))

    def network(self, server: ServerState, view: ClientView) -> Masks:
        """One base network of a client, as masks; all have the same shape where M divides the layers' widths.

        Args:
            server: In any round.
            view: Of the client.
        """
        return _held(server, self.bases_of(view)[:1])

    def download(self, server: ServerState, view: ClientView) -> Message:
        """The client's base networks of the round, and their numbers."""
        bases = self.bases_of(view)
        masks = _held(server, bases)
        numbers = {name: owners.new_tensor(bases) for name, owners in server.extra["bases"].items()}
        return Message(weights=apply(server.weights, masks), masks=masks, extra={"bases": numbers})

    def train(self, message: Message, client: Client) -> Update:
        """Train the base networks one after another."""
        weights, metrics = self._fit(message, client)
        return Update(weights=weights, weight=client.num_examples, metrics=metrics)

    def _fit(self, message: Message, client: Client, epochs: int | None = None) -> tuple[Weights, dict[str, float]]:
        """Each network as if there were no other; then side by side again."""
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
        weights = _side_by_side([result.weights for result in results], own)
        metrics = {name: sum(result.metrics[name] for result in results) / len(results) for name in results[0].metrics}
        return scaled(weights, dict.fromkeys(outputs, 1 / self.bases)), metrics

    def trained(self, message: Message, update: Update) -> Weights:
        """The mean of the logits of what was trained."""
        return self._mix({**message.weights, **update.weights}, message)

    def _mix(self, weights: Weights, message: Message) -> Weights:
        """Weights whose logits are the mean over the networks of a message, no longer over all."""
        return scaled(weights, dict.fromkeys(message.extra["bases"], self.bases / len(_numbers(message))))

    def personalize(self, server: ServerState, client: Client) -> Weights:
        """The mean of the logits of as many networks as the client can train."""
        message = self.download(server, replace(client.view, round=0))
        return self._mix(message.weights, message)

    def finetune(self, server: ServerState, client: Client) -> Weights | None:
        """The networks that the client predicts with, on its own data."""
        if not self.finetune_epochs:
            return None
        message = self.download(server, replace(client.view, round=0))
        return self._mix(self._fit(message, client, self.finetune_epochs)[0], message)

    def costs(self, facts: CostFacts) -> Costs:
        """The sum over the client's networks."""
        return super().costs(replace(facts, layers=narrow_biases(facts.layers, facts.message.masks)))


def scaled(weights: Weights, factors: dict[str, float]) -> Weights:
    """Weights of which some tensors are multiplied.

    Args:
        weights: Any tree.
        factors: By name of tensor.
    """
    return {name: value * factors[name] if name in factors else value for name, value in weights.items()}


def _reading(groups: Iterable[UnitGroup]) -> set[str]:
    """Tensors with a slice for each unit that they read."""
    return {slot.name for group in groups for slot in group.slots if slot.role == "in"}


def _outputs(groups: Iterable[UnitGroup]) -> list[str]:
    """Weights that read units and make none: those of the layers that put out logits."""
    making = {slot.name for group in groups for slot in group.slots if slot.role == "out"}
    return sorted(_reading(groups) - making)


def _check_split(
    weights: Weights, buffers: frozenset[str], groups: Sequence[UnitGroup], outputs: Sequence[str]
) -> None:
    """Raise :class:`InvalidOption` where the base networks would share something."""
    for group in groups:
        if group.masks_only:
            raise InvalidOption(f"The units of `{group.name}` cannot be parted: {group.masks_only}.")
    split = {slot.name for group in groups for slot in group.slots}
    heads = {name.rpartition(".")[0] for name in outputs}
    for name in weights:
        if name not in split and name not in buffers and name.rpartition(".")[0] not in heads:
            raise InvalidOption(
                f"`{name}` has no units, so that all base networks would share it; expected a model whose hidden "
                "layers can all be parted (option `model`)."
            )


def _held(server: ServerState, bases: Sequence[int]) -> Masks:
    """The masks of some base networks together."""
    if len(bases) == len(next(iter(server.extra["bases"].values()))):
        return server.masks
    owners, wanted = server.extra["owners"], torch.zeros(_NOBODY + 1, dtype=torch.bool)
    wanted[list(bases)] = True
    return {name: wanted.to(owner.device)[owner.int()] for name, owner in owners.items()}


def _numbers(message: Message) -> list[int]:
    numbers: list[int] = next(iter(message.extra["bases"].values())).tolist()
    return numbers


def _side_by_side(trained: Sequence[Weights], own: set[str]) -> Weights:
    """Networks that were trained alone, with zeros where the others are; what they have in common is averaged."""
    first, *others = trained
    weights = dict(first)
    for tree in others:
        weights = {name: value + tree[name] for name, value in weights.items()}
    return {name: value if name in own else value / len(trained) for name, value in weights.items()}
