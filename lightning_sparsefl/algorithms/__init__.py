"""Federated methods, one module for each paper."""

from lightning_sparsefl.algorithms.fedavg import FedAvg
from lightning_sparsefl.algorithms.fedbabu import FedBABU
from lightning_sparsefl.algorithms.feddip import FedDIP
from lightning_sparsefl.algorithms.fedlps import FedLPS
from lightning_sparsefl.algorithms.fedprox import FedProx
from lightning_sparsefl.algorithms.fedspa import FedSpa
from lightning_sparsefl.algorithms.heterofl import HeteroFL
from lightning_sparsefl.algorithms.local import Local
from lightning_sparsefl.algorithms.perfedmask import PerFedMask
from lightning_sparsefl.algorithms.splitmix import SplitMix

__all__ = ["FedAvg", "FedBABU", "FedDIP", "FedLPS", "FedProx", "FedSpa", "HeteroFL", "Local", "PerFedMask", "SplitMix"]
