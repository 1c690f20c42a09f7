"""Updates of late clients, as the server keeps them until a later round merges them."""

from __future__ import annotations

import torch

from lightning_sparsefl.errors import InvalidUpdate
from lightning_sparsefl.federated.aggregation.reducers import changes_of, voted
from lightning_sparsefl.federated.exchange.orders import Order
from lightning_sparsefl.types import PendingUpdate, Update


def require_no_extra(order: Order, update: Update) -> None:
    """Refuse a method whose updates could not be merged in a later round, at the first update, late or not.

    Args:
        order: Order that the client answered.
        update: Update of the client.

    Raises:
        InvalidUpdate: If the update has more than weights.
    """
    if update.extra:
        raise InvalidUpdate(
            f"The update of client {order.client} has the `extra` trees {sorted(update.extra)}, which could not be "
            "merged in a later round; expected a method that sends weights only, or another `federation.sampler`."
        )


def pending_update(order: Order, update: Update, arrival: float) -> PendingUpdate:
    """Return what is kept of a late client's update, on the CPU.

    Args:
        order: Order that the client answered.
        update: Update of the client.
        arrival: Simulated time at which it arrives.

    Raises:
        InvalidUpdate: If the update has weights that the client did not receive.
    """
    changes, cpu = changes_of(update, order.message, "federation.sampler"), torch.device("cpu")
    return PendingUpdate(
        client=order.client,
        round=order.round,
        arrival=arrival,
        weight=update.weight,
        num_examples=order.facts.num_examples,
        changes={name: change.detach().to(cpu, copy=True) for name, change in changes.items()},
        votes={name: mask.to(cpu, copy=True) for name, mask in voted(update, order.message).items()},
    )
