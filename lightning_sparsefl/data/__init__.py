"""Partitions of a data set over clients, federated data modules, and data sets."""

from lightning_sparsefl.data.by_group import ByGroup
from lightning_sparsefl.data.clients import ClientDataModules
from lightning_sparsefl.data.dataset import FederatedDataset
from lightning_sparsefl.data.digits import FederatedDigits
from lightning_sparsefl.data.domainnet import FederatedDomainNet
from lightning_sparsefl.data.examples import CropFlip, Examples, FlipRotate, Normalize
from lightning_sparsefl.data.feature_shift import BrightnessShift, FeatureShift, NoiseShift, RotationShift
from lightning_sparsefl.data.federated import FederatedDataModule
from lightning_sparsefl.data.partition import IID, Dirichlet, Partition, Pathological, matching_test
from lightning_sparsefl.data.quantity_skew import QuantitySkew
from lightning_sparsefl.data.reddit import FederatedReddit
from lightning_sparsefl.data.synthetic import FederatedBlobs, FederatedBlobsOnDemand
from lightning_sparsefl.data.tiny_imagenet import FederatedTinyImageNet
from lightning_sparsefl.data.vision import (
    FederatedCIFAR10,
    FederatedCIFAR100,
    FederatedEMNISTLetters,
    FederatedFashionMNIST,
    FederatedMNIST,
)

__all__ = [
    "IID",
    "BrightnessShift",
    "ByGroup",
    "ClientDataModules",
    "CropFlip",
    "Dirichlet",
    "Examples",
    "FeatureShift",
    "FederatedBlobs",
    "FederatedBlobsOnDemand",
    "FederatedCIFAR10",
    "FederatedCIFAR100",
    "FederatedDataModule",
    "FederatedDataset",
    "FederatedDigits",
    "FederatedDomainNet",
    "FederatedEMNISTLetters",
    "FederatedFashionMNIST",
    "FederatedMNIST",
    "FederatedReddit",
    "FederatedTinyImageNet",
    "FlipRotate",
    "NoiseShift",
    "Normalize",
    "Partition",
    "Pathological",
    "QuantitySkew",
    "RotationShift",
    "matching_test",
]
