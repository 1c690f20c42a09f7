"""Partitions of a data set over clients, federated data modules, and data sets."""

from lightning_sparsefl.data.clients import ClientDataModules
from lightning_sparsefl.data.digits import FederatedDigits
from lightning_sparsefl.data.examples import CropFlip, Examples, Normalize
from lightning_sparsefl.data.federated import FederatedDataModule
from lightning_sparsefl.data.partition import IID, Dirichlet, Partition, Pathological, matching_test
from lightning_sparsefl.data.synthetic import FederatedBlobs, FederatedBlobsOnDemand
from lightning_sparsefl.data.vision import (
    FederatedCIFAR10,
    FederatedCIFAR100,
    FederatedEMNISTLetters,
    FederatedFashionMNIST,
    FederatedMNIST,
)

__all__ = [
    "IID",
    "ClientDataModules",
    "CropFlip",
    "Dirichlet",
    "Examples",
    "FederatedBlobs",
    "FederatedBlobsOnDemand",
    "FederatedCIFAR10",
    "FederatedCIFAR100",
    "FederatedDataModule",
    "FederatedDigits",
    "FederatedEMNISTLetters",
    "FederatedFashionMNIST",
    "FederatedMNIST",
    "Normalize",
    "Partition",
    "Pathological",
    "matching_test",
]
