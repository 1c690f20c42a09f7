"""The federated engine: rounds, ranks, communication and storage, independent of the method."""

from lightning_sparsefl.federated.aggregation.privacy import Privacy
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, PlainMean, Reducer
from lightning_sparsefl.federated.aggregation.robust import CoordinateReducer, CoverageMedian, TrimmedMean
from lightning_sparsefl.federated.aggregation.server_optimizer import ServerOptimizer
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.federated.local.round_lr import ExponentialRoundLR, RoundLR, StepRoundLR
from lightning_sparsefl.federated.options import Federation
from lightning_sparsefl.federated.sampling.oort import Oort
from lightning_sparsefl.federated.sampling.refl import REFL
from lightning_sparsefl.federated.sampling.samplers import Candidates, CohortSampler, Seen, Uniform
from lightning_sparsefl.federated.tracking.progress_bar import RoundProgressBar
from lightning_sparsefl.federated.trainer import FederatedTrainer

__all__ = [
    "REFL",
    "Candidates",
    "Client",
    "CohortSampler",
    "CoordinateReducer",
    "CoverageMean",
    "CoverageMedian",
    "ExponentialRoundLR",
    "FederatedAlgorithm",
    "FederatedTrainer",
    "Federation",
    "Fleet",
    "Oort",
    "PlainMean",
    "Privacy",
    "Reducer",
    "RoundLR",
    "RoundProgressBar",
    "Seen",
    "ServerOptimizer",
    "StepRoundLR",
    "TrimmedMean",
    "Uniform",
]
