"""One file, one paper."""

from lightning_sparsefl.algorithms.fedavg import FedAvg
from lightning_sparsefl.algorithms.fedprox import FedProx
from lightning_sparsefl.algorithms.fedspa import FedSpa
from lightning_sparsefl.algorithms.local import Local

__all__ = ["FedAvg", "FedProx", "FedSpa", "Local"]
