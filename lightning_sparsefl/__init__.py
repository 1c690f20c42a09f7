"""Sparse and personalised federated learning as a PyTorch Lightning plug-in."""

from lightning_sparsefl.__about__ import __version__
from lightning_sparsefl.algorithms import (
    FedAvg,
    FedBABU,
    FedDIP,
    FedLPS,
    FedProx,
    FedSpa,
    HeteroFL,
    Local,
    PerFedMask,
    SplitMix,
)
from lightning_sparsefl.federated import FederatedAlgorithm, FederatedTrainer, Federation
from lightning_sparsefl.wire import export_sparse, load_sparse

__all__ = [
    "FedAvg",
    "FedBABU",
    "FedDIP",
    "FedLPS",
    "FedProx",
    "FedSpa",
    "FederatedAlgorithm",
    "FederatedTrainer",
    "Federation",
    "HeteroFL",
    "Local",
    "PerFedMask",
    "SplitMix",
    "__version__",
    "export_sparse",
    "load_sparse",
]
