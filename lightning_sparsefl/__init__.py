"""Sparse and personalised federated learning as a PyTorch Lightning plug-in."""

from lightning_sparsefl.__about__ import __version__
from lightning_sparsefl.algorithms import FedAvg, FedProx, FedSpa, Local
from lightning_sparsefl.federated import FederatedAlgorithm, FederatedTrainer, Federation

__all__ = [
    "FedAvg",
    "FedProx",
    "FedSpa",
    "FederatedAlgorithm",
    "FederatedTrainer",
    "Federation",
    "Local",
    "__version__",
]
