"""Sparse and personalised federated learning as a PyTorch Lightning plug-in.

The public names are imported on first use, so that reading a run folder or a help text does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_sparsefl.__about__ import __version__

if TYPE_CHECKING:
    from lightning_sparsefl.algorithms import (
        APFL,
        CS,
        FD,
        FIARSE,
        FLASC,
        FLASH,
        SCAFFOLD,
        SNIP,
        SSFL,
        DepthFL,
        DisPFL,
        Ditto,
        FedAvg,
        FedBABU,
        FedBN,
        FedDIP,
        FedDST,
        FedDyn,
        FedLPS,
        FedMef,
        FedMP,
        FedNova,
        FedOpt,
        FedP3,
        FedPer,
        FedPM,
        FedProx,
        FedRep,
        FedRolex,
        FedRTS,
        FedSelect,
        FedSpa,
        FjORD,
        Hermes,
        HeteroFL,
        LGFedAvg,
        Local,
        LotteryFL,
        PerFedAvg,
        PerFedMask,
        PFedMe,
        PruneFL,
        PruneTrain,
        ScaleFL,
        SpaFL,
        SparsyFed,
        SplitMix,
        SubFedAvg,
        Subsampling,
    )
    from lightning_sparsefl.federated import FederatedAlgorithm, FederatedTrainer, Federation
    from lightning_sparsefl.wire import export_sparse, load_sparse

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
    "FederatedAlgorithm",
    "FederatedTrainer",
    "Federation",
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
    "__version__",
    "export_sparse",
    "load_sparse",
]
_PACKAGES = (
    *("algorithms", "callbacks", "cli", "cost", "data", "errors", "federated", "models", "report", "seeds", "sparse"),
    *("testing", "types", "wire"),
)
_HOMES = {
    **dict.fromkeys(("FederatedAlgorithm", "FederatedTrainer", "Federation"), "federated"),
    **dict.fromkeys(("export_sparse", "load_sparse"), "wire"),
}
"""Packages of the names that are not algorithms."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'algorithms')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES]
