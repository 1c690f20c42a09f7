"""Costs of a round: operations, bytes and simulated time."""

from lightning_sparsefl.cost.device import Devices
from lightning_sparsefl.cost.flops import count_layers, forward_flops, training_flops
from lightning_sparsefl.cost.ledger import Charge, Ledger

__all__ = ["Charge", "Devices", "Ledger", "count_layers", "forward_flops", "training_flops"]
