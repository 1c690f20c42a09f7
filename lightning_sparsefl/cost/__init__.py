"""Costs of a round: operations, bytes and simulated time."""

from lightning_sparsefl.cost.availability import Availability
from lightning_sparsefl.cost.device import Devices
from lightning_sparsefl.cost.flops import count_layers, forward_flops, training_flops
from lightning_sparsefl.cost.latency import ModelCosts, measure
from lightning_sparsefl.cost.ledger import Charge, Ledger
from lightning_sparsefl.cost.partial_models import BYTES_PER_WEIGHT, narrow_biases, narrow_facts, with_trained_upload
from lightning_sparsefl.cost.several_fits import PhaseFlops, phases

__all__ = [
    "BYTES_PER_WEIGHT",
    "Availability",
    "Charge",
    "Devices",
    "Ledger",
    "ModelCosts",
    "PhaseFlops",
    "count_layers",
    "forward_flops",
    "measure",
    "narrow_biases",
    "narrow_facts",
    "phases",
    "training_flops",
    "with_trained_upload",
]
