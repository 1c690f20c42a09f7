"""Costs of a round: operations, bytes and simulated time."""

from lightning_sparsefl.cost.device import Devices
from lightning_sparsefl.cost.flops import count_layers, forward_flops, training_flops
from lightning_sparsefl.cost.ledger import Charge, Ledger
from lightning_sparsefl.cost.partial_models import BYTES_PER_WEIGHT, narrow_biases, with_trained_upload

__all__ = [
    "BYTES_PER_WEIGHT",
    "Charge",
    "Devices",
    "Ledger",
    "count_layers",
    "forward_flops",
    "narrow_biases",
    "training_flops",
    "with_trained_upload",
]
