"""The part of a model that its client keeps: what FedPer, FedRep, LG-FedAvg and FedBN have in common.

The names of the own tensors are in the server's state. They are missing from messages and updates, and a client keeps
their values in its memory. It knows them as the tensors that it does not receive.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.parts import only, part, without
from lightning_sparsefl.types import FitResult, Masks, Message, ServerState, Update, Weights


def chosen(weights: Weights, patterns: Sequence[str], fleet: Fleet) -> tuple[str, ...]:
    """Return the names of the tensors that patterns name, as :func:`~lightning_sparsefl.sparse.parts.part` takes them.

    Args:
        weights: Initial weights of the module.
        patterns: Patterns of the part, the option `own` of the method.
        fleet: Fleet of the run, which knows the kinds of the module's tensors.
    """
    return part(weights, patterns, buffers=fleet.buffers, norms=fleet.norms, uses=fleet.uses, option="algorithm.own")


def start(weights: Weights, own: Collection[str]) -> ServerState:
    """Return the first state of a method whose clients keep some tensors.

    Args:
        weights: Initial weights of the module.
        own: Names of the tensors that clients keep.
    """
    if weights and not without(weights, own):
        rank_zero_warn(
            f"Clients keep the whole model ({', '.join(own)}) and share nothing, so that each trains alone; expected a "
            "model with further layers, or another `algorithm`."
        )
    if weights and not own:
        rank_zero_warn(
            "Clients keep no layer of the model and share all of it, as with `FedAvg`; expected an option of "
            "`algorithm` that leaves them some, or a model with further layers."
        )
    return ServerState(round=0, weights=weights, extra={"own": {name: torch.tensor(True) for name in own}})


def shared_part(server: ServerState) -> Message:
    """Return the message with the tensors that clients do not keep."""
    return Message(weights=without(server.weights, server.extra["own"]))


def joined(message: Message, client: Client) -> Weights:
    """Return a client's whole model: what it received, and its own tensors, at first the run's initial ones."""
    return {**client.initial, **message.weights, **client.memory.get("own", {})}


def divided(result: FitResult, message: Message, weight: int) -> Update:
    """Return the update of a local fit: what the client received travels back, the rest goes into its memory.

    Args:
        result: Result of the fit.
        message: Message that the client received.
        weight: Weight of the update.
    """
    return Update(
        weights=only(result.weights, message.weights),
        weight=weight,
        memory={"own": without(result.weights, message.weights)},
        metrics=result.metrics,
    )


def whole(update: Update) -> Weights:
    """Return the whole model of a client after its local fit, from the result of :func:`divided`."""
    return {**update.weights, **(update.memory or {})["own"]}


def frozen(weights: Weights, client: Client) -> Masks:
    """Return masks that keep parameters from training; buffers carry no masks.

    Args:
        weights: Weights to freeze.
        client: The client.
    """
    return {name: torch.zeros_like(value, dtype=torch.bool) for name, value in without(weights, client.buffers).items()}
