"""Federated methods, one module for each paper."""

from lightning_sparsefl.algorithms.apfl import APFL
from lightning_sparsefl.algorithms.cs import CS
from lightning_sparsefl.algorithms.depthfl import DepthFL
from lightning_sparsefl.algorithms.dispfl import DisPFL
from lightning_sparsefl.algorithms.ditto import Ditto
from lightning_sparsefl.algorithms.fd import FD
from lightning_sparsefl.algorithms.fedavg import FedAvg
from lightning_sparsefl.algorithms.fedbabu import FedBABU
from lightning_sparsefl.algorithms.fedbn import FedBN
from lightning_sparsefl.algorithms.feddip import FedDIP
from lightning_sparsefl.algorithms.feddst import FedDST
from lightning_sparsefl.algorithms.feddyn import FedDyn
from lightning_sparsefl.algorithms.fedlps import FedLPS
from lightning_sparsefl.algorithms.fedmef import FedMef
from lightning_sparsefl.algorithms.fedmp import FedMP
from lightning_sparsefl.algorithms.fednova import FedNova
from lightning_sparsefl.algorithms.fedopt import FedOpt
from lightning_sparsefl.algorithms.fedp3 import FedP3
from lightning_sparsefl.algorithms.fedper import FedPer
from lightning_sparsefl.algorithms.fedpm import FedPM
from lightning_sparsefl.algorithms.fedprox import FedProx
from lightning_sparsefl.algorithms.fedrep import FedRep
from lightning_sparsefl.algorithms.fedrolex import FedRolex
from lightning_sparsefl.algorithms.fedrts import FedRTS
from lightning_sparsefl.algorithms.fedselect import FedSelect
from lightning_sparsefl.algorithms.fedspa import FedSpa
from lightning_sparsefl.algorithms.fiarse import FIARSE
from lightning_sparsefl.algorithms.fjord import FjORD
from lightning_sparsefl.algorithms.flasc import FLASC
from lightning_sparsefl.algorithms.flash import FLASH
from lightning_sparsefl.algorithms.hermes import Hermes
from lightning_sparsefl.algorithms.heterofl import HeteroFL
from lightning_sparsefl.algorithms.lgfedavg import LGFedAvg
from lightning_sparsefl.algorithms.local import Local
from lightning_sparsefl.algorithms.lotteryfl import LotteryFL
from lightning_sparsefl.algorithms.perfedavg import PerFedAvg
from lightning_sparsefl.algorithms.perfedmask import PerFedMask
from lightning_sparsefl.algorithms.pfedme import PFedMe
from lightning_sparsefl.algorithms.prunefl import PruneFL
from lightning_sparsefl.algorithms.prunetrain import PruneTrain
from lightning_sparsefl.algorithms.scaffold import SCAFFOLD
from lightning_sparsefl.algorithms.scalefl import ScaleFL
from lightning_sparsefl.algorithms.snip import SNIP
from lightning_sparsefl.algorithms.spafl import SpaFL
from lightning_sparsefl.algorithms.sparsyfed import SparsyFed
from lightning_sparsefl.algorithms.splitmix import SplitMix
from lightning_sparsefl.algorithms.ssfl import SSFL
from lightning_sparsefl.algorithms.subfedavg import SubFedAvg
from lightning_sparsefl.algorithms.subsampling import Subsampling

__all__ = [
    "APFL",
    "CS",
    "FD",
    "FIARSE",
    "FLASC",
    "FLASH",
    "SCAFFOLD",
    "SNIP",
    "SSFL",
    "DepthFL",
    "DisPFL",
    "Ditto",
    "FedAvg",
    "FedBABU",
    "FedBN",
    "FedDIP",
    "FedDST",
    "FedDyn",
    "FedLPS",
    "FedMP",
    "FedMef",
    "FedNova",
    "FedOpt",
    "FedP3",
    "FedPM",
    "FedPer",
    "FedProx",
    "FedRTS",
    "FedRep",
    "FedRolex",
    "FedSelect",
    "FedSpa",
    "FjORD",
    "Hermes",
    "HeteroFL",
    "LGFedAvg",
    "Local",
    "LotteryFL",
    "PFedMe",
    "PerFedAvg",
    "PerFedMask",
    "PruneFL",
    "PruneTrain",
    "ScaleFL",
    "SpaFL",
    "SparsyFed",
    "SplitMix",
    "SubFedAvg",
    "Subsampling",
]
