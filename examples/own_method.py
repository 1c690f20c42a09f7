"""Add a federated method: FedAvg whose server has momentum (FedAvgM, Hsu et al., arXiv:1909.06335)."""

from dataclasses import dataclass, replace

import lightning as L
import torch

from lightning_sparsefl import FedAvg, FederatedAlgorithm, FederatedTrainer, Federation
from lightning_sparsefl.data import Dirichlet, FederatedDigits
from lightning_sparsefl.models import MLP


@dataclass(frozen=True, kw_only=True)
class FedAvgM(FederatedAlgorithm):
    """FedAvg with server momentum. Its state is part of checkpoints, and all ranks compute the same."""

    momentum: float = 0.8
    """Share of the last step that is taken again, in [0, 1)."""

    def init(self, weights, fleet):
        state = super().init(weights, fleet)
        return replace(state, extra={"velocity": {name: torch.zeros_like(w) for name, w in weights.items()}})

    def aggregate(self, server, merged):
        mean = super().aggregate(server, merged).weights
        velocity = {
            name: self.momentum * v + mean[name] - server.weights[name] for name, v in server.extra["velocity"].items()
        }
        weights = {name: w + velocity[name] for name, w in server.weights.items()}
        return replace(server, weights=weights, extra={"velocity": velocity})


def accuracy(algorithm):
    L.seed_everything(0)
    data = FederatedDigits(num_clients=20, partition=Dirichlet(0.1), eval_split="test")
    federation = Federation(clients_per_round=5)
    trainer = FederatedTrainer(
        algorithm=algorithm, federation=federation, max_rounds=15, accelerator="cpu", devices=1, logger=False
    )
    return trainer.fit(MLP(num_classes=10, sample_shape=(1, 8, 8), lr=0.02), data)["global/test_acc"]


results = {type(method).__name__: accuracy(method) for method in (FedAvg(), FedAvgM())}
for name, result in results.items():
    print(f"{name:8} test accuracy {result:.3f}")
